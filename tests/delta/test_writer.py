"""What becomes of each parameter, what the report says, and everything an export refuses."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.delta.models import Pair, export, make_pair
from zen_train.delta import (
    BaseInfo,
    DeltaArtifact,
    FolderSource,
    LazyTensor,
    StateDictSource,
    apply_delta,
    export_order,
    fingerprint,
    iter_applied,
    replace_card,
    verify_artifact,
    write_artifact,
)
from zen_train.errors import DeltaError, OutputError


def write(folder, base, tuned, **options):
    """Export two state dicts."""
    base, tuned = StateDictSource(base, label="base A"), StateDictSource(tuned, label="tuned B")
    info = BaseInfo(name="A", fingerprint=fingerprint(base), vocab_size=4, dtype="F32", tied=False)
    return write_artifact(
        folder, base=base, tuned=tuned, base_info=info, **{"variant": "v", "step": 1} | options
    )


def kinds(report):
    return {row.name: row.kind for row in report.rows}


def moved(tensor, size=0.01, seed=3):
    return tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * size


def base_tensors():
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(40, 16),
        "layer.weight": torch.randn(24, 16),
        "layer.bias": torch.randn(24),
        "frozen.weight": torch.randn(16, 16),
        "tiny.weight": torch.randn(5, 1),
        "lm_head.weight": torch.randn(40, 16),
        "position_ids": torch.arange(9),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 16),
    }


def tuned_tensors():
    return {
        name: tensor.clone() if name in ("frozen.weight", "position_ids") else moved(tensor)
        for name, tensor in base_tensors().items()
    }


def test_every_kind_of_parameter_has_its_form(tmp_path):
    report = write(tmp_path / "d", base_tensors(), tuned_tensors())
    assert kinds(report) == {
        "model.embed_tokens.weight": "sign",
        "layer.weight": "sign",
        "layer.bias": "dense",
        "frozen.weight": "same",
        "tiny.weight": "dense",  # 5 x (1 + 4) packed bytes are more than 20 plain ones
        "lm_head.weight": "sign",
        "position_ids": "same",
        "scalar": "dense",
        "empty": "same",
    }
    assert report.coverage == 1.0
    assert report.bytes_by_kind == {
        "sign": 104 * (2 + 4),
        "directions": 0,
        "dense": 24 * 4 + 20 + 4,
        "same": 0,
        "rows": 0,
        "tied": 0,
    }
    applied = dict(iter_applied(DeltaArtifact.open(tmp_path / "d"), StateDictSource(base_tensors())))
    tuned = tuned_tensors()
    for name in ("layer.bias", "frozen.weight", "tiny.weight", "position_ids", "scalar", "empty"):
        assert torch.equal(applied[name], tuned[name]), name


def test_sizes_in_the_report_are_those_on_disk(tmp_path):
    pair = make_pair(tmp_path)
    sidecar = tmp_path / "tokenizer.json"
    sidecar.write_text("{}")
    report = export(pair, tmp_path / "delta", sidecars=[sidecar])
    files = {path.name: path.stat().st_size for path in (tmp_path / "delta").iterdir()}
    assert report.bytes_total == sum(files.values())
    assert report.bytes_weights == files["delta.safetensors"] + files["delta_config.json"]
    assert sum(report.bytes_by_kind.values()) == sum(row.size_bytes for row in report.rows)
    parameters = sum(t.numel() for t in load_file(pair.tuned / "model.safetensors").values())
    assert report.bf16_model_bytes == 2 * parameters
    assert report.ratio_fp32 == pytest.approx(4 * parameters / report.bytes_weights)


def test_header_room_is_not_wasted(tmp_path):
    """Room for the header is reserved before digests and errors are known; it must fit, closely."""
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta")
    raw = (tmp_path / "delta" / "delta.safetensors").read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    padding = header_bytes - len(raw[8 : 8 + header_bytes].rstrip(b" "))
    assert (8 + header_bytes) % 64 == 0
    assert padding < 0.15 * header_bytes


def test_safetensors_library_reads_the_file(tmp_path):
    """safetensors #278: metadata is text to text, one key with the same JSON as delta_config.json."""
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta")
    with safe_open(tmp_path / "delta" / "delta.safetensors", "pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
        sign = file.get_tensor("model.layers.0.mlp.down_proj.weight.sign")
    assert set(metadata) == {"format", "delta_config"}
    assert json.loads(metadata["delta_config"]) == json.loads(
        (tmp_path / "delta" / "delta_config.json").read_text()
    )
    artifact = DeltaArtifact.open(tmp_path / "delta")
    assert torch.equal(artifact.part("model.layers.0.mlp.down_proj.weight", "sign"), sign)
    assert "model.norm.weight.dense" in names


def test_delta_without_a_change_is_a_valid_file(tmp_path):
    """safetensors #466: an artifact may store no tensor at all."""
    report = write(tmp_path / "d", base_tensors(), base_tensors())
    assert set(kinds(report).values()) == {"same"}
    assert "the delta is empty" in report.warnings[0]
    assert report.relative_error == 0.0
    verify_artifact(
        tmp_path / "d", base=StateDictSource(base_tensors()), tuned=StateDictSource(base_tensors())
    )
    applied = dict(iter_applied(DeltaArtifact.open(tmp_path / "d"), StateDictSource(base_tensors())))
    assert all(torch.equal(applied[name], tensor) for name, tensor in base_tensors().items())
    with safe_open(tmp_path / "d" / "delta.safetensors", "pt") as file:
        assert list(file.keys()) == []


def sparse_embedding():
    """Few elements of each row move: one bit describes that badly (relative error near 1)."""
    tuned = base_tensors()
    tuned["model.embed_tokens.weight"][:, 0] += 1.0
    return tuned


@pytest.mark.parametrize(("rule", "kind"), [("auto", "dense"), ("sign", "sign"), ("dense", "dense")])
def test_embedding_beyond_its_bound_is_stored_whole(tmp_path, rule, kind):
    report = write(tmp_path / "d", base_tensors(), sparse_embedding(), embedding=rule)
    assert kinds(report)["model.embed_tokens.weight"] == kind
    assert kinds(report)["lm_head.weight"] == "same"


def test_embedding_bound_can_be_moved(tmp_path):
    error = (1 - 1 / 16) ** 0.5  # one of 16 columns moved: alpha = 1/16
    for bound, kind in ((error + 0.01, "sign"), (error - 0.01, "dense")):
        report = write(
            tmp_path / "d",
            base_tensors(),
            sparse_embedding(),
            embedding_max_relative_error=bound,
            overwrite=True,
        )
        assert kinds(report)["model.embed_tokens.weight"] == kind


def test_matrix_bound_is_off_unless_asked_for(tmp_path):
    tuned = base_tensors()
    tuned["layer.weight"][:, 0] += 1.0
    assert kinds(write(tmp_path / "a", base_tensors(), tuned))["layer.weight"] == "sign"
    report = write(tmp_path / "b", base_tensors(), tuned, matrix_max_relative_error=0.8)
    assert kinds(report)["layer.weight"] == "dense"


def test_large_dense_tensor_keeps_the_delta_when_the_base_dtype_would_lose_it(tmp_path):
    """A bfloat16 copy of float32 weights would round small changes away; then float32 is stored."""
    base = {
        "model.embed_tokens.weight": torch.randn(
            300, 256, generator=torch.Generator().manual_seed(1)
        ).bfloat16()
    }
    near = {"model.embed_tokens.weight": moved(base["model.embed_tokens.weight"].float(), 1e-4)}
    far = {"model.embed_tokens.weight": moved(base["model.embed_tokens.weight"].float(), 1.0)}
    for tuned, dtype in ((near, torch.float32), (far, torch.bfloat16)):
        report = write(tmp_path / "d", base, tuned, embedding="dense", overwrite=True)
        stored = DeltaArtifact.open(tmp_path / "d").part("model.embed_tokens.weight", "dense")
        assert stored.dtype == dtype
        assert report.rows[0].relative_error <= 0.05
        verify_artifact(tmp_path / "d", base=StateDictSource(base), tuned=StateDictSource(tuned))


def test_bfloat16_training_is_warned_about(tmp_path):
    """formulas.md: an exactly zero element is not free of noise at one bit."""
    tuned = tuned_tensors()
    tuned["layer.weight"][:, ::2] = base_tensors()["layer.weight"][:, ::2]
    report = write(tmp_path / "d", base_tensors(), tuned)
    assert len(report.warnings) == 1
    assert "layer.weight: 50%" in report.warnings[0]
    assert {row.name: row.zeros for row in report.rows}["layer.weight"] == pytest.approx(0.5)
    assert write(tmp_path / "e", base_tensors(), tuned_tensors()).warnings == ()


def test_rows_that_did_not_move_are_not_warned_about(tmp_path):
    """Unused vocabulary rows are exact: their scale is zero."""
    tuned = tuned_tensors()
    tuned["model.embed_tokens.weight"][:30] = base_tensors()["model.embed_tokens.weight"][:30]
    assert write(tmp_path / "d", base_tensors(), tuned).warnings == ()


@pytest.mark.parametrize("scale", ["row", "matrix"])
@pytest.mark.parametrize("planes", [1, 3])
def test_scales_and_planes_are_recorded_and_read_back(tmp_path, scale, planes):
    pair = make_pair(tmp_path)
    report = export(pair, tmp_path / "delta", scale=scale, planes=planes)
    artifact = DeltaArtifact.open(tmp_path / "delta")
    entry = artifact.entry("model.layers.1.self_attn.q_proj.weight")
    assert (entry.scale, entry.planes) == (scale, planes)
    assert artifact.part("model.layers.1.self_attn.q_proj.weight", "alpha").shape == (
        (32,) if scale == "row" else (1,)
    )
    verify_artifact(tmp_path / "delta", base=FolderSource(pair.base), tuned=FolderSource(pair.tuned))
    assert report.relative_error == pytest.approx({1: 0.6, 3: 0.2}[planes], abs=0.1)


def test_planes_can_differ_by_tensor_and_zero_drops_a_delta(tmp_path):
    pair = make_pair(tmp_path)
    base, tuned = FolderSource(pair.base), FolderSource(pair.tuned)
    up, down, gate = (f"model.layers.0.mlp.{which}_proj.weight" for which in ("up", "down", "gate"))
    export(pair, tmp_path / "delta", planes={up: 0, down: 3})
    artifact = DeltaArtifact.open(tmp_path / "delta")
    assert [artifact.entry(name).planes for name in (up, down, gate)] == [0, 3, 1]
    assert (artifact.entry(up).kind, artifact.entry(up).relative_error) == ("same", 1.0)
    verify_artifact(tmp_path / "delta", base=base, tuned=tuned)
    applied = dict(iter_applied(artifact, base))
    assert torch.equal(applied[up], base.get(up).float())
    left, whole = applied[down] - tuned.get(down), base.get(down).float() - tuned.get(down)
    assert left.norm() < 0.3 * whole.norm()


def test_more_planes_are_closer(tmp_path):
    pair = make_pair(tmp_path)
    errors = [export(pair, tmp_path / f"d{n}", planes=n).relative_error for n in (1, 2, 3)]
    assert errors[0] > 1.4 * errors[1] > 1.9 * errors[2]


def test_shards_have_an_index_like_hugging_face(tmp_path):
    pair = make_pair(tmp_path)
    one = export(pair, tmp_path / "one")
    many = export(pair, tmp_path / "many", max_shard_bytes=1000)
    assert many.content_hash == one.content_hash
    index = json.loads((tmp_path / "many" / "delta.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(many.bytes_by_kind.values())
    shards = sorted(set(index["weight_map"].values()))
    assert shards[0] == f"delta-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 3
    for shard in shards:
        data = load_file(tmp_path / "many" / shard)
        assert len(data) == 1 or sum(t.numel() * t.element_size() for t in data.values()) <= 1000
    verify_artifact(tmp_path / "many", base=FolderSource(pair.base), tuned=FolderSource(pair.tuned))


def test_export_twice_gives_the_same_bytes(tmp_path):
    pair = make_pair(tmp_path)
    for name in ("a", "b"):
        export(pair, tmp_path / name, provenance={"merge": [{"step": 20, "method": "svd_average"}]})
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_content_hash_is_about_weights_only(tmp_path):
    pair = make_pair(tmp_path)
    first = export(pair, tmp_path / "a", provenance={"note": "one"}).content_hash
    assert export(pair, tmp_path / "b", variant="other", step=9).content_hash == first
    assert export(pair, tmp_path / "c", scale="matrix").content_hash != first
    other = make_pair(tmp_path / "other", seed=5)
    assert export(other, tmp_path / "d").content_hash != first


def test_provenance_sidecars_and_card_travel_along(tmp_path):
    pair = make_pair(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"v": 1}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    export(
        pair,
        tmp_path / "delta",
        provenance={"licence": "CC0", "merges": [20, 40]},
        sidecars=[tmp_path / "tokenizer.json", str(tmp_path / "chat_template.jinja")],
        card="# A card\n",
    )
    artifact = DeltaArtifact.open(tmp_path / "delta")
    assert artifact.config.provenance == {"licence": "CC0", "merges": [20, 40]}
    assert artifact.config.base.licence == "CC0-1.0"
    assert set(artifact.config.files) == {"tokenizer.json", "chat_template.jinja"}
    assert (tmp_path / "delta" / "README.md").read_text() == "# A card\n"
    replace_card(tmp_path / "delta", "# Measured\n")
    assert (tmp_path / "delta" / "README.md").read_text() == "# Measured\n"
    verify_artifact(tmp_path / "delta")
    apply_delta(artifact, pair.base, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"v": 1}'
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    with pytest.raises(OutputError, match="no delta artifact"):
        replace_card(tmp_path, "# Nowhere\n")


def test_tokenizers_of_base_and_variant_are_not_mixed(tmp_path):
    pair = make_pair(tmp_path)
    for name in ("tokenizer.json", "special_tokens_map.json", "LICENSE"):
        (pair.base / name).write_text(f"base {name}")
    (tmp_path / "tokenizer.json").write_text("variant")
    export(pair, tmp_path / "with", sidecars=[tmp_path / "tokenizer.json"])
    export(pair, tmp_path / "without")
    apply_delta(DeltaArtifact.open(tmp_path / "with"), pair.base, tmp_path / "a")
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "variant"
    assert not (tmp_path / "a" / "special_tokens_map.json").exists()
    assert (tmp_path / "a" / "LICENSE").read_text() == "base LICENSE"
    apply_delta(DeltaArtifact.open(tmp_path / "without"), pair.base, tmp_path / "b")
    assert (tmp_path / "b" / "special_tokens_map.json").read_text() == "base special_tokens_map.json"
    assert not (tmp_path / "b" / "README.md").exists()


def test_progress_is_told_for_every_parameter(tmp_path):
    seen = []
    report = write(
        tmp_path / "d", base_tensors(), tuned_tensors(), on_tensor=lambda row: seen.append(row.name)
    )
    assert seen == [row.name for row in report.rows]


def test_tuned_tensors_are_read_once_in_export_order(tmp_path):
    """Sharded parameters are gathered together by all ranks, so the order is part of the contract."""
    calls = []

    def lazy(name, tensor):
        spec = StateDictSource({name: tensor}).spec(name)
        return LazyTensor(spec, lambda: (calls.append(name), tensor)[1])

    tuned = StateDictSource({name: lazy(name, tensor) for name, tensor in reversed(tuned_tensors().items())})
    base = StateDictSource(base_tensors())
    info = BaseInfo(name="A", fingerprint=fingerprint(base), vocab_size=4, dtype="F32", tied=False)
    write_artifact(tmp_path / "d", base=base, tuned=tuned, base_info=info, variant="v", step=1)
    assert calls == export_order(tuned)
    assert calls[-1] == "lm_head.weight"


def test_exporting_leaves_random_state_and_inputs_alone(tmp_path):
    base, tuned = base_tensors(), tuned_tensors()
    state = torch.random.get_rng_state()
    write(tmp_path / "d", base, tuned, planes=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tuned[name], tensor) for name, tensor in tuned_tensors().items())


def with_change(name, value):
    tensors = tuned_tensors()
    tensors[name] = value
    return tensors


def without(name):
    tensors = tuned_tensors()
    del tensors[name]
    return tensors


@pytest.mark.parametrize(
    ("tuned", "message"),
    [
        (without("layer.weight"), r"layer.weight \(1 in all\) is in the base and not in the tuned model"),
        (
            with_change("extra.weight", torch.ones(2, 2)),
            r"extra.weight \(1 in all\) is in the tuned model and not",
        ),
        (
            with_change("layer.weight", torch.ones(24, 32)),
            r"layer.weight has shape \[24, 32\] in the tuned model and \[24, 16\] in the base",
        ),
        (
            with_change("layer.weight", torch.ones(25, 16)),
            r"layer.weight has shape \[25, 16\] .* only a vocabulary may grow",
        ),
        (
            with_change("model.embed_tokens.weight", torch.ones(39, 16)),
            r"embed_tokens.weight has shape \[39, 16\] in the tuned model and \[40, 16\] in the base",
        ),
        (
            with_change("layer.weight", torch.full((24, 16), float("nan"))),
            "layer.weight: the tuned tensor holds 384 NaN",
        ),
        (
            with_change("layer.bias", torch.full((24,), float("inf"))),
            "layer.bias: it holds NaN or infinite values",
        ),
    ],
)
def test_model_that_does_not_fit_is_refused_and_nothing_is_written(tmp_path, tuned, message):
    """mergekit #211, #324: the error names the tensor and both shapes."""
    with pytest.raises(DeltaError, match=message) as error:
        write(tmp_path / "d", base_tensors(), tuned)
    assert "base A" in str(error.value)
    assert "tuned B" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_base_that_is_not_the_one_described_is_refused(tmp_path):
    one, two = make_pair(tmp_path / "one", seed=1), make_pair(tmp_path / "two", seed=2)
    with pytest.raises(DeltaError, match="another base"):
        write_artifact(
            tmp_path / "delta",
            base=FolderSource(two.base),
            tuned=FolderSource(two.tuned),
            base_info=BaseInfo.from_folder(one.base),
            variant="v",
            step=1,
        )
    assert not (tmp_path / "delta").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "column"}, "scale='column' is unknown; allowed: row, matrix"),
        ({"embedding": "auot"}, "embedding='auot' is unknown; allowed: auto, sign, dense"),
        ({"planes": 0}, "planes=0 is not possible"),
        ({"transposed": "layer.weight"}, "collection of parameter names"),
        ({"provenance": {"loss": float("nan")}}, "cannot be written as JSON"),
        ({"provenance": {"config": object()}}, "cannot be written as JSON"),
        ({"sidecars": ["absent.json"]}, "absent.json is not a file"),
    ],
)
def test_bad_option_is_refused_and_nothing_is_written(tmp_path, options, message):
    with pytest.raises(DeltaError, match=message):
        write(tmp_path / "d", base_tensors(), tuned_tensors(), **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["tokenizer.pkl", "README.md", "delta_config.json", "delta.safetensors", ".hidden"]
)
def test_sidecar_with_a_forbidden_name_is_refused(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(DeltaError, match=name):
        write(tmp_path / "d", base_tensors(), tuned_tensors(), sidecars=[tmp_path / name])


def test_sidecar_given_twice_is_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(folder)
    sidecars = [tmp_path / "a" / "tokenizer.json", tmp_path / "b" / "tokenizer.json"]
    with pytest.raises(DeltaError, match=r"tokenizer.json is given twice"):
        write(tmp_path / "d", base_tensors(), tuned_tensors(), sidecars=sidecars)


def test_integer_tensor_that_changed_is_replaced_bit_for_bit(tmp_path):
    tuned = with_change("position_ids", torch.arange(9).flip(0))
    assert kinds(write(tmp_path / "d", base_tensors(), tuned))["position_ids"] == "dense"
    applied = dict(iter_applied(DeltaArtifact.open(tmp_path / "d"), StateDictSource(base_tensors())))
    assert applied["position_ids"].tolist() == list(range(8, -1, -1))


def test_odd_tensors_pass_through_a_model_folder(tmp_path):
    """Scalars, integers and empty tensors, and a configuration with an infinity, as Mamba's has."""
    for folder, tensors in (("base", base_tensors()), ("tuned", tuned_tensors())):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text('{"vocab_size": 40, "limits": [0.0, Infinity]}')
    export(Pair(tmp_path / "base", tmp_path / "tuned"), tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    for dtype in ("float32", "bfloat16"):
        apply_delta(artifact, tmp_path / "base", tmp_path / dtype, dtype=dtype)
        found = FolderSource(tmp_path / dtype)
        assert found.get("position_ids").tolist() == list(range(9))
        assert found.get("scalar").dtype == getattr(torch, dtype)
        assert found.spec("empty").shape == (0, 16)
        assert found.config["limits"] == [0.0, float("inf")]


def test_half_precision_masters_are_exported_from_their_values(tmp_path):
    """A fine-tune saved in bfloat16 loses nothing more at export."""
    pair = make_pair(tmp_path)
    rounded = {n: t.bfloat16() for n, t in load_file(pair.tuned / "model.safetensors").items()}
    save_file(rounded, pair.tuned / "model.safetensors", metadata={"format": "pt"})
    export(pair, tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    dense = artifact.part("model.norm.weight", "dense")
    assert dense.dtype == torch.bfloat16
    assert torch.equal(dense, rounded["model.norm.weight"])
