"""Where tensors come from: safetensors folders and state dicts, and everything that must be refused."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from tests.delta.models import make_pair
from zen_train.delta import FolderSource, LazyTensor, StateDictSource, TensorSpec
from zen_train.delta.shard_reader import SafetensorsFile
from zen_train.delta.shard_writer import ShardWriter
from zen_train.errors import DeltaError


def raw_file(path, header, data=b"", *, extra=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + extra)
    return path


def entry(begin=0, end=8, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_folder_gives_what_safetensors_wrote(tmp_path):
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.tensor([1, 0, 1], dtype=torch.uint8),
        "c": torch.randn(5).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = FolderSource(tmp_path)
    assert set(source.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(source.get(name), tensor)
        assert source.spec(name) == TensorSpec(tensor.dtype, tuple(tensor.shape))


def test_tensor_that_is_not_aligned_is_still_read(tmp_path):
    data = b"\x07" + struct.pack("<2f", 1.5, -2.0)
    header = {"odd": entry(0, 1, "U8", (1,)), "after": entry(1, 9)}
    file = SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, data))
    assert file.get("after").tolist() == [1.5, -2.0]


def test_writing_to_a_mapped_tensor_does_not_reach_the_file(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    FolderSource(tmp_path).get("a").add_(1)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert FolderSource(tmp_path).get("a").tolist() == [0, 0, 0, 0]


def test_shards_read_like_one_file(tmp_path):
    pair = make_pair(tmp_path)
    whole = FolderSource(pair.base)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    with ShardWriter(sharded, "model", header_room_bytes=8000, max_shard_bytes=3000) as writer:
        for name in whole.names():
            writer.add(name, whole.get(name))
        writer.finish({})
    assert len(list(sharded.glob("model-0*-of-0*.safetensors"))) > 3
    again = FolderSource(sharded)
    assert sorted(again.names()) == sorted(whole.names())
    assert all(torch.equal(again.get(name), whole.get(name)) for name in whole.names())


@pytest.mark.parametrize(
    ("header", "data", "extra", "message"),
    [
        (b"{not json", b"", b"", "header is not valid JSON"),
        (b"\xff\xfe{}", b"", b"", "header is not valid JSON"),
        (b"[1]", b"", b"", "must hold a JSON object"),
        (b'{"a":{"dtype":"F32"},"a":{}}', b"", b"", "duplicate key 'a'"),
        ({"a": 3}, b"", b"", "must be an object"),
        ({"a": entry(dtype="F4")}, b"\0" * 8, b"", "dtype 'F4' is not supported"),
        ({"a": entry(shape=(-2,))}, b"\0" * 8, b"", "lists of whole numbers"),
        ({"a": entry(shape=(3,))}, b"\0" * 8, b"", "has 8 bytes, its shape [3] needs 12"),
        ({"a": entry(4, 12)}, b"\0" * 12, b"", "starts at byte 4, expected 0"),
        ({"a": entry(), "b": entry()}, b"\0" * 8, b"", "starts at byte 0, expected 8"),
        ({"a": entry()}, b"\0" * 7, b"", "truncated"),
        ({"a": entry()}, b"\0" * 8, b"\0", "1 trailing bytes"),
        ({"__metadata__": {"k": 1}}, b"", b"", "__metadata__ must map text to text"),
    ],
)
def test_damaged_file_is_refused(tmp_path, header, data, extra, message):
    """safetensors #278, #466: metadata is text only; sizes match to the byte."""
    with pytest.raises(DeltaError) as error:
        SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, data, extra=extra))
    assert message in str(error.value)
    assert "x.safetensors" in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"\1\0\0", struct.pack("<Q", 50) + b"{}", struct.pack("<Q", 1 << 60) + b"{}"]
)
def test_file_shorter_than_its_header_is_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(DeltaError, match=r"truncated|header of|at most"):
        SafetensorsFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.pkl", "last.ckpt"])
def test_pickle_is_refused_and_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(DeltaError, match=f"{name}.*pickles are never loaded"):
        FolderSource(tmp_path)


def test_folder_without_weights_says_what_it_holds(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DeltaError, match=r"neither model.safetensors nor .*; it holds: config.json"):
        FolderSource(tmp_path)
    with pytest.raises(DeltaError, match="is not a folder"):
        FolderSource(tmp_path / "absent")


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b", ""]
)
def test_index_path_that_leaves_the_folder_is_refused(tmp_path, name):
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    write_index(folder, {"a": name})
    with pytest.raises(DeltaError, match="not a plain file name"):
        FolderSource(folder)


def test_link_that_leaves_the_folder_is_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(DeltaError, match=r"is a link to .*outside"):
        FolderSource(folder)


def test_hub_cache_links_are_followed(tmp_path):
    """A hub snapshot is a folder of links into the blobs of the same entry."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blobs / "0123", snapshot))
    assert FolderSource(snapshot).get("a").tolist() == [1]


def test_index_and_shards_must_agree(tmp_path):
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"})
    with pytest.raises(DeltaError, match=r"tensor c is listed in .* but not stored"):
        FolderSource(tmp_path)
    write_index(tmp_path, {"a": "one.safetensors"})
    with pytest.raises(DeltaError, match="tensor b is stored here but not listed"):
        FolderSource(tmp_path)
    write_index(tmp_path, {"a": "two.safetensors"})
    with pytest.raises(DeltaError, match=r"'two.safetensors' is missing"):
        FolderSource(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(DeltaError, match="holds both"):
        FolderSource(tmp_path)


def test_compiled_names_lose_their_prefix():
    """Lightning #20233, #17415: torch.compile puts `_orig_mod.` into names."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1] = torch.compile(model[1])
    source = StateDictSource(torch.compile(model).state_dict())
    assert source.names() == ["0.weight", "1.weight"]
    assert torch.equal(source.get("1.weight"), model[1]._orig_mod.weight)


def test_two_names_that_become_one_are_refused():
    with pytest.raises(DeltaError, match=r"two entries are called a.b"):
        StateDictSource({"a.b": torch.zeros(1), "a._orig_mod.b": torch.ones(1)})


def test_shared_storage_is_stored_once():
    embedding = torch.randn(4, 3)
    source = StateDictSource(
        {"embed": embedding, "other": embedding[1:], "head": embedding, "copy": embedding.clone()}
    )
    assert source.names() == ["embed", "other", "copy"]
    assert source.aliases() == {"head": "embed"}
    assert torch.equal(source.get("head"), embedding)


def test_lazy_values_are_made_when_asked_for():
    calls = []

    def load():
        calls.append(1)
        return torch.ones(2, 3)

    source = StateDictSource(
        {"a": LazyTensor(TensorSpec(torch.float32, (2, 3)), load), "b": torch.zeros(1)}, tied={"head": "a"}
    )
    assert source.spec("a").shape == (2, 3)
    assert source.aliases() == {"head": "a"}
    assert calls == []
    assert source.get("head").sum() == 6
    assert calls == [1]
    plain = StateDictSource({"a": load})
    assert plain.spec("a") == TensorSpec(torch.float32, (2, 3))
    assert plain.spec("a").size_bytes == 24
    assert len(calls) == 2


def test_lazy_value_that_is_not_as_announced_is_refused():
    source = StateDictSource({"a": LazyTensor(TensorSpec(torch.float32, (2, 3)), lambda: torch.ones(3, 2))})
    with pytest.raises(
        DeltaError, match=r"announced as torch.float32 \[2, 3\], loaded as torch.float32 \[3, 2\]"
    ):
        source.get("a")


def test_sharded_tensor_must_be_wrapped_by_the_caller():
    class Sharded(torch.Tensor):
        def full_tensor(self):
            raise AssertionError("gathering is a collective; it is the caller's to start")

    with pytest.raises(DeltaError, match="a is sharded; wrap it in LazyTensor"):
        StateDictSource({"a": torch.ones(2).as_subclass(Sharded)})


def test_values_that_are_no_tensors_are_refused():
    with pytest.raises(DeltaError, match="a is a int"):
        StateDictSource({"a": 3})
    with pytest.raises(DeltaError, match="meta device"):
        StateDictSource({"a": torch.empty(2, device="meta")})
    with pytest.raises(DeltaError, match="tied to nothing, which does not exist"):
        StateDictSource({"a": torch.zeros(1)}, tied={"b": "nothing"})
    with pytest.raises(DeltaError, match="the model in memory has no tensor b"):
        StateDictSource({"a": torch.zeros(1)}).get("b")
