"""Exponentially decayed request counts by key, in bounded memory.

A request at time t counts `2^((t - now) / half_life)`. All counts shrink by the same factor as time
passes, so their order changes only by requests. What is stored is therefore the count as of time zero,
in log2 ("forward decay", Cormode et al., ICDE 2009): nothing needs an update when nothing happens, and
it cannot overflow. A half-life of 0 is the limit in which only the last request counts: the order is
that of LRU.
"""

from __future__ import annotations

import math

NEVER = -math.inf
"""The score of a key that is not remembered."""


class RateBook:
    """Time never goes back. Keys are remembered whether or not they are on a tier."""

    def __init__(self, *, half_life_s: float, remembered: int) -> None:
        self.half_life_s = half_life_s
        self._remembered = remembered
        self._scores: dict[str, float] = {}

    def record(self, key: str, now_s: float) -> None:
        """Count one request."""
        if not self.half_life_s:
            self._scores[key] = now_s
        else:
            new = now_s / self.half_life_s
            old = self._scores.get(key, NEVER)
            low, high = min(old, new), max(old, new)
            self._scores[key] = high + math.log2(1.0 + 2.0 ** (low - high))
        if len(self._scores) > self._remembered:
            self._forget_quiet()

    def score(self, key: str) -> float:
        """Orders keys by their rate; differences are log2 of ratios (of the rate; with half-life 0: seconds)."""
        return self._scores.get(key, NEVER)

    def count(self, key: str, now_s: float) -> float:
        """Decayed number of requests. The half-life is above 0."""
        return float(2.0 ** (self.score(key) - now_s / self.half_life_s))

    def per_s(self, key: str, now_s: float) -> float:
        """The rate that would give this count if it were steady."""
        return self.count(key, now_s) * math.log(2.0) / self.half_life_s

    def forget(self, key: str) -> None:
        self._scores.pop(key, None)

    def __len__(self) -> int:
        return len(self._scores)

    def _forget_quiet(self) -> None:
        """Keep the busiest three quarters: the cost is spread over the many requests until the next time."""
        ranked = sorted(self._scores, key=self.score, reverse=True)
        for key in ranked[self._remembered * 3 // 4 :]:
            del self._scores[key]
