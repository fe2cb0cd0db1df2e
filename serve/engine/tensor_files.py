"""Read tensors of safetensors files straight into memory that is already there.

Reading a file (`preadv`) has two advantages over mapping it: the bytes are copied once, from the page cache
to where they are used, many tensors with one system call; and a file that shrinks under a reader gives an
error, where a mapped one would kill the process. Headers are checked by `zen_train.delta`'s reader; digests
and values by the callers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zen_train.delta import TensorSpec
from zen_train.delta.shard_reader import SafetensorsFile, open_shards
from zen_train.errors import DeltaError

_PIECES_A_CALL = 512  # IOV_MAX is 1024 on Linux


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Bytes of one tensor in a file."""

    path: Path
    offset: int
    size_bytes: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Changes when a file is written to or replaced."""

    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


def find_places(folder: Path, stem: str) -> dict[str, FilePlace]:
    """Where each tensor of `STEM.safetensors` (or of its shards) lies. Raises DeltaError for a file that is
    not sound.
    """
    return places_in(open_shards(folder, stem))


def places_in(shards: Iterable[SafetensorsFile]) -> dict[str, FilePlace]:
    """Where each tensor of checked files lies: without holes up to the last byte, so it follows from the sizes."""
    places = {}
    for shard in shards:
        names = shard.names()
        offset = shard.path.stat().st_size - sum(shard.spec(name).size_bytes for name in names)
        for name in names:
            spec = shard.spec(name)
            places[name] = FilePlace(shard.path, offset, spec.size_bytes, spec)
            offset += spec.size_bytes
    return places


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def tensor_over(memory: memoryview, spec: TensorSpec) -> Tensor:
    """The stored tensor whose bytes these are, without a copy. The memory is writable and aligned for its dtype."""
    flat = torch.frombuffer(memory, dtype=spec.dtype) if memory else torch.empty(0, dtype=spec.dtype)
    return flat.view(spec.shape)


class FileReader:
    """Open files, each once, and read many places of them. Close it by leaving the `reading` block."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}

    def stamp(self, path: Path) -> FileStamp:
        """Of the file that is read, whatever has its name by now."""
        return FileStamp.of(os.fstat(self._handle(path)))

    def read(self, wanted: Iterable[tuple[FilePlace, memoryview]]) -> None:
        """Fill each piece of memory (bytes, as many as the place has); neighbours that come in order with
        one call.

        Raises:
            DeltaError: a file cannot be opened, or ends too early.
        """
        run: list[memoryview] = []
        path, start, end = None, 0, 0
        for place, memory in wanted:
            assert len(memory) == place.size_bytes, (place, len(memory))
            if place.offset != end or place.path is not path or len(run) == _PIECES_A_CALL:
                self._read_run(path, start, run)
                run, path, start = [], place.path, place.offset
            if memory:
                run.append(memory)
            end = place.offset + place.size_bytes
        self._read_run(path, start, run)

    def _read_run(self, path: Path | None, offset: int, run: list[memoryview]) -> None:
        while run:
            assert path is not None
            try:
                done = os.preadv(self._handle(path), run, offset)
            except OSError as error:
                raise DeltaError(f"{path} cannot be read: {error.strerror or error}") from error
            if done == 0:
                raise DeltaError(
                    f"{path} ends at byte {offset}; it was cut while it was read, fetch it again"
                )
            offset += done
            filled = 0
            while filled < len(run) and done >= len(run[filled]):
                done -= len(run[filled])
                filled += 1
            run = run[filled:]
            if done:
                run[0] = run[0][done:]

    def _handle(self, path: Path) -> int:
        if path not in self._handles:
            try:
                self._handles[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                raise DeltaError(f"{path} cannot be read: {error.strerror or error}") from error
        return self._handles[path]

    def close(self) -> None:
        """Close all files."""
        while self._handles:
            os.close(self._handles.popitem()[1])


@contextmanager
def reading() -> Iterator[FileReader]:
    """A reader whose files are closed at the end."""
    reader = FileReader()
    try:
        yield reader
    finally:
        reader.close()
