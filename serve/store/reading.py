"""Read an artifact's files whole, into memory that is already there, and compare digests.

The bytes are copied once, from the page cache to the buffer. A file that shrinks meanwhile is an error; a
mapped one would kill the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zen_train.delta import DeltaConfig
from zen_train.delta.shard_reader import open_shards
from zen_train.errors import DeltaError
from zen_train.serve.errors import VariantUnusableError
from zen_train.serve.store.opening import open_delta
from zen_train.serve.store.stamps import FolderStamp, folder_stamp

_PIECE_BYTES = 8 << 20
_HASH_THREADS = 2


@dataclass(frozen=True)
class Described:
    """An artifact whose files had these stamps: its description, and where its tensors lie."""

    stamp: FolderStamp
    config: DeltaConfig
    files: Mapping[Path, tuple[int, Mapping[str, tuple[int, int]]]]
    """path -> (bytes, stored tensor -> (first byte, end))."""


def stored_bytes(folder: Path) -> int:
    """What its shards take. Raises VariantUnusableError when it is gone."""
    return sum(size for name, _, size, _ in stamp_of(folder) if name.endswith(".safetensors"))


def stamp_of(folder: Path) -> FolderStamp:
    """`folder_stamp`, with the errors of serving."""
    try:
        return folder_stamp(folder)
    except OSError as error:
        raise VariantUnusableError(
            f"the variant in {folder} cannot be read: {error.strerror or error}"
        ) from error


def describe(content_hash: str, folder: Path, stamp: FolderStamp) -> Described:
    """Open and check the artifact. Raises VariantUnusableError: vanished, damaged, or other weights by now."""
    artifact = open_delta(folder, content_hash)
    try:
        shards = open_shards(folder, "delta")
    except DeltaError as error:
        raise VariantUnusableError(f"the variant in {folder} cannot be served: {error}") from error
    sizes = {name: size_bytes for name, _, size_bytes, _ in stamp}
    files = {}
    for shard in shards:
        lengths = {name: shard.spec(name).size_bytes for name in shard.names()}
        file_bytes = sizes.get(shard.path.name, 0)
        # A checked file holds its tensors without holes up to its last byte.
        first = file_bytes - sum(lengths.values())
        places = {}
        for name, length in lengths.items():
            places[name] = (first, first + length)
            first += length
        files[shard.path] = (file_bytes, places)
    return Described(stamp, artifact.config, files)


def read_file(path: Path, buffer: memoryview) -> None:
    """Fill the buffer. Raises VariantUnusableError for a file that is gone or ends too early."""
    done = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while done < buffer.nbytes:
                count = file.readinto(buffer[done : done + _PIECE_BYTES])
                if not count:
                    raise VariantUnusableError(
                        f"{path} was cut to {done} bytes while it was read; fetch it again"
                    )
                done += count
    except OSError as error:
        raise VariantUnusableError(f"{path} cannot be read: {error.strerror or error}") from error


def compare_digests(folder: Path, config: DeltaConfig, parts: Mapping[str, memoryview]) -> None:
    """Every stored tensor against its digest, in threads. Raises VariantUnusableError naming the first that differs."""
    expected = {
        f"{name}.{suffix}": digest
        for name, entry in config.tensors.items()
        for suffix, digest in entry.parts.items()
    }
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        found = pool.map(lambda name: hashlib.sha256(parts[name]).hexdigest(), expected)
        for (name, digest), got in zip(expected.items(), found, strict=True):
            if got != digest:
                raise VariantUnusableError(
                    f"{folder}: {name} has digest {got[:16]}, expected {digest[:16]}; the file is damaged, "
                    "fetch it again"
                )
