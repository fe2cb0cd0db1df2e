"""Pins: those that people set, and those that traffic sets.

Both are kept by key, on the tier or not. An automatic pin moves to another key only when that one is
busier by a margin, so that two near equals do not take turns.
"""

from __future__ import annotations

import math

from zen_train.serve.cache.config import PolicyConfig
from zen_train.serve.cache.rates import RateBook


class Pins:
    """`explicit` by request, `automatic` by traffic."""

    def __init__(self, config: PolicyConfig) -> None:
        self.explicit: set[str] = set()
        self.automatic: set[str] = set()
        self.traffic = RateBook(half_life_s=config.traffic_half_life_s, remembered=config.remembered)
        self._config = config

    def record(self, key: str, now_s: float) -> None:
        """Count a request, and let the automatic pins follow. O(automatic pins)."""
        self.traffic.record(key, now_s)
        config, score = self._config, self.traffic.score
        if not config.auto_pins:
            return
        weakest = min(self.automatic, key=score, default=None)
        if (
            weakest is not None
            and self._count(weakest, now_s) * config.auto_pin_margin < config.auto_pin_requests
        ):
            self.automatic.discard(weakest)
        if key in self.automatic or self._count(key, now_s) < config.auto_pin_requests:
            return
        if len(self.automatic) < config.auto_pins:
            self.automatic.add(key)
            return
        weakest = min(self.automatic, key=score)
        if score(key) >= score(weakest) + math.log2(config.auto_pin_margin):
            self.automatic.remove(weakest)
            self.automatic.add(key)

    def effective_automatic(self, size_bytes: dict[str, int], budget_bytes: int) -> set[str]:
        """The automatic pins that count: the busiest of `size_bytes` that fit their share of the budget."""
        room_bytes = int(budget_bytes * self._config.auto_pin_share)
        counted = set()
        for key in sorted(self.automatic & size_bytes.keys(), key=self.traffic.score, reverse=True):
            if size_bytes[key] <= room_bytes:
                room_bytes -= size_bytes[key]
                counted.add(key)
        return counted

    def forget(self, key: str) -> None:
        self.explicit.discard(key)
        self.automatic.discard(key)
        self.traffic.forget(key)

    def _count(self, key: str, now_s: float) -> float:
        return self.traffic.count(key, now_s)
