"""Which half-life fits the traffic: each is tried on a shadow of the cache, and the cheapest is followed.

A shadow holds keys and sizes, no weights. It sees every request, and loads and evicts as its own
ranking says. No single half-life serves all traffic: conversations want a short one (or LRU), steady
popularity a long one, and the best length depends on how many requests come a second. A shadow costs
O(1) a request it hits and O(n) a request it misses. It knows neither leases nor pins nor minimum
residency: it compares rankings, it does not plan.
"""

from __future__ import annotations

from zen_train.serve.cache.config import PolicyConfig
from zen_train.serve.cache.rates import RateBook
from zen_train.serve.cache.victims import Candidate, Ranking

_MEMORY_REQUESTS = 200.0
"""What a shadow loaded counts 1/e as much after this many requests. From 100 to 400 makes no difference
above 4 % in any simulated trace."""
_LEAD = 0.9
"""The leader gives way to one that cost less than this share of its own cost, so that equals do not alternate."""


class _Shadow:
    """One ranking, and what it would hold."""

    def __init__(self, half_life_s: float, config: PolicyConfig) -> None:
        self.book = RateBook(half_life_s=half_life_s, remembered=config.remembered)
        self.ranking = Ranking(
            score=self.book.score,
            recency_only=not half_life_s,
            newcomer_margin=config.newcomer_margin,
            load_overhead_bytes=config.load_overhead_bytes,
        )
        self.cost = 0.0
        self.held: dict[str, Candidate] = {}
        self.held_bytes = 0
        self._overhead_bytes = config.load_overhead_bytes
        self._loads = 0

    def request(self, key: str, size_bytes: int, budget_bytes: int) -> None:
        self.cost *= 1.0 - 1.0 / _MEMORY_REQUESTS
        held = self.held.get(key)
        if held is not None and held.size_bytes == size_bytes and self.held_bytes <= budget_bytes:
            return
        if held is not None:
            self.drop(key)
        if size_bytes > budget_bytes:
            return
        excess_bytes = self.held_bytes + size_bytes - budget_bytes
        if excess_bytes > 0:
            for victim in self.ranking.victims(list(self.held.values()), excess_bytes) or ():
                self.drop(victim)
        self._loads += 1
        self.held[key] = Candidate(key, size_bytes, self._loads)
        self.held_bytes += size_bytes
        self.cost += size_bytes + self._overhead_bytes

    def drop(self, key: str) -> None:
        self.held_bytes -= self.held.pop(key).size_bytes


class Shadows:
    """The rankings that compete, plain LRU among them."""

    def __init__(self, config: PolicyConfig) -> None:
        self._shadows = [_Shadow(half_life_s, config) for half_life_s in (0.0, *config.half_lives_s)]
        # Before there is evidence, the middle of the ladder: neither the last request alone nor all of history.
        self._leader = self._shadows[len(self._shadows) // 2]

    @property
    def ranking(self) -> Ranking:
        """Of the shadow that loaded least lately."""
        return self._leader.ranking

    @property
    def half_life_s(self) -> float:
        return self._leader.book.half_life_s

    def record(self, key: str, now_s: float) -> None:
        """Count a request."""
        for shadow in self._shadows:
            shadow.book.record(key, now_s)

    def request(self, key: str, size_bytes: int, budget_bytes: int) -> None:
        """Let every shadow answer the request (after `record`) within `budget_bytes`, and choose the leader."""
        for shadow in self._shadows:
            shadow.request(key, size_bytes, budget_bytes)
        best = min(self._shadows, key=lambda shadow: shadow.cost)
        if best.cost < _LEAD * self._leader.cost:
            self._leader = best

    def forget(self, key: str) -> None:
        for shadow in self._shadows:
            shadow.book.forget(key)
            if key in shadow.held:
                shadow.drop(key)

    def check(self) -> None:
        """Asserts that every shadow's bytes add up."""
        for shadow in self._shadows:
            assert shadow.held_bytes == sum(candidate.size_bytes for candidate in shadow.held.values())
