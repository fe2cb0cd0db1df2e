"""An artifact of coded singular directions: base plus product, described by itself, and never half read."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.delta.models import damaged_copy, export, make_pair
from tests.delta.test_vocabulary import grow
from zen_train.delta import DeltaArtifact, FolderSource, iter_applied, verify_artifact
from zen_train.delta.export_options import ExportOptions
from zen_train.delta.pairing import pair_tensors
from zen_train.delta.plan import largest_entries, upper_bytes
from zen_train.delta.rescale import rescale_artifact
from zen_train.errors import DeltaError

ARCHITECTURES = ["llama-tied", "gpt2", "mixtral"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_artifact_is_base_plus_product_of_its_directions(tmp_path, architecture):
    pair = make_pair(tmp_path, architecture)
    base, tuned = FolderSource(pair.base), FolderSource(pair.tuned)
    export(pair, tmp_path / "delta", embedding="sign", code="directions", direction_bits=2.0)
    report = verify_artifact(tmp_path / "delta", base=base, tuned=tuned)
    artifact = DeltaArtifact.open(tmp_path / "delta")
    assert artifact.config.format_version == "1.2"
    assert "coded singular directions" in (tmp_path / "delta" / "README.md").read_text()
    found, lost, total = 0, 0.0, 0.0
    for name, weight in iter_applied(artifact, base):
        entry, wanted = artifact.entry(name), tuned.get(name).float()
        origin = base.get(artifact.base_name(name)).float()
        if artifact.config.tensors[name].kind != "tied":
            total += float((wanted - origin).double().square().sum())
            lost += float((wanted - weight).double().square().sum())
        if entry.kind != "directions":
            assert len(entry.shape) < 2
            continue
        found += 1
        torch.testing.assert_close(weight, origin + artifact.delta(name), rtol=0, atol=0)
        error = (wanted - weight).norm() / (wanted - origin).norm()
        assert entry.relative_error == pytest.approx(float(error), rel=1e-3)
        rows, columns = entry.shape[-2:]
        assert sum(entry.directions) * (rows + columns) + 32 * entry.directions[0] <= 2 * rows * columns
    assert found > 5
    assert report.relative_error == pytest.approx((lost / total) ** 0.5, rel=1e-3)


def test_an_export_twice_is_the_same_artifact(tmp_path):
    pair = make_pair(tmp_path)
    hashes = {export(pair, tmp_path / name, code="directions").content_hash for name in ("a", "b")}
    assert len(hashes) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_bad_matrix_is_named_from_whatever_thread_and_nothing_is_left(tmp_path, threads):
    pair, name = make_pair(tmp_path), "model.layers.1.mlp.down_proj.weight"
    weights = load_file(pair.tuned / "model.safetensors")
    weights[name][3, 4] = float("nan")
    save_file(weights, pair.tuned / "model.safetensors", metadata={"format": "pt"})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(DeltaError, match=rf"{name}: .*NaN or infinite"):
            export(pair, tmp_path / "delta", code="directions")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert not (tmp_path / "delta").exists()


def test_a_matrix_too_small_for_one_direction_and_a_grown_one_keep_signs(tmp_path):
    """44 by 32: 0.1 bits a weight are 140, and a direction of one bit takes 76 + 32; 32 by 16: 51 of 80."""
    pair = make_pair(tmp_path)
    grow(pair)
    export(pair, tmp_path / "delta", embedding="sign", code="directions", direction_bits=0.1)
    tensors = DeltaArtifact.open(tmp_path / "delta").config.tensors
    assert tensors["model.layers.0.mlp.up_proj.weight"].directions == (1,)
    assert tensors["model.layers.0.self_attn.k_proj.weight"].kind == "sign"
    assert tensors["model.embed_tokens.weight"].kind == "rows"
    assert tensors["model.embed_tokens.weight"].planes == 1
    verify_artifact(tmp_path / "delta", base=FolderSource(pair.base), tuned=FolderSource(pair.tuned))


def test_a_matrix_beyond_its_bound_goes_the_way_of_signs(tmp_path):
    """Noise has no directions: of most matrices one bit loses more than signs do, and 0.68 is between both."""

    def kinds(name, **bounds):
        export(pair, tmp_path / name, code="directions", embedding="sign", **bounds)
        tensors = DeltaArtifact.open(tmp_path / name).config.tensors.values()
        return Counter(entry.kind for entry in tensors if len(entry.shape) > 1 and entry.kind != "tied")

    pair = make_pair(tmp_path)
    assert set(kinds("free")) == {"directions"}
    bound = kinds("delta", matrix_max_relative_error=0.68)
    assert bound["sign"] > bound["directions"]
    assert bound["dense"] == 0
    export(pair, tmp_path / "dense", code="directions", matrix_max_relative_error=0.1, embedding="dense")
    tensors = DeltaArtifact.open(tmp_path / "dense").config.tensors
    assert {entry.kind for entry in tensors.values() if entry.kind != "tied"} == {"dense"}


@pytest.mark.parametrize("part", ["right", "left", "scales"])
def test_a_damaged_part_is_found(tmp_path, part):
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta", embedding="sign", code="directions", direction_bits=3.0)
    damaged_copy(tmp_path / "delta", tmp_path / "damaged", "model.layers.0.mlp.up_proj.weight", part)
    for read in (
        lambda: dict(iter_applied(DeltaArtifact.open(tmp_path / "damaged"), FolderSource(pair.base))),
        lambda: verify_artifact(tmp_path / "damaged"),
    ):
        with pytest.raises(DeltaError, match=rf"\.{part} has digest"):
            read()


@pytest.mark.parametrize(
    "change",
    [
        {"directions": [0]},
        {"directions": []},
        {"directions": [2, 3]},
        {"directions": [True]},
        {"directions": "1"},
        {"directions": None},
        {"directions": [2000]},
        {"kind": "sign"},
        {"kind": "same"},
        {"planes": 1, "scale": "row"},
        {"rank": 2},
        {"base_rows": 3},
    ],
    ids=str,
)
def test_another_description_than_the_parts_is_refused(tmp_path, change):
    export(make_pair(tmp_path), tmp_path / "delta", embedding="sign", code="directions")
    path = tmp_path / "delta" / "delta_config.json"
    document = json.loads(path.read_text())
    name = next(name for name, entry in document["tensors"].items() if entry["kind"] == "directions")
    document["tensors"][name] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(DeltaError, match=f"{name}|content_hash"):
        DeltaArtifact.open(tmp_path / "delta")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"code": "waves"}, "code='waves' is unknown; allowed: signs, directions"),
        ({"direction_bits": 0.0}, r"direction_bits=0\.0"),
        ({"code": "directions", "planes": 2}, "planes=1, found 2"),
        ({"code": "directions", "low_rank": 1}, "low_rank=0, found 1"),
        ({"code": "directions", "scale": "matrix"}, "scale=row, found 'matrix'"),
    ],
    ids=lambda part: str(part) if isinstance(part, dict) else None,
)
def test_options_that_mean_nothing_are_refused(tmp_path, options, message):
    with pytest.raises(DeltaError, match=message):
        export(make_pair(tmp_path), tmp_path / "delta", **options)
    assert not (tmp_path / "delta").exists()


def test_other_scales_for_directions_are_refused(tmp_path):
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta", embedding="sign", code="directions")
    artifact, name = DeltaArtifact.open(tmp_path / "delta"), "model.layers.0.mlp.up_proj.weight"
    base, tuned = FolderSource(pair.base), FolderSource(pair.tuned)
    with pytest.raises(DeltaError, match=r"coded directions.*code=signs"):
        rescale_artifact(
            artifact, tmp_path / "other", {name: [torch.ones(44)]}, base=base, tuned=tuned, provenance={}
        )


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("bits", [0.1, 1.0, 7.0])
def test_room_and_disk_that_are_asked_for_in_advance_suffice(tmp_path, architecture, bits):
    pair = make_pair(tmp_path, architecture)
    base, tuned = FolderSource(pair.base), FolderSource(pair.tuned)
    report = export(pair, tmp_path / "delta", embedding="sign", code="directions", direction_bits=bits)
    artifact = DeltaArtifact.open(tmp_path / "delta")
    options = ExportOptions(code="directions", direction_bits=bits, embedding="sign")
    pairs, tied = pair_tensors(base, tuned)
    assert sum(report.bytes_by_kind.values()) <= upper_bytes(pairs, options)
    largest = largest_entries(pairs, tied, options, base.config["model_type"])
    for name, entry in artifact.config.tensors.items():
        assert len(json.dumps(entry.to_json())) <= len(json.dumps(largest[name].to_json()))


def test_counts_that_grow_from_plane_to_plane_are_refused(tmp_path):
    export(make_pair(tmp_path), tmp_path / "delta", embedding="sign", code="directions", direction_bits=3.0)
    path = tmp_path / "delta" / "delta_config.json"
    document = json.loads(path.read_text())
    entry = next(entry for entry in document["tensors"].values() if len(set(entry.get("directions", []))) > 1)
    entry["directions"].reverse()
    path.write_text(json.dumps(document))
    with pytest.raises(DeltaError, match="none above the one before"):
        DeltaArtifact.open(tmp_path / "delta")
