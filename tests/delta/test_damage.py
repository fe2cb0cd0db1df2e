"""Damaged, unsafe and foreign artifacts: every region of every file, each refused with a message, nothing
written.
"""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.delta.models import export, make_pair
from zen_train.delta import (
    DeltaArtifact,
    FolderSource,
    StateDictSource,
    apply_delta,
    iter_applied,
    tensor_digest,
    verify_artifact,
)
from zen_train.delta.strict_json import compact, readable
from zen_train.errors import DeltaError

LAYER = "model.layers.0.mlp.down_proj.weight"  # [32, 44]: 6 bytes a row, 4 padding bits


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A pair and its artifact, never changed."""
    folder = tmp_path_factory.mktemp("original")
    pair = make_pair(folder)
    (folder / "tokenizer.json").write_text('{"tokenizer": true}')
    export(pair, folder / "delta", sidecars=[folder / "tokenizer.json"])
    export(pair, folder / "sharded", max_shard_bytes=2000)
    return folder, pair


@pytest.fixture
def copy(original, tmp_path):
    """A fresh copy of the artifact to damage, its pair, and a function that says what refuses it."""
    folder, pair = original
    shutil.copytree(folder / "delta", tmp_path / "delta")
    shutil.copytree(folder / "sharded", tmp_path / "sharded")
    return tmp_path, pair


def refuse(folder, pair, message):
    """The artifact is refused by verify and by apply, and apply leaves nothing behind."""
    with pytest.raises(DeltaError, match=message):
        verify_artifact(folder)
    out = folder.parent / "out"
    with pytest.raises(DeltaError, match=message):
        apply_delta(DeltaArtifact.open(folder), pair.base, out)
    assert not out.exists()
    assert not list(folder.parent.glob(".*partial"))


def edit(folder, change, *, both=True):
    """Change the configuration, in the file and (unless told otherwise) in the metadata copy, hashes made
    to fit.
    """
    path = folder / "delta_config.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(readable(document))
    if both:
        weights = folder / "delta.safetensors"
        tensors = load_file(weights)
        save_file(tensors, weights, metadata={"format": "pt", "delta_config": compact(document)})


def test_intact_artifact_is_accepted(copy):
    folder, pair = copy
    report = verify_artifact(folder / "delta", base=FolderSource(pair.base), tuned=FolderSource(pair.tuned))
    assert report.base_checked
    assert report.figures_checked
    assert report.coverage == 1.0
    edit(folder / "delta", lambda document: None)  # the helper itself does no damage
    verify_artifact(folder / "delta")


def test_every_flipped_byte_of_the_weight_file_is_found(copy):
    """One flipped bit in any region (length, JSON, metadata, padding, signs, scales, dense) must go red."""
    folder, _ = copy
    path = folder / "delta" / "delta.safetensors"
    raw = bytearray(path.read_bytes())
    step = max(1, len(raw) // 400)
    for position in [*range(16), *range(16, len(raw), step), len(raw) - 1]:
        raw[position] ^= 1 << (position % 8)
        path.write_bytes(raw)
        with pytest.raises(DeltaError):
            verify_artifact(folder / "delta")
        raw[position] ^= 1 << (position % 8)
    path.write_bytes(raw)
    verify_artifact(folder / "delta")


def test_every_flipped_byte_of_the_configuration_is_found(copy):
    folder, _ = copy
    path = folder / "delta" / "delta_config.json"
    raw = bytearray(path.read_bytes())
    step = max(1, len(raw) // 300)
    for position in range(0, len(raw), step):
        if chr(raw[position]) in " \n":
            continue  # white space between values carries nothing
        raw[position] ^= 2
        path.write_bytes(raw)
        with pytest.raises(DeltaError):
            verify_artifact(folder / "delta")
        raw[position] ^= 2


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, -1, -40])
def test_truncated_file_is_refused(copy, cut):
    folder, pair = copy
    path = folder / "delta" / "delta.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    refuse(folder / "delta", pair, "truncated|header")


def test_trailing_bytes_are_refused(copy):
    folder, pair = copy
    with open(folder / "delta" / "delta.safetensors", "ab") as file:
        file.write(b"\0")
    refuse(folder / "delta", pair, "1 trailing bytes")


@pytest.mark.parametrize("part", ["sign", "alpha"])
def test_flipped_bit_in_a_tensor_is_named(copy, part):
    folder, pair = copy
    _change_tensor(folder / "delta", f"{LAYER}.{part}", lambda raw: raw.__setitem__(0, raw[0] ^ 1))
    refuse(folder / "delta", pair, f"{LAYER}.{part} has digest .* expected")


def _change_tensor(folder, stored, change, *, fit_digest=False):
    """Change a stored tensor's bytes; with `fit_digest` the configuration is made to agree."""
    path = folder / "delta.safetensors"
    tensors = load_file(path)
    raw = tensors[stored].contiguous().view(torch.uint8).view(-1)
    change(raw)
    document = json.loads((folder / "delta_config.json").read_text())
    if fit_digest:
        name, _, suffix = stored.rpartition(".weight.")
        document["tensors"][f"{name}.weight"]["parts"][suffix] = tensor_digest(tensors[stored])
        document["content_hash"] = _content_hash(document)
        (folder / "delta_config.json").write_text(readable(document))
    save_file(tensors, path, metadata={"format": "pt", "delta_config": compact(document)})


def _content_hash(document):
    import hashlib

    entries = {
        name: {key: value for key, value in entry.items() if key not in ("zeros", "relative_error")}
        for name, entry in document["tensors"].items()
    }
    return hashlib.sha256(
        compact({"base": document["base"]["fingerprint"], "tensors": entries}).encode()
    ).hexdigest()


def test_padding_bits_must_be_zero_even_with_a_fitting_digest(copy):
    folder, pair = copy
    _change_tensor(
        folder / "delta", f"{LAYER}.sign", lambda raw: raw.__setitem__(5, raw[5] | 0x80), fit_digest=True
    )
    refuse(folder / "delta", pair, f"{LAYER}: sign of plane 0: padding bits past column 44")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
def test_scale_must_be_finite_and_not_negative_even_with_a_fitting_digest(copy, value):
    folder, pair = copy

    def change(raw):
        raw[:4] = torch.tensor(list(struct.pack("<f", value)), dtype=torch.uint8)

    _change_tensor(folder / "delta", f"{LAYER}.alpha", change, fit_digest=True)
    refuse(folder / "delta", pair, f"{LAYER}: alpha of plane 0 holds NaN, infinity or a negative value")
    with pytest.raises(DeltaError, match="NaN, infinity or a negative"):
        DeltaArtifact.open(folder / "delta").delta(LAYER)


def test_zero_scale_is_allowed(copy):
    """A row that did not move has the scale zero."""
    folder, _ = copy
    _change_tensor(folder / "delta", f"{LAYER}.alpha", lambda raw: raw[:4].zero_(), fit_digest=True)
    verify_artifact(folder / "delta")
    assert not DeltaArtifact.open(folder / "delta").delta(LAYER)[0].any()


def test_dense_tensor_must_be_finite_even_with_a_fitting_digest(copy):
    folder, pair = copy

    def change(raw):
        raw[:4] = torch.tensor(list(struct.pack("<f", float("nan"))), dtype=torch.uint8)

    _change_tensor(folder / "delta", "model.norm.weight.dense", change, fit_digest=True)
    refuse(folder / "delta", pair, "model.norm.weight.dense holds NaN")


def test_wrong_statement_about_the_error_is_found_with_both_models(copy):
    folder, pair = copy
    edit(folder / "delta", lambda document: document["tensors"][LAYER].update(relative_error=0.01))
    verify_artifact(folder / "delta")
    with pytest.raises(DeltaError, match=f"{LAYER}: relative error is stated as 0.01, recomputed as 0.59"):
        verify_artifact(folder / "delta", base=FolderSource(pair.base), tuned=FolderSource(pair.tuned))
    with pytest.raises(DeltaError, match="give the base too"):
        verify_artifact(folder / "delta", tuned=FolderSource(pair.tuned))


def test_verify_names_all_problems_at_once(copy):
    folder, _ = copy
    for name in (LAYER, LAYER.replace("down", "up")):
        _change_tensor(folder / "delta", f"{name}.sign", lambda raw: raw.__setitem__(0, raw[0] ^ 1))
    (folder / "delta" / "tokenizer.json").write_text("changed")
    with pytest.raises(DeltaError, match=r"(?s)up_proj.*down_proj|down_proj.*up_proj") as error:
        verify_artifact(folder / "delta")
    assert "tokenizer.json has digest" in str(error.value)


def drop(key):
    return lambda document: document.pop(key)


def put(key, value):
    return lambda document: document.update({key: value})


def put_entry(**fields):
    return lambda document: document["tensors"][LAYER].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", "gguf"), "format is 'gguf', expected 'zen-delta'"),
        (put("format_version", "2.0"), "format_version 2.0 is not readable, this reader knows 1.x"),
        (put("format_version", "one"), "not MAJOR.MINOR"),
        (put("format_version", 1), "format_version must be str"),
        (drop("variant"), "field variant is missing"),
        (put("step", "7"), "step must be int"),
        (put("step", True), "step must be int"),
        (put("tensors", []), "tensors must be dict"),
        (put("content_hash", "0" * 64), "content_hash is 0000000000000000, its content gives"),
        (put("content_hash", "xyz"), "must be a sha256"),
        (lambda d: d["base"].update(fingerprint="0" * 64), "does not follow from base_tensors"),
        (lambda d: d["base_tensors"].pop(LAYER), "does not follow from base_tensors"),
        (lambda d: d["base_tensors"].update({LAYER: 1}), "must be .dtype, shape, digest."),
        (lambda d: d["tensors"].pop(LAYER), r"base tensor .*down_proj.weight \(1 in all\) has no entry"),
        (lambda d: d["tensors"].update(extra=d["tensors"][LAYER]), "no tensor 'extra'; a left-over tensor"),
        (
            put_entry(kind="lowrank"),
            "kind 'lowrank' is unknown; this reader knows sign, directions, dense, same, rows, tied",
        ),
        (put_entry(parts={}), "kind sign needs"),
        (lambda d: d["tensors"][LAYER]["parts"].update(u="0" * 64), "a part that this reader does not know"),
        (put_entry(shape=[32, 45]), "does not fit the base's"),
        (put_entry(planes=0), "is not possible for kind sign"),
        (put_entry(scale="column"), "is not possible for kind sign"),
        (put_entry(kind="same", parts={}), "kind same has no planes"),
        (put_entry(base_rows=5), "base_rows belongs to kind rows"),
        (put_entry(target="x"), "target to kind tied"),
        (put_entry(dtype="Q4"), "dtype 'Q4' is not supported"),
        (
            lambda d: d["tensors"]["lm_head.weight"].update(target="nothing"),
            "tied to 'nothing', which holds no values",
        ),
    ],
)
def test_configuration_that_breaks_the_format_is_refused(copy, change, message):
    folder, pair = copy
    edit(folder / "delta", change)
    refuse(folder / "delta", pair, message)


def test_unknown_fields_of_a_minor_version_are_ignored(copy):
    folder, _ = copy

    def change(document):
        document["format_version"] = "1.7"
        document["new_field"] = {"a": 1}
        document["base"]["new"] = 1
        document["tensors"][LAYER]["comment"] = "new"

    edit(folder / "delta", change)
    verify_artifact(folder / "delta")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"format": "zen-delta", "format": "zen-delta"}', "duplicate key 'format'"),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_configuration_that_is_no_json_object_is_refused(copy, text, message):
    folder, pair = copy
    (folder / "delta" / "delta_config.json").write_text(text)
    refuse(folder / "delta", pair, message)


def test_configuration_of_another_export_is_refused(copy):
    folder, pair = copy
    edit(folder / "delta", put("step", 8), both=False)
    refuse(folder / "delta", pair, "belong to different exports or were changed")


def test_missing_and_left_over_tensors_are_refused(copy):
    """A delta that misses a module, or matches none, must never serve as the base."""
    folder, pair = copy
    path = folder / "delta" / "delta.safetensors"
    tensors = load_file(path)
    document = compact(json.loads((folder / "delta" / "delta_config.json").read_text()))
    metadata = {"format": "pt", "delta_config": document}
    save_file({n: t for n, t in tensors.items() if n != f"{LAYER}.alpha"}, path, metadata=metadata)
    refuse(folder / "delta", pair, f"tensor {LAYER}.alpha .1 in all. is described but not stored")
    save_file(
        tensors | {"model.other.weight.sign": torch.zeros(1, dtype=torch.uint8)}, path, metadata=metadata
    )
    refuse(folder / "delta", pair, "tensor model.other.weight.sign .1 in all. is stored but not described")
    save_file(tensors | {f"{LAYER}.alpha": torch.zeros(31)}, path, metadata=metadata)
    refuse(folder / "delta", pair, r"alpha is F32 \[31\], expected F32 \[32\]")


@pytest.mark.parametrize("name", ["delta_config.json", "delta.safetensors", "tokenizer.json"])
def test_missing_file_is_refused(copy, name):
    folder, pair = copy
    (folder / "delta" / name).unlink()
    refuse(folder / "delta", pair, f"{name}")


def test_missing_shard_is_refused(copy):
    folder, pair = copy
    shards = sorted((folder / "sharded").glob("delta-0*"))
    shards[2].unlink()
    refuse(folder / "sharded", pair, f"{shards[2].name}' is missing")


def test_shard_of_another_export_is_refused(copy, tmp_path_factory):
    folder, pair = copy
    other = tmp_path_factory.mktemp("other")
    export(make_pair(other, seed=9), other / "delta", max_shard_bytes=2000)
    name = sorted(p.name for p in (folder / "sharded").glob("delta-0*"))[2]
    shutil.copy(other / "delta" / name, folder / "sharded" / name)
    refuse(folder / "sharded", pair, "has digest")


@pytest.mark.parametrize("name", ["../delta/delta.safetensors", "/srv/x.safetensors", "a/b.safetensors"])
def test_index_path_that_leaves_the_artifact_is_refused(copy, name):
    folder, pair = copy
    path = folder / "sharded" / "delta.safetensors.index.json"
    index = json.loads(path.read_text())
    first = sorted(index["weight_map"])[0]
    index["weight_map"][first] = name
    path.write_text(json.dumps(index))
    refuse(folder / "sharded", pair, "not a plain file name; a path may not leave")


@pytest.mark.parametrize("name", ["delta_config.json", "delta.safetensors", "tokenizer.json"])
def test_link_that_leaves_the_artifact_is_refused(copy, name):
    folder, pair = copy
    (folder / "delta" / name).rename(folder / "elsewhere")
    (folder / "delta" / name).symlink_to(folder / "elsewhere")
    refuse(folder / "delta", pair, "is a link to .*outside")


def test_sidecar_path_that_leaves_the_artifact_is_refused(copy):
    folder, pair = copy
    edit(folder / "delta", lambda d: d["files"].update({"../../etc/passwd": "0" * 64}))
    refuse(folder / "delta", pair, "not a plain file name")


@pytest.mark.parametrize("name", ["extra.bin", "optimizer.pt", "state.pkl"])
def test_pickle_beside_the_delta_is_refused(copy, name):
    folder, pair = copy
    (folder / "delta" / name).write_bytes(b"\x80\x04.")
    refuse(folder / "delta", pair, f"{name}, which may be a pickle")


def test_changed_sidecar_is_refused(copy):
    folder, pair = copy
    (folder / "delta" / "tokenizer.json").write_text('{"tokenizer": false}')
    refuse(folder / "delta", pair, "tokenizer.json has digest")


def test_card_may_change(copy):
    folder, _ = copy
    (folder / "delta" / "README.md").write_text("# other")
    verify_artifact(folder / "delta")


def test_folder_that_is_no_artifact_is_refused(tmp_path):
    with pytest.raises(DeltaError, match="is not a folder"):
        DeltaArtifact.open(tmp_path / "absent")
    with pytest.raises(DeltaError, match=r"has no delta_config.json; it is no delta artifact"):
        DeltaArtifact.open(tmp_path)


def test_another_base_is_refused_before_any_write(copy, tmp_path_factory):
    """FastChat #1585, #262: the message names both bases."""
    folder, pair = copy
    other = make_pair(tmp_path_factory.mktemp("other"), seed=9)
    artifact = DeltaArtifact.open(folder / "delta")
    for attempt in (
        lambda: apply_delta(artifact, other.base, folder / "out"),
        lambda: apply_delta(artifact, pair.tuned, folder / "out"),
        lambda: next(iter_applied(artifact, FolderSource(other.base))),
        lambda: verify_artifact(folder / "delta", base=FolderSource(other.base)),
    ):
        with pytest.raises(DeltaError, match="another base") as error:
            attempt()
        assert "tiny-base (fingerprint" in str(error.value)
        assert str(other.base) in str(error.value) or str(pair.tuned) in str(error.value)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("architecture", ["llama-untied", "gpt2", "mixtral"])
def test_another_architecture_is_refused_before_any_write(copy, tmp_path_factory, architecture):
    """mergekit #211, #324."""
    folder, _ = copy
    other = make_pair(tmp_path_factory.mktemp("other"), architecture)
    with pytest.raises(DeltaError, match=r"another base: tensor .* base given: .* base expected: tiny-base"):
        apply_delta(DeltaArtifact.open(folder / "delta"), other.base, folder / "out")
    assert not (folder / "out").exists()


def test_base_that_differs_in_one_element_is_refused_by_apply(copy, tmp_path):
    """The quick check reads a few tensors; while it streams, apply checks every byte, and publishes
    nothing.
    """
    folder, pair = copy
    artifact = DeltaArtifact.open(folder / "delta")
    tensors = load_file(pair.base / "model.safetensors")
    accepted_by_quick_check = 0
    for index, name in enumerate(sorted(tensors)):
        base = tmp_path / f"base{index}"
        shutil.copytree(pair.base, base)
        changed = {n: t.clone() for n, t in tensors.items()}
        changed[name].view(torch.int16).view(-1)[0] ^= 1
        save_file(changed, base / "model.safetensors", metadata={"format": "pt"})
        try:
            next(iter_applied(artifact, StateDictSource(changed)))
            accepted_by_quick_check += 1
        except DeltaError:
            pass
        with pytest.raises(DeltaError, match=f"another base: {name} has digest"):
            apply_delta(artifact, base, folder / "out")
        with pytest.raises(DeltaError, match=f"another base: {name} has digest"):
            next(iter_applied(artifact, FolderSource(base), check="full"))
    assert accepted_by_quick_check > 0, "the streaming check was never needed"
    assert not (folder / "out").exists()
    assert not list(folder.glob(".*partial"))


def test_unknown_output_dtype_and_range_overflow_are_refused(copy, tmp_path):
    folder, pair = copy
    artifact = DeltaArtifact.open(folder / "delta")
    with pytest.raises(
        DeltaError, match="dtype 'int8' is unknown; allowed: auto, float32, bfloat16, float16"
    ):
        apply_delta(artifact, pair.base, folder / "out", dtype="int8")
    tensors = load_file(pair.tuned / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    shutil.copytree(pair.base.parent, tmp_path / "big")
    big = type(pair)(tmp_path / "big" / "base", tmp_path / "big" / "tuned")
    save_file(tensors, big.tuned / "model.safetensors", metadata={"format": "pt"})
    export(big, tmp_path / "big-delta")
    with pytest.raises(
        DeltaError, match=r"model.norm.weight: values beyond the range of torch.float16; use dtype float32"
    ):
        apply_delta(DeltaArtifact.open(tmp_path / "big-delta"), big.base, folder / "out", dtype="float16")
    assert not (folder / "out").exists()
