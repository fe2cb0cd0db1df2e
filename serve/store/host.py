"""The host tier: artifacts in (pinned) host memory under a byte budget, for a device with memory of its own.

Contract: `lease` gives an artifact's bytes for as long as the block lasts, filled by the caller at most once
while they stay; or None when it is too large or there is no room now, and the caller does without. What a
caller's `fill` refuses (a file that is damaged, or gone) is never held, so a hit needs no second check:
entries are keyed by content hash. Any thread may call; fills of different artifacts run side by side, and of
one only once. It knows no tensors and no files, and allocates nothing beyond the budget.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from zen_train.serve.cache import Hit, Join, PolicyConfig, Start, TierCache
from zen_train.serve.types import HostStats

Parts = Mapping[str, memoryview]
"""Stored tensors, `NAME.SUFFIX`, as raw writable bytes, each aligned for any dtype."""

_ALIGNMENT_BYTES = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    parts: Parts
    size_bytes: int


class HostTier:
    """`allocate` gives a writable buffer of so many bytes, for instance pinned; a MemoryError of it is no room."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        allocate: Callable[[int], memoryview] = lambda size_bytes: memoryview(bytearray(size_bytes)),
        policy: PolicyConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._allocate = allocate
        config = policy or PolicyConfig(minimum_residency_s=0.0)
        self._cache = TierCache(budget_bytes=budget_bytes, clock=clock, config=config)
        self._changed = threading.Condition()
        self._held: dict[str, _Held] = {}
        self._hits = self._lookups = self._read_bytes = 0

    @contextmanager
    def lease(
        self, content_hash: str, sizes: Mapping[str, int], fill: Callable[[Parts], None]
    ) -> Iterator[Parts | None]:
        """The bytes of an artifact, or None. No reference to them may outlive the block.

        Args:
            content_hash: of the artifact.
            sizes: stored tensor -> bytes.
            fill: reads and checks them, when they are not here; what it raises is raised here.
        """
        size_bytes = sum(map(_aligned, sizes.values()))
        with self._changed:
            self._cache.record_request(content_hash, size_bytes)
            while isinstance(plan := self._cache.plan_load(content_hash, size_bytes), Join):
                self._changed.wait()
            self._lookups += 1
            self._hits += isinstance(plan, Hit)
            held = None
            if isinstance(plan, Hit):
                self._cache.acquire(content_hash)
                held = self._held[content_hash]
        if isinstance(plan, Start):
            self._let_go(plan.evict)
            held = self._load(content_hash, sizes, size_bytes, fill)
        if held is None:
            yield None
            return
        try:
            yield held.parts
        finally:
            del held  # the memory goes with the last reference, which must not be this frame's
            with self._changed:
                removed = self._cache.release(content_hash)
            self._let_go(removed)

    def remove(self, content_hash: str) -> None:
        """Give its memory back, as soon as nobody reads it."""
        with self._changed:
            removed = self._cache.remove(content_hash)
        self._let_go(removed)

    def stats(self) -> HostStats:
        """A snapshot."""
        with self._changed:
            return HostStats(
                budget_bytes=self._budget_bytes,
                resident={key: held.size_bytes for key, held in self._held.items()},
                hits=self._hits,
                lookups=self._lookups,
                read_bytes=self._read_bytes,
            )

    def check(self) -> None:
        """Asserts that memory and budget agree."""
        with self._changed:
            self._cache.check()
            resident = {e.key: e.size_bytes for e in self._cache.snapshot().entries if e.where == "resident"}
            assert resident == {key: held.size_bytes for key, held in self._held.items()}

    def _load(
        self, content_hash: str, sizes: Mapping[str, int], size_bytes: int, fill: Callable[[Parts], None]
    ) -> _Held | None:
        """Fill it and take a lease; on failure the room is given back and whoever waits tries again."""
        try:
            held = _Held(self._parts(sizes, size_bytes), size_bytes)
            fill(held.parts)
        except BaseException as error:
            with self._changed:
                self._cache.fail_load(content_hash)
                self._changed.notify_all()
            if isinstance(error, MemoryError):
                log.warning("no host memory for %d bytes; lower engine.host_bytes: %s", size_bytes, error)
                return None
            raise
        with self._changed:
            self._held[content_hash] = held
            self._read_bytes += sum(sizes.values())
            self._cache.finish_load(content_hash, leases=1)
            self._changed.notify_all()
        return held

    def _parts(self, sizes: Mapping[str, int], size_bytes: int) -> Parts:
        buffer = self._allocate(size_bytes)
        assert buffer.nbytes == size_bytes, "the allocator gave another size"
        parts, start = {}, 0
        for name, part_bytes in sizes.items():
            parts[name] = buffer[start : start + part_bytes]
            start += _aligned(part_bytes)
        return parts

    def _let_go(self, keys: tuple[str, ...]) -> None:
        """Free what is leaving. Without the lock: unpinning gigabytes takes a while, and `stats` must not wait."""
        for key in keys:
            with self._changed:
                held = self._held.pop(key)
            del held
            with self._changed:
                self._cache.evicted(key)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
