"""FORMAT.md: golden bytes written out by hand, and a second reader that follows that page and shares no code.

The second reader uses the standard library and numpy; torch only to compare with what `iter_applied` gives.
"""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import zen_train.delta
from tests.delta.models import export, make_pair
from tests.delta.test_vocabulary import grow
from zen_train.delta import (
    BaseInfo,
    DeltaArtifact,
    FolderSource,
    StateDictSource,
    TensorEntry,
    fingerprint,
    iter_applied,
    write_artifact,
)
from zen_train.delta.directions_parts import directions_product, pack_directions

GOLDEN_DATA = bytes.fromhex(
    "6d00ce01"  # up.weight.sign: rows 109 0 and 206 1
    "00000040" "0000003f"  # up.weight.alpha: 2.0 and 0.5
    "0000c03f"  # up.bias.dense: 1.5
)  # fmt: skip
GOLDEN_ENTRIES = {
    "up.weight.sign": {"dtype": "U8", "shape": [2, 2], "data_offsets": [0, 4]},
    "up.weight.alpha": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    "up.bias.dense": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]},
}
GOLDEN_HASH = "c2b83d68ca91e7f3dabf8ac98dc45cc800f234f649ac46e804b1b1761737c166"


def write_golden(folder):
    base = {"up.weight": torch.zeros(2, 9), "up.bias": torch.zeros(1), "still": torch.ones(3)}
    rows = [[1.0, -3, 0, 2, -2, 1, 1, -1, -7], [-0.5, 0.5, 0.5, 0.5, -0.5, -0.5, 0.5, 0.5, 0.5]]
    tuned = {"up.weight": torch.tensor(rows), "up.bias": torch.tensor([1.5]), "still": torch.ones(3)}
    source = StateDictSource(base)
    info = BaseInfo(name="golden", fingerprint=fingerprint(source), vocab_size=0, dtype="F32", tied=False)
    return write_artifact(
        folder, base=source, tuned=StateDictSource(tuned), base_info=info, variant="golden", step=3
    )


def split(path):
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + header_bytes]), raw[8 + header_bytes :]


def test_golden_artifact_has_the_bytes_written_out_by_hand(tmp_path):
    write_golden(tmp_path / "delta")
    header, data = split(tmp_path / "delta" / "delta.safetensors")
    metadata = header.pop("__metadata__")
    assert header == GOLDEN_ENTRIES
    assert data == GOLDEN_DATA
    config = json.loads((tmp_path / "delta" / "delta_config.json").read_text())
    assert json.loads(metadata["delta_config"]) == config
    assert config["tensors"]["up.weight"] == {
        "kind": "sign",
        "shape": [2, 9],
        "dtype": "F32",
        "parts": {
            "sign": hashlib.sha256(GOLDEN_DATA[:4]).hexdigest(),
            "alpha": hashlib.sha256(GOLDEN_DATA[4:12]).hexdigest(),
        },
        "scale": "row",
        "planes": 1,
        "zeros": 0.0555556,  # 1 of 18
        "relative_error": 0.685994,  # ||D||^2 = 70 + 2.25, left 70 - 9 * 4: sqrt(34 / 72.25)
    }
    assert config["tensors"]["up.bias"] == {
        "kind": "dense",
        "shape": [1],
        "dtype": "F32",
        "parts": {"dense": hashlib.sha256(GOLDEN_DATA[12:]).hexdigest()},
        "relative_error": 0.0,
    }
    assert config["tensors"]["still"] == {"kind": "same", "shape": [3], "dtype": "F32"}
    assert config["format"] == "zen-delta"
    assert config["format_version"] == "1.0"
    assert config["content_hash"] == GOLDEN_HASH


class SecondReader:
    """Reads an artifact by FORMAT.md alone, without checks."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "delta_config.json").read_text())
        self.tensors = {}
        for path in folder.glob("delta*.safetensors"):
            header, data = split(path)
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                self.tensors[name] = _array(data[begin:end], entry["dtype"]).reshape(entry["shape"])

    def parameter(self, name, base):
        entry = self.config["tensors"][name]
        if entry["kind"] == "tied":
            return self.parameter(entry["target"], base)
        if entry["kind"] == "dense":
            return self.tensors[f"{name}.dense"]
        values = base[entry.get("base_tensor", name)].copy()
        matrices = np.swapaxes(values, -1, -2) if entry.get("transposed") else values
        delta = self._directions(name) if "directions" in entry else np.zeros_like(matrices)
        for plane in range(entry.get("planes", 0)):
            suffix = f".{plane}" if plane else ""
            delta = delta + self._plane(
                self.tensors[f"{name}.sign{suffix}"], self.tensors[f"{name}.alpha{suffix}"], matrices
            )
        values = values + (np.swapaxes(delta, -1, -2) if entry.get("transposed") else delta)
        return np.concatenate([values, self.tensors[f"{name}.rows"]]) if entry["kind"] == "rows" else values

    def _directions(self, name):
        entry, (left, right) = self.config["tensors"][name], (0.0, 0.0)
        columns, counts = entry["shape"][-2 if entry.get("transposed") else -1], entry["directions"]
        left_signs = self._signs(self.tensors[f"{name}.left"], sum(counts))
        right_signs = self._signs(self.tensors[f"{name}.right"], columns)
        for plane, count in enumerate(counts):
            own = slice(sum(counts[:plane]), sum(counts[:plane]) + count)
            left = left + 2.0**-plane * self._padded(left_signs[..., own], counts[0], axis=-1)
            right = right + 2.0**-plane * self._padded(right_signs[..., own, :], counts[0], axis=-2)
        return ((left * self.tensors[f"{name}.scales"][..., None, :]) @ right).astype("<f4")

    @staticmethod
    def _signs(packed, columns):
        column = np.arange(columns)
        return (packed[..., column // 8] >> (column % 8) & 1) * 2.0 - 1.0

    @staticmethod
    def _padded(values, size, axis):
        """Directions that have no such plane get nothing from it."""
        width = [(0, 0)] * values.ndim
        width[axis] = (0, size - values.shape[axis])
        return np.pad(values, width)

    @staticmethod
    def _plane(sign, alpha, matrices):
        out = np.empty_like(matrices)
        for index in np.ndindex(matrices.shape):
            *row, column = index
            bit = sign[(*row, column // 8)] >> (column % 8) & 1
            scale = alpha[tuple(row)] if alpha.shape == matrices.shape[:-1] else alpha[(*row[:-1], 0)]
            out[index] = scale if bit else -scale
        return out


def _array(raw, dtype):
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, {"U8": "u1", "F32": "<f4", "F16": "<f2"}[dtype])


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama-tied", {}),
        ("llama-untied", {"scale": "matrix", "planes": 2}),
        ("gpt2", {"planes": 2}),
        ("gpt2", {"scale": "matrix"}),
        ("qwen2", {"max_shard_bytes": 3000}),
        ("llama-tied", {"embedding": "dense"}),
    ],
)
@pytest.mark.parametrize("grown", [False, True])
def test_a_reader_written_from_the_specification_agrees(tmp_path, architecture, options, grown):
    pair = make_pair(tmp_path, architecture)
    if grown:
        grow(pair)
    export(pair, tmp_path / "delta", **options)
    base = FolderSource(pair.base)
    values = {name: base.get(name).float().numpy() for name in base.names()}
    second = SecondReader(tmp_path / "delta")
    applied = dict(iter_applied(DeltaArtifact.open(tmp_path / "delta"), base))
    assert set(applied) == set(second.config["tensors"])
    for name, tensor in applied.items():
        np.testing.assert_array_equal(tensor.numpy(), second.parameter(name, values), err_msg=name)


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2", "mixtral"])
def test_a_reader_written_from_the_specification_agrees_on_directions(tmp_path, architecture):
    """Sums of at most 32 products in another order and precision: a few roundings of float32 apart."""
    pair = make_pair(tmp_path, architecture)
    export(pair, tmp_path / "delta", embedding="sign", code="directions", direction_bits=2.0)
    base = FolderSource(pair.base)
    values = {name: base.get(name).float().numpy() for name in base.names()}
    second = SecondReader(tmp_path / "delta")
    for name, tensor in iter_applied(DeltaArtifact.open(tmp_path / "delta"), base):
        np.testing.assert_allclose(
            tensor.numpy(), second.parameter(name, values), rtol=2**-21, atol=2**-21, err_msg=name
        )


def test_golden_directions_are_packed_and_read_as_written_out_by_hand():
    """Two directions of 3 rows and 9 columns, the first of 2 bits: the example of FORMAT.md."""
    left = torch.tensor([[1.5, 0.5, 1.5], [-1, 1, -1]])
    right = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.5, 0.5, 1.5, -1.5, 1.5], [1] * 9])
    parts = pack_directions(left, right, torch.tensor([0.5, 0.25]), [2, 1])
    stored = {
        "right": "7f01 ff01 5501",
        "left": "05 03 05",
        "scales": "0000003f 0000803e",
    }
    made = (parts.right, parts.left, parts.scales)
    for part, hexadecimal in zip(made, stored.values(), strict=True):
        assert part.numpy().tobytes() == bytes.fromhex(hexadecimal)
    outer, middle = [0.875, 0.125] * 3 + [0.875, -1.375, 0.875], [0.625, 0.375] * 3 + [0.625, -0.125, 0.625]
    values = np.array([outer, middle, outer], dtype="<f4")
    second = SecondReader.__new__(SecondReader)
    second.config = {"tensors": {"up": {"shape": [3, 9], "directions": [2, 1]}}}
    second.tensors = {f"up.{name}": part.numpy() for name, part in zip(stored, made, strict=True)}
    np.testing.assert_array_equal(second._directions("up"), values)
    np.testing.assert_array_equal(directions_product(parts, 9).numpy(), values)
    entry = TensorEntry(kind="directions", shape=(3, 9), dtype="F32", directions=(2, 1))
    assert {name: shape for name, (_, shape) in entry.expected_parts().items()} == {
        name: tuple(part.shape) for name, part in zip(stored, made, strict=True)
    }


@pytest.mark.parametrize("options", [{"scale": "matrix"}, {"code": "directions"}, {"low_rank": 2}], ids=str)
def test_fingerprint_and_content_hash_follow_from_the_configuration(tmp_path, options):
    pair = make_pair(tmp_path)
    grow(pair)
    export(pair, tmp_path / "delta", **options)
    config = json.loads((tmp_path / "delta" / "delta_config.json").read_text())
    lines = [
        f"{name} {dtype} [{','.join(map(str, shape))}] {digest}\n"
        for name, (dtype, shape, digest) in sorted(
            config["base_tensors"].items(), key=lambda item: item[0].encode()
        )
    ]
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == config["base"]["fingerprint"]
    fields = [
        "kind",
        "shape",
        "dtype",
        "parts",
        "scale",
        "planes",
        "rank",
        "directions",
        "transposed",
        "base_tensor",
        "base_rows",
        "target",
    ]
    reduced = {n: {f: e[f] for f in fields if e.get(f) is not None} for n, e in config["tensors"].items()}
    text = json.dumps(
        {"base": config["base"]["fingerprint"], "tensors": reduced},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    )
    assert hashlib.sha256(text.encode()).hexdigest() == config["content_hash"]


def test_specification_travels_with_the_package_and_names_its_version():
    text = (Path(zen_train.delta.__file__).parent / "FORMAT.md").read_text()
    assert "version 1.2" in text
    assert "`sign = 6d 00 ce 01`" in text
    assert "`right = 7f 01 ff 01 55 01`, `left = 05 03 05`" in text
