"""Read safetensors files by memory map, refusing every file that is not exactly what its header says.

Contract: nothing is copied until a tensor is used; a tensor is a private (copy-on-write) view of the map, so
writing to it never reaches the file. Checks made on opening: header length and JSON, names, dtypes, shapes,
offsets without holes or overlap, and a file size that matches to the byte. Paths come from an index file and
are not trusted: only plain file names, and links only inside the folder (or inside a hub cache's `blobs`).
It does not check digests or values.
"""

import mmap
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from zen_train.delta.dtypes import dtype_of_code
from zen_train.delta.strict_json import parse_object
from zen_train.errors import DeltaError

MAX_HEADER_BYTES = 100_000_000
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".msgpack"})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element type and shape of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Place:
    spec: TensorSpec
    start_byte: int  # from the start of the file


class SafetensorsFile:
    """One memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as handle:
                size_bytes = os.fstat(handle.fileno()).st_size
                if size_bytes < 8:
                    raise DeltaError(f"{path}: {size_bytes} bytes is no safetensors file; it is truncated")
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise DeltaError(f"{path} cannot be read: {error.strerror or error}") from error
        self._places, self.metadata = _parse_header(path, self._map, size_bytes)

    def names(self) -> list[str]:
        """Tensor names in the order of their bytes."""
        return list(self._places)

    def spec(self, name: str) -> TensorSpec:
        return self._places[name].spec

    def get(self, name: str) -> torch.Tensor:
        """The tensor as a view of the map (a copy where its bytes are not aligned for its dtype)."""
        place = self._places[name]
        spec = place.spec
        if spec.numel == 0:
            return torch.empty(spec.shape, dtype=spec.dtype)
        if place.start_byte % spec.dtype.itemsize:
            raw = bytearray(self._map[place.start_byte : place.start_byte + spec.size_bytes])
            return torch.frombuffer(raw, dtype=spec.dtype).view(spec.shape)
        flat = torch.frombuffer(self._map, dtype=spec.dtype, count=spec.numel, offset=place.start_byte)
        return flat.view(spec.shape)


def _parse_header(path: Path, raw: mmap.mmap, size_bytes: int) -> tuple[dict[str, _Place], dict[str, str]]:
    header_bytes = int.from_bytes(raw[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise DeltaError(
            f"{path}: header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} allowed; the file is damaged"
        )
    data_start = 8 + header_bytes
    if data_start > size_bytes:
        raise DeltaError(
            f"{path}: truncated, the header alone needs {data_start} bytes and the file has {size_bytes}"
        )
    header = parse_object(raw[8:data_start], f"{path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DeltaError(f"{path}: __metadata__ must map text to text")
    found = [_parse_entry(path, name, entry) for name, entry in header.items()]
    found.sort(key=lambda item: (item[1], item[2], item[0]))
    places: dict[str, _Place] = {}
    end_byte = 0
    for name, begin, end, spec in found:
        if begin != end_byte:
            raise DeltaError(
                f"{path}: tensor {name} starts at byte {begin}, expected {end_byte} (no holes, no overlap)"
            )
        if end - begin != spec.size_bytes:
            raise DeltaError(
                f"{path}: tensor {name} has {end - begin} bytes, its shape {list(spec.shape)} needs "
                f"{spec.size_bytes}"
            )
        places[name] = _Place(spec, data_start + begin)
        end_byte = end
    expected_bytes = data_start + end_byte
    if size_bytes < expected_bytes:
        raise DeltaError(
            f"{path}: truncated, {size_bytes} bytes found and {expected_bytes} expected; fetch it again"
        )
    if size_bytes > expected_bytes:
        raise DeltaError(
            f"{path}: {size_bytes - expected_bytes} trailing bytes after the last tensor; fetch it again"
        )
    return places, metadata


def _parse_entry(path: Path, name: str, entry: object) -> tuple[str, int, int, TensorSpec]:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict):
        raise DeltaError(f"{where}: header entry must be an object, found {type(entry).__name__}")
    dtype = dtype_of_code(entry.get("dtype"), where)
    shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise DeltaError(
            f"{where}: shape and data_offsets must be lists of whole numbers, found {entry!r:.120}"
        )
    return name, offsets[0], offsets[1], TensorSpec(dtype, tuple(shape))


def _counts(value: object) -> list[int] | None:
    return value if isinstance(value, list) and all(type(v) is int and v >= 0 for v in value) else None


def contained_file(folder: Path, file_name: str, where: str) -> Path:
    """The path of `file_name` in `folder`; refused when it is not a plain name or when a link leads out.

    A link to the `blobs` folder of the same hub cache entry is inside: that is how hub snapshots are stored.
    """
    if not file_name or file_name in {".", ".."} or any(c in file_name for c in "/\\\0"):
        raise DeltaError(f"{where}: {file_name!r} is not a plain file name; a path may not leave {folder}")
    path = folder / file_name
    if not path.exists():
        raise DeltaError(f"{where}: file {file_name!r} is missing from {folder}; fetch it again")
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":
        inside.append(folder.parent.parent.resolve() / "blobs")
    resolved = path.resolve()
    if resolved.parent not in inside:
        raise DeltaError(f"{where}: {file_name!r} is a link to {resolved}, outside {folder}")
    if not resolved.is_file():
        raise DeltaError(f"{where}: {file_name!r} is not a regular file")
    return path


def open_shards(folder: Path, stem: str) -> list[SafetensorsFile]:
    """All files of `STEM.safetensors`, or of `STEM.safetensors.index.json`, opened and checked against the
    index.

    All are opened at once: a reader keeps its own view when the folder is replaced later.
    """
    single, index_name = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    has_single, has_index = (folder / single).exists(), (folder / index_name).exists()
    if has_single and has_index:
        raise DeltaError(f"{folder} holds both {single} and {index_name}; remove the one that is stale")
    if has_single:
        return [SafetensorsFile(contained_file(folder, single, str(folder)))]
    if not has_index:
        _refuse_missing(folder, single, index_name)
    index_path = contained_file(folder, index_name, str(folder))
    index = parse_object(index_path.read_bytes(), str(index_path))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise DeltaError(f"{index_path}: weight_map must map tensor names to file names")
    files = []
    listed: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        listed.setdefault(file_name, set()).add(name)
    for file_name in sorted(listed):
        shard = SafetensorsFile(contained_file(folder, file_name, str(index_path)))
        stored = set(shard.names())
        if missing := sorted(listed[file_name] - stored):
            raise DeltaError(
                f"{shard.path}: tensor {missing[0]} is listed in {index_name} but not stored here"
            )
        if extra := sorted(stored - listed[file_name]):
            raise DeltaError(
                f"{shard.path}: tensor {extra[0]} is stored here but not listed for it in {index_name}"
            )
        files.append(shard)
    return files


def _refuse_missing(folder: Path, single: str, index_name: str) -> None:
    if not folder.is_dir():
        raise DeltaError(f"{folder} is not a folder")
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise DeltaError(
            f"{folder} holds {pickles[0]} and no {single}; pickles are never loaded, convert to safetensors"
        )
    present = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise DeltaError(f"{folder} has neither {single} nor {index_name}; it holds: {present}")
