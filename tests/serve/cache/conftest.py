"""Caches under a clock that only the test moves, checked after every test."""

from __future__ import annotations

import pytest

from zen_train.serve.cache import Hit, PolicyConfig, Start, TierCache

SLOT = 10


class Tier(TierCache):
    """A cache with what a server would do around it, in one call."""

    def __init__(self, budget_bytes, **config):
        self.now_s = 100.0
        plain = {"minimum_residency_s": 0.0, "auto_pins": 0}
        super().__init__(
            budget_bytes=budget_bytes, clock=lambda: self.now_s, config=PolicyConfig(**(plain | config))
        )

    def use(self, *keys, size_bytes=SLOT, after_s=1.0):
        """One request for each key in turn, loaded when it has to be; returns how many loads that took."""
        loads = 0
        for key in keys:
            self.now_s += after_s
            self.record_request(key, size_bytes)
            plan = self.plan_load(key, size_bytes)
            if not isinstance(plan, Hit):
                assert isinstance(plan, Start), plan
                self.carry_out(key, plan)
                loads += 1
        return loads

    def carry_out(self, key, plan):
        for victim in plan.evict:
            self.evicted(victim)
        self.finish_load(key)

    def where(self):
        return {entry.key: entry.where for entry in self.snapshot().entries}

    def resident(self):
        return {entry.key for entry in self.snapshot().entries if entry.where == "resident"}


@pytest.fixture
def tier():
    """Makes caches; `tier(slots=2)` has room for two keys of `SLOT` bytes."""
    made = []

    def make(*, slots=None, budget_bytes=None, **config):
        made.append(Tier(slots * SLOT if budget_bytes is None else budget_bytes, **config))
        return made[-1]

    yield make
    assert made, "the test made no cache"
    for cache in made:
        cache.check()
