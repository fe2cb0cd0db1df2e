"""The identity of a base: fixed bytes give a fixed root; files and versions do not matter, every value
does.
"""

import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.delta.models import make_pair
from zen_train.delta import BaseInfo, FolderSource, StateDictSource, fingerprint, full_check, quick_check
from zen_train.delta.shard_writer import ShardWriter
from zen_train.errors import DeltaError


def test_golden_fingerprint_is_the_one_computed_by_hand():
    """stanford_alpaca #256: byte exact, so the value can be written down."""
    found = fingerprint(
        StateDictSource({"b": torch.tensor([[1.0, -2.0]]), "a": torch.tensor([1, 2], dtype=torch.uint8)})
    )
    digest_a = hashlib.sha256(b"\x01\x02").hexdigest()
    digest_b = hashlib.sha256(b"\x00\x00\x80\x3f\x00\x00\x00\xc0").hexdigest()
    assert dict(found.digests) == {"a": digest_a, "b": digest_b}
    lines = f"a U8 [2] {digest_a}\nb F32 [1,2] {digest_b}\n"
    assert found.root == hashlib.sha256(lines.encode()).hexdigest()
    assert found.root == "76d6fbd8354e5003e071c88b334e96fd0b39f12c0c58e287968fda78871eed4b"


def test_shards_order_and_container_do_not_matter(tmp_path):
    """stanford_alpaca #256: independent of shards and torch version."""
    pair = make_pair(tmp_path)
    source = FolderSource(pair.base)
    expected = fingerprint(source).root
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    with ShardWriter(sharded, "model", header_room_bytes=8000, max_shard_bytes=3000) as writer:
        for name in reversed(source.names()):
            writer.add(name, source.get(name))
        writer.finish({})
    assert fingerprint(FolderSource(sharded)).root == expected
    assert fingerprint(StateDictSource({n: source.get(n) for n in reversed(source.names())})).root == expected
    model = AutoModelForCausalLM.from_pretrained(pair.base, dtype=torch.bfloat16)
    assert fingerprint(StateDictSource(model.state_dict())).root == expected


def test_strides_do_not_matter():
    values = torch.randn(3, 4)
    assert fingerprint(StateDictSource({"a": values})) == fingerprint(
        StateDictSource({"a": values.t().contiguous().t()})
    )


def test_one_bit_anywhere_changes_the_root(tmp_path):
    pair = make_pair(tmp_path)
    tensors = load_file(pair.base / "model.safetensors")
    expected = fingerprint(StateDictSource(tensors))
    for name in tensors:
        changed = {n: t.clone() for n, t in tensors.items()}
        changed[name].view(torch.int16).view(-1)[-1] ^= 1
        assert fingerprint(StateDictSource(changed)).root != expected.root
        with pytest.raises(DeltaError, match="another base"):
            full_check(StateDictSource(changed), expected)


def test_float32_copy_of_a_bfloat16_base_is_that_base(tmp_path):
    pair = make_pair(tmp_path)
    expected = fingerprint(FolderSource(pair.base))
    model = AutoModelForCausalLM.from_pretrained(pair.base, dtype=torch.float32)
    wide = StateDictSource(model.state_dict())
    assert fingerprint(wide).root != expected.root
    assert fingerprint(wide, dtype=torch.bfloat16) == expected
    full_check(wide, expected)
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-4
    with pytest.raises(DeltaError, match=r"norm.weight holds .* values that torch.bfloat16 cannot represent"):
        fingerprint(wide, dtype=torch.bfloat16)
    with pytest.raises(DeltaError, match="another base"):
        full_check(wide, expected)


def test_quick_check_names_both_bases(tmp_path):
    """FastChat #1585, #262: the message names both."""
    one, two = make_pair(tmp_path / "one", seed=1), make_pair(tmp_path / "two", seed=2)
    info = BaseInfo.from_folder(one.base, name="tiny-base", revision="r1")
    quick_check(FolderSource(one.base), info.fingerprint)
    with pytest.raises(DeltaError) as error:
        quick_check(FolderSource(two.base), info.fingerprint, expected_label=info.label)
    assert str(two.base) in str(error.value)
    assert f"tiny-base at r1 (fingerprint {info.fingerprint.root[:16]})" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("b"), "tensor b .* is missing"),
        (lambda t: t.update(c=torch.zeros(1)), "tensor c .* is not part of it"),
        (lambda t: t.update(a=torch.zeros(3, 2)), r"a has shape \[3, 2\], expected \[2, 3\]"),
        (lambda t: t.update(b=torch.zeros(4, dtype=torch.int32)), "b is torch.int32, expected torch.float32"),
        (
            lambda t: t.update(b=torch.zeros(4, dtype=torch.float16)),
            "b is torch.float16, expected torch.float32",
        ),
    ],
)
def test_quick_check_sees_other_names_shapes_and_dtypes(change, message):
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    expected = fingerprint(StateDictSource(tensors))
    change(tensors)
    with pytest.raises(DeltaError, match=message):
        quick_check(StateDictSource(tensors), expected)


def test_quick_check_reads_little_of_a_large_model():
    reads = []

    class Counting(StateDictSource):
        def get(self, name):
            reads.append(name)
            return super().get(name)

    source = Counting({f"layer{i}": torch.full((8, 8), float(i)) for i in range(200)})
    expected = fingerprint(source)
    reads.clear()
    quick_check(source, expected)
    assert 1 <= len(reads) <= 6


def test_base_info_describes_a_folder(tmp_path):
    pair = make_pair(tmp_path)
    info = BaseInfo.from_folder(pair.base, licence="CC0-1.0")
    assert (info.vocab_size, info.dtype, info.tied, info.model_type) == (50, "BF16", True, "llama")
    assert info.architecture == "LlamaForCausalLM"
    other = make_pair(tmp_path / "untied", "llama-untied")
    assert BaseInfo.from_folder(other.base).tied is False
    assert BaseInfo.from_folder(other.base).config_hash != info.config_hash


def test_config_hash_ignores_versions_and_paths(tmp_path):
    pair = make_pair(tmp_path)
    before = BaseInfo.from_folder(pair.base).config_hash
    config = pair.base / "config.json"
    config.write_text(config.read_text().replace('"transformers_version": "', '"transformers_version": "9'))
    assert BaseInfo.from_folder(pair.base).config_hash == before
    save_file(
        load_file(pair.base / "model.safetensors"), pair.base / "model.safetensors", metadata={"format": "pt"}
    )
    assert BaseInfo.from_folder(pair.base).config_hash == before
