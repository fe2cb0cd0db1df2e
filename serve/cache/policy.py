"""The cache of one tier, keyed by content hash, with a budget in bytes: what stays, what makes room.

Contract
- Every request is told by `record_request`; request rates are remembered for keys that are not on the
  tier as well.
- `plan_load` answers `Hit`, `Join`, `Start`, `Wait` or `TooLarge` (`plans.py`). Only `Start` changes
  anything: it reserves room and begins the evictions it names. Each victim's bytes count as its own
  until `evicted` confirms that they are free; the load may touch memory once `has_room` says so, and
  ends with `finish_load` or `fail_load`.
- Never evicted: what is in use (leases), loading, pinned explicitly. Not for an ordinary load: the
  busiest variants (automatic pins) and what was loaded less than `minimum_residency_s` ago. An urgent
  load, one that has waited as long as anybody should, may evict those too.
- Among the rest the least valuable go first: request rate times the cost of loading again, per byte
  (`victims.py`), with the half-life of the rate that serves the present traffic best (`shadow.py`).

It does no I/O and starts no thread; the clock is the caller's, and so is the lock if there are several
threads. A wrong call (a lease that was never taken) is an AssertionError. An operation costs O(n) in
resident keys at most, O(n log n) for `Wait`.
"""

from __future__ import annotations

from collections.abc import Callable

from zen_train.serve.cache.config import PolicyConfig
from zen_train.serve.cache.ledger import Entry, Ledger
from zen_train.serve.cache.pins import Pins
from zen_train.serve.cache.plans import CacheSnapshot, EntryView, Hit, Join, Plan, Start, TooLarge
from zen_train.serve.cache.shadow import Shadows
from zen_train.serve.cache.victims import Candidate
from zen_train.serve.cache.waiting import explain_wait


class TierCache:
    """One tier. `clock`: seconds, never going back."""

    def __init__(
        self, *, budget_bytes: int, clock: Callable[[], float], config: PolicyConfig | None = None
    ) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes is {budget_bytes}; give 0 or more")
        self.config = config or PolicyConfig()
        self._clock = clock
        self._ledger = Ledger(budget_bytes)
        self._pins = Pins(self.config)
        self._shadows = Shadows(self.config)
        self._loads = self._evictions = self._loaded_bytes = 0

    # --- traffic and loads

    def record_request(self, key: str, size_bytes: int) -> None:
        """Count one request, whether it finds the key here or not. `size_bytes`: what it takes on this tier."""
        now_s = self._clock()
        self._pins.record(key, now_s)
        self._shadows.record(key, now_s)
        if key not in self._pins.explicit:
            self._shadows.request(key, size_bytes, self._ledger.budget_bytes - self._pinned_bytes(key))

    def plan_load(self, key: str, size_bytes: int, *, urgent: bool = False) -> Plan:
        """What to do so that `key` can be used. Reserves and evicts only when the answer is `Start`."""
        if size_bytes < 0:
            raise ValueError(f"size_bytes of {key} is {size_bytes}; give 0 or more")
        ledger = self._ledger
        entry = ledger.entries.get(key)
        if entry is not None and entry.where != "leaving":
            entry.doomed = False
            return Hit() if entry.where == "resident" else Join()
        pinned_bytes = self._pinned_bytes(key)
        if size_bytes > ledger.budget_bytes - pinned_bytes:
            return TooLarge(size_bytes, ledger.budget_bytes, pinned_bytes)
        coming_bytes = ledger.unpromised_bytes() - ledger.owed_bytes
        need_bytes = size_bytes - ledger.free_bytes + max(-coming_bytes, 0)
        # What is being freed already comes sooner than a further eviction, and makes it smaller.
        being_freed = entry is not None or (need_bytes > 0 and coming_bytes > 0)
        if not being_freed:
            victims = self._victims(need_bytes, urgent=urgent)
            if victims is not None:
                ledger.begin_load(key, size_bytes, victims)
                return Start(victims)
        return explain_wait(
            [] if being_freed else list(ledger.entries.values()),
            need_bytes=need_bytes,
            protected=self._protected(urgent=urgent),
            minimum_residency_s=0.0 if urgent else self.config.minimum_residency_s,
            ranking=self._shadows.ranking,
        )

    def has_room(self, key: str) -> bool:
        """Whether the room for a planned load is complete, so that it may begin."""
        entry = self._ledger.entries.get(key)
        assert entry is not None, f"{key} is not planned"
        return entry.held_bytes == entry.size_bytes

    def finish_load(self, key: str, *, leases: int = 0) -> tuple[str, ...]:
        """The load is done; take `leases` of it at once. Without one only minimum residency protects it.

        Returns what to evict now: the key itself, when it was removed meanwhile and has no lease.
        """
        entry = self._ledger.end_load(key, self._clock())
        entry.leases = leases
        self._loads += 1
        self._loaded_bytes += entry.size_bytes
        return self._leave_if_doomed(entry)

    def fail_load(self, key: str) -> None:
        """The load failed, and nothing of it is left on the tier. Evictions that it began go on."""
        self._ledger.drop_load(key)

    def evicted(self, key: str) -> None:
        """The bytes of a key that was to be evicted are free."""
        self._ledger.end_leave(key)
        self._evictions += 1

    # --- use

    def acquire(self, key: str) -> None:
        """Take a lease of a resident key: it is not evicted until it is returned."""
        entry = self._ledger.entries.get(key)
        assert entry is not None, f"{key} is not here"
        assert entry.where == "resident", f"{key} is {entry.where}, not resident"
        entry.leases += 1

    def release(self, key: str) -> tuple[str, ...]:
        """Return a lease. Returns what to evict now: the key itself, when it was removed meanwhile."""
        entry = self._ledger.entries.get(key)
        assert entry is not None, f"{key} is not here"
        assert entry.leases > 0, f"{key} has no lease to return"
        entry.leases -= 1
        return self._leave_if_doomed(entry)

    def pin(self, key: str) -> None:
        """Never evict it once it is here. Holds for keys that are not here, and until `unpin` or `remove`."""
        self._pins.explicit.add(key)

    def unpin(self, key: str) -> None:
        """Take an explicit pin away; nothing happens when there is none."""
        self._pins.explicit.discard(key)

    def remove(self, key: str) -> tuple[str, ...]:
        """Forget a key and its pin. Returns what to evict now.

        That is the key, or nothing when it is not here, still loads or is in use; then `finish_load` or the last
        `release` returns it. Planning it again keeps it.
        """
        self._pins.forget(key)
        self._shadows.forget(key)
        entry = self._ledger.entries.get(key)
        if entry is None or entry.where == "leaving":
            return ()
        entry.doomed = True
        return self._leave_if_doomed(entry)

    def resize(self, budget_bytes: int) -> tuple[str, ...]:
        """Change the budget. Returns what to evict now.

        What else is owed is taken from whatever comes free, and `trim` says what more can be evicted.
        """
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes is {budget_bytes}; give 0 or more")
        self._ledger.resize(budget_bytes)
        return self.trim()

    def trim(self) -> tuple[str, ...]:
        """What to evict now because a smaller budget is still owed bytes; as much of it as can be."""
        need_bytes = self._ledger.owed_bytes - self._ledger.unpromised_bytes()
        candidates = self._candidates(urgent=True)
        reachable_bytes = min(need_bytes, sum(candidate.size_bytes for candidate in candidates))
        victims = self._shadows.ranking.victims(candidates, reachable_bytes) or ()
        for victim in victims:
            self._ledger.begin_leave(victim)
        return victims

    # --- looking

    def snapshot(self) -> CacheSnapshot:
        """Everything at this moment. O(n)."""
        now_s, ledger = self._clock(), self._ledger
        automatic = self._automatic()
        parts = {"in use": 0, "pinned": 0, "settling": 0, "evictable": 0}
        for entry in ledger.in_state("resident"):
            if entry.leases:
                part = "in use"
            elif entry.key in self._pins.explicit or entry.key in automatic:
                part = "pinned"
            else:
                part = "settling" if self._settled_at_s(entry) > now_s else "evictable"
            parts[part] += entry.size_bytes
        return CacheSnapshot(
            budget_bytes=ledger.budget_bytes,
            owed_bytes=ledger.owed_bytes,
            free_bytes=ledger.free_bytes,
            loading_bytes=sum(entry.held_bytes for entry in ledger.in_state("loading")),
            leaving_bytes=sum(entry.held_bytes for entry in ledger.in_state("leaving")),
            in_use_bytes=parts["in use"],
            pinned_bytes=parts["pinned"],
            settling_bytes=parts["settling"],
            evictable_bytes=parts["evictable"],
            half_life_s=self._shadows.half_life_s,
            loads=self._loads,
            evictions=self._evictions,
            loaded_bytes=self._loaded_bytes,
            entries=tuple(
                EntryView(
                    key=entry.key,
                    size_bytes=entry.size_bytes,
                    where=entry.where,
                    leases=entry.leases,
                    pinned=entry.key in self._pins.explicit,
                    auto_pinned=entry.key in automatic,
                    settled_at_s=self._settled_at_s(entry),
                    requests_per_s=self._pins.traffic.per_s(entry.key, now_s),
                )
                for entry in ledger.entries.values()
            ),
        )

    def requests_per_s(self, key: str) -> float:
        """The decayed request rate of any key, here or not."""
        return self._pins.traffic.per_s(key, self._clock())

    def is_pinned(self, key: str) -> bool:
        """Whether a key, here or not, is pinned explicitly."""
        return key in self._pins.explicit

    def check(self) -> None:
        """Asserts the integrity of everything: sums, states, shadows."""
        self._ledger.check()
        self._shadows.check()
        view = self.snapshot()
        parts = view.free_bytes + view.loading_bytes + view.leaving_bytes
        parts += view.in_use_bytes + view.pinned_bytes + view.settling_bytes + view.evictable_bytes
        assert parts == view.budget_bytes + view.owed_bytes, view
        assert len(self._pins.automatic) <= self.config.auto_pins

    # --- inside

    def _victims(self, need_bytes: int, *, urgent: bool) -> tuple[str, ...] | None:
        if need_bytes <= 0:
            return ()
        return self._shadows.ranking.victims(self._candidates(urgent=urgent), need_bytes)

    def _candidates(self, *, urgent: bool) -> list[Candidate]:
        now_s, protected = self._clock(), self._protected(urgent=urgent)
        return [
            Candidate(entry.key, entry.size_bytes, entry.order)
            for entry in self._ledger.in_state("resident")
            if not entry.leases
            and entry.key not in protected
            and (urgent or self._settled_at_s(entry) <= now_s)
        ]

    def _protected(self, *, urgent: bool) -> set[str]:
        return self._pins.explicit if urgent else self._pins.explicit | self._automatic()

    def _automatic(self) -> set[str]:
        sizes = {entry.key: entry.size_bytes for entry in self._ledger.in_state("resident")}
        return self._pins.effective_automatic(sizes, self._ledger.budget_bytes)

    def _pinned_bytes(self, but: str) -> int:
        return sum(
            entry.size_bytes
            for key in self._pins.explicit
            if key != but and (entry := self._ledger.entries.get(key)) and entry.where != "leaving"
        )

    def _settled_at_s(self, entry: Entry) -> float:
        if entry.where != "resident":
            return float("inf")
        return entry.resident_since_s + self.config.minimum_residency_s

    def _leave_if_doomed(self, entry: Entry) -> tuple[str, ...]:
        if not entry.doomed or entry.leases or entry.where != "resident":
            return ()
        self._ledger.begin_leave(entry.key)
        return (entry.key,)
