"""Who makes room: the order of eviction, for the cache and for its shadows.

A resident is worth its request rate times what loading it again would cost, per byte that it holds. The
cheapest go first. The one loaded last counts `newcomer_margin` times less: with more equally busy
variants than room (16 in rotation on 8 slots) the newcomers then replace each other, and the others are
hit every time, where LRU would hit never.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A resident that may be evicted."""

    key: str
    size_bytes: int
    order: int
    """Of loading: the higher, the later."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How candidates are valued. `score`: log2 of the rate, or the last request's time when `recency_only`."""

    score: Callable[[str], float]
    recency_only: bool
    newcomer_margin: float
    load_overhead_bytes: int

    def victims(self, candidates: Sequence[Candidate], need_bytes: int) -> tuple[str, ...] | None:
        """The cheapest that free `need_bytes`; None when all together do not. O(n), plus O(log n) a victim."""
        if sum(candidate.size_bytes for candidate in candidates) < need_bytes:
            return None
        newest = max((candidate.order for candidate in candidates), default=0)
        heap = [
            (self._value(candidate, newest), candidate.order, candidate.key, candidate.size_bytes)
            for candidate in candidates
        ]
        heapq.heapify(heap)
        chosen: list[tuple[str, int]] = []
        freed_bytes = 0
        while freed_bytes < need_bytes:
            _, _, key, size_bytes = heapq.heappop(heap)
            chosen.append((key, size_bytes))
            freed_bytes += size_bytes
        # A large one that came last may have made earlier ones needless: spare the most valuable of those.
        kept: list[str] = []
        for key, size_bytes in reversed(chosen):
            if freed_bytes - size_bytes >= need_bytes:
                freed_bytes -= size_bytes
            else:
                kept.append(key)
        return tuple(reversed(kept))

    def _value(self, candidate: Candidate, newest: int) -> float:
        score = self.score(candidate.key)
        if self.recency_only:
            return score
        reload_per_byte = 1.0 + self.load_overhead_bytes / max(candidate.size_bytes, 1)
        handicap = self.newcomer_margin if candidate.order == newest else 1.0
        return score + math.log2(reload_per_byte / handicap)
