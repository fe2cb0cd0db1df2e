"""Write safetensors shards in one pass, tensor by tensor, with the header filled in at the end.

A safetensors header stands before the data but is known only after it. So room is reserved at the front and
the header is padded with spaces, which the format allows. The data starts at a multiple of 64 bytes.
Hashing and writing run in one background thread while the caller prepares the next tensor; at most one
tensor waits. Files are named `STEM.safetensors`, or `STEM-00001-of-0000N.safetensors` with an index when
there are several.
"""

import hashlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from zen_train.delta.dtypes import dtype_code
from zen_train.delta.fingerprint import raw_bytes

DEFAULT_SHARD_BYTES = 5_000_000_000
_ALIGNMENT = 64
_OFFSET_DIGITS = 15


def header_entry_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """An upper bound of what one tensor takes in a header."""
    entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [10**_OFFSET_DIGITS, 10**_OFFSET_DIGITS]}
    return len(json.dumps({name: entry}, separators=(",", ":")))


class ShardWriter:
    """Streams tensors into `folder`. Use as a context manager; call `finish` once all are added."""

    def __init__(self, folder: Path, stem: str, *, header_room_bytes: int, max_shard_bytes: int) -> None:
        self._folder, self._stem = folder, stem
        self._room = header_room_bytes + (-(8 + header_room_bytes)) % _ALIGNMENT
        self._max_shard_bytes = max_shard_bytes
        self._shards: list[_Shard] = []
        self._pool = ThreadPoolExecutor(1)
        self._waiting: Future[None] | None = None
        self._digests: dict[str, str] = {}

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        for shard in self._shards:
            shard.file.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Queue one tensor. Its bytes must not change until the next call. Errors of the last write surface
        here.
        """
        size_bytes = tensor.numel() * tensor.element_size()
        shard = self._shards[-1] if self._shards else None
        if shard is None or (shard.entries and shard.data_bytes + size_bytes > self._max_shard_bytes):
            shard = self._open()
        shard.entries[name] = {
            "dtype": dtype_code(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [shard.data_bytes, shard.data_bytes + size_bytes],
        }
        shard.data_bytes += size_bytes
        self._drain()
        self._waiting = self._pool.submit(self._write, name, raw_bytes(tensor), shard.file)

    def digests(self) -> dict[str, str]:
        """sha256 of every tensor added so far."""
        self._drain()
        return dict(self._digests)

    def finish(self, metadata: dict[str, str]) -> int:
        """Write headers (metadata in the first shard, `format: pt` in all), names and index. Returns tensor
        bytes.
        """
        self._drain()
        if not self._shards:
            self._open()
        total_bytes = sum(shard.data_bytes for shard in self._shards)
        several = len(self._shards) > 1
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(self._shards, start=1):
            header = {"__metadata__": {"format": "pt", **(metadata if number == 1 else {})}, **shard.entries}
            self._write_header(shard.file, header)
            part = f"-{number:05d}-of-{len(self._shards):05d}" if several else ""
            name = f"{self._stem}{part}.safetensors"
            shard.path.rename(self._folder / name)
            weight_map |= dict.fromkeys(shard.entries, name)
        if several:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            text = json.dumps(index, indent=1) + "\n"
            (self._folder / f"{self._stem}.safetensors.index.json").write_text(text, encoding="utf-8")
        return total_bytes

    def _open(self) -> "_Shard":
        path = self._folder / f"{self._stem}.{len(self._shards)}.writing"
        shard = _Shard(path)
        self._shards.append(shard)
        shard.file.seek(8 + self._room)
        return shard

    def _write(self, name: str, data: memoryview, file: BinaryIO) -> None:
        file.write(data)
        self._digests[name] = hashlib.sha256(data).hexdigest()

    def _drain(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.result()

    def _write_header(self, file: BinaryIO, header: dict[str, object]) -> None:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= self._room, f"header of {len(text)} bytes, {self._room} reserved"
        file.seek(0)
        file.write(self._room.to_bytes(8, "little") + text.ljust(self._room, b" "))
        file.close()


class _Shard:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO = open(path, "wb")  # noqa: SIM115 (closed by ShardWriter)
        self.entries: dict[str, object] = {}
        self.data_bytes = 0
