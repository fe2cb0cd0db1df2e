"""The host tier: artifacts in (pinned) host memory under a byte budget, for a device with memory of its own.

Contract: `lease` gives an artifact's bytes for as long as the block lasts, read from disk at most once while it
stays; or None when it is too large or there is no room now, and the caller reads the files itself. With a
budget of 0, for a device that shares the host's memory, that is always so: the page cache is the host tier then.
A file is read in one pass straight into its buffer. An artifact is opened, and its digests are compared, the
first time files with these stamps are read. Any thread may call; loads of different artifacts run side by
side, and of one only once. It knows no tensors: the device's code makes them of the bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zen_train.delta import DeltaConfig
from zen_train.serve.cache import Hit, Join, PolicyConfig, Start, TierCache
from zen_train.serve.errors import VariantUnusableError
from zen_train.serve.store.reading import (
    Described,
    compare_digests,
    describe,
    read_file,
    stamp_of,
    stored_bytes,
)


@dataclass(frozen=True)
class HostDelta:
    """One artifact in host memory. `parts`: its stored tensors, `NAME.SUFFIX`, as raw bytes."""

    config: DeltaConfig
    parts: Mapping[str, memoryview]
    size_bytes: int
    """Of its files: what the buffers take."""


@dataclass(frozen=True, kw_only=True)
class HostStats:
    """Since the start, and now."""

    resident: Mapping[str, int]
    """content hash -> bytes."""
    hits: int
    lookups: int
    read_bytes: int
    read_s: float
    """Summed over loads: reading alone, without opening, allocating and hashing."""
    hash_s: float


class HostTier:
    """`allocate` gives a writable buffer of so many bytes, for instance a pinned tensor's."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        allocate: Callable[[int], memoryview] = lambda size_bytes: memoryview(bytearray(size_bytes)),
        policy: PolicyConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocate = allocate
        config = policy or PolicyConfig(minimum_residency_s=0.0)
        self._cache = TierCache(budget_bytes=budget_bytes, clock=clock, config=config)
        self._changed = threading.Condition()
        self._held: dict[str, HostDelta] = {}
        self._known: dict[str, Described] = {}
        """What was opened and verified, by content hash."""
        self._hits = self._lookups = self._read_bytes = 0
        self._read_s = self._hash_s = 0.0

    @contextmanager
    def lease(self, content_hash: str, folder: Path) -> Iterator[HostDelta | None]:
        """The bytes of an artifact, or None: read the files yourself.

        Raises:
            VariantUnusableError: it vanished, was replaced, or is damaged. Nothing of it is held then.
        """
        size_bytes = stored_bytes(folder) if content_hash not in self._held else 0
        with self._changed:
            held = self._held.get(content_hash)
            size_bytes = held.size_bytes if held else size_bytes
            self._lookups += 1
            self._hits += held is not None
            self._cache.record_request(content_hash, size_bytes)
            plan = self._cache.plan_load(content_hash, size_bytes)
            while isinstance(plan, Join):
                self._changed.wait()
                plan = self._cache.plan_load(content_hash, size_bytes)
            if isinstance(plan, Start):
                self._drop(plan.evict)
            elif isinstance(plan, Hit):
                self._cache.acquire(content_hash)
                held = self._held[content_hash]
        if isinstance(plan, Start):
            held = self._load(content_hash, folder, size_bytes)
        elif not isinstance(plan, Hit):
            yield None
            return
        try:
            yield held
        finally:
            with self._changed:
                self._drop(self._cache.release(content_hash))

    def remove(self, content_hash: str) -> None:
        """Give its memory back, as soon as nobody reads it, and hash it again next time."""
        with self._changed:
            self._known.pop(content_hash, None)
            self._drop(self._cache.remove(content_hash))

    def stats(self) -> HostStats:
        with self._changed:
            return HostStats(
                resident={key: held.size_bytes for key, held in self._held.items()},
                hits=self._hits,
                lookups=self._lookups,
                read_bytes=self._read_bytes,
                read_s=self._read_s,
                hash_s=self._hash_s,
            )

    def check(self) -> None:
        """Asserts that memory and budget agree."""
        with self._changed:
            self._cache.check()
            resident = {e.key: e.size_bytes for e in self._cache.snapshot().entries if e.where == "resident"}
            assert resident == {key: held.size_bytes for key, held in self._held.items()}

    def _load(self, content_hash: str, folder: Path, size_bytes: int) -> HostDelta:
        """Read it and take a lease; on failure the room is given back and whoever waits tries again."""
        try:
            held = self._read(content_hash, folder, size_bytes)
        except BaseException:
            with self._changed:
                self._cache.fail_load(content_hash)
                self._changed.notify_all()
            raise
        with self._changed:
            self._held[content_hash] = held
            self._cache.finish_load(content_hash, leases=1)
            self._changed.notify_all()
        return held

    def _read(self, content_hash: str, folder: Path, size_bytes: int) -> HostDelta:
        stamp = stamp_of(folder)
        known = self._known.get(content_hash)
        if known is None or known.stamp != stamp:
            known = None
            described = describe(content_hash, folder, stamp)
        else:
            described = known
        parts: dict[str, memoryview] = {}
        read_s = 0.0
        for path, (file_bytes, places) in described.files.items():
            buffer = self._allocate(file_bytes)
            assert buffer.nbytes == file_bytes, "the allocator gave another size"
            started_s = time.perf_counter()
            read_file(path, buffer)
            read_s += time.perf_counter() - started_s
            parts |= {name: buffer[first:end] for name, (first, end) in places.items()}
        if stamp_of(folder) != stamp:
            raise VariantUnusableError(f"{folder} changed while it was read; ask for the variant again")
        started_s = time.perf_counter()
        if known is None:
            compare_digests(folder, described.config, parts)
        hash_s = time.perf_counter() - started_s
        with self._changed:
            self._known[content_hash] = described
            self._read_bytes += size_bytes
            self._read_s += read_s
            self._hash_s += hash_s
        return HostDelta(described.config, parts, size_bytes)

    def _drop(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            del self._held[key]
            self._cache.evicted(key)
