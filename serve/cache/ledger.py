"""Where every byte of a budget is. States and sums only; it decides nothing.

A key is loading, resident or leaving, or not here. A load holds the bytes that were free when it was
planned, and gets those of its victims as each is confirmed freed: a device frees later than one asks.
So at any time free + held by loads + resident + leaving = budget + owed, where `owed` is what a smaller
budget has not got back yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from zen_train.serve.cache.plans import Where


@dataclass(slots=True, eq=False)
class Entry:
    """One key on the tier."""

    key: str
    size_bytes: int
    where: Where
    held_bytes: int
    """Really its own: below `size_bytes` while the room for a load is still being freed."""
    order: int
    """Of loading: the higher, the later."""
    leases: int = 0
    resident_since_s: float = 0.0
    heir: Entry | None = None
    """Leaving: the load that gets its bytes."""
    doomed: bool = False
    """To leave as soon as nothing uses it."""


class Ledger:
    """All entries of one tier."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.free_bytes = budget_bytes
        self.owed_bytes = 0
        self.entries: dict[str, Entry] = {}
        self._orders = 0

    def in_state(self, where: Where) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.where == where]

    def unpromised_bytes(self) -> int:
        """What leaves and no load waits for; never negative, as a load is promised only what its victims hold."""
        leaving = sum(entry.held_bytes for entry in self.in_state("leaving"))
        promised = sum(entry.size_bytes - entry.held_bytes for entry in self.in_state("loading"))
        return leaving - promised

    def begin_load(self, key: str, size_bytes: int, victims: tuple[str, ...]) -> None:
        """Reserve room: what is free, and what the victims hold."""
        assert key not in self.entries, key
        held_bytes = min(self.free_bytes, size_bytes)
        self._orders += 1
        entry = Entry(key, size_bytes, "loading", held_bytes, self._orders)
        self.free_bytes -= held_bytes
        self.entries[key] = entry
        for victim in victims:
            self.begin_leave(victim, heir=entry)

    def end_load(self, key: str, now_s: float) -> Entry:
        """The bytes are there and may be used."""
        entry = self._get(key, "loading")
        assert entry.held_bytes == entry.size_bytes, f"{key} was loaded before its room was free"
        entry.where, entry.resident_since_s = "resident", now_s
        return entry

    def drop_load(self, key: str) -> None:
        """It failed. What its victims still hold comes free when they are gone."""
        entry = self._get(key, "loading")
        del self.entries[key]
        for other in self.in_state("leaving"):
            if other.heir is entry:
                other.heir = None
        self._give_back(entry.held_bytes)

    def begin_leave(self, key: str, heir: Entry | None = None) -> None:
        """Its bytes are being freed."""
        entry = self._get(key, "resident")
        assert not entry.leases, f"{key} is in use"
        entry.where, entry.heir = "leaving", heir

    def end_leave(self, key: str) -> None:
        """Its bytes are free."""
        entry = self._get(key, "leaving")
        del self.entries[key]
        left_bytes = entry.held_bytes
        if entry.heir is not None:
            passed_bytes = min(left_bytes, entry.heir.size_bytes - entry.heir.held_bytes)
            entry.heir.held_bytes += passed_bytes
            left_bytes -= passed_bytes
        self._give_back(left_bytes)

    def resize(self, budget_bytes: int) -> None:
        """A smaller budget takes what is free now, and what comes free later."""
        change_bytes = budget_bytes - self.budget_bytes
        self.budget_bytes = budget_bytes
        if change_bytes >= 0:
            self._give_back(change_bytes)
        else:
            taken_bytes = min(self.free_bytes, -change_bytes)
            self.free_bytes -= taken_bytes
            self.owed_bytes += -change_bytes - taken_bytes

    def check(self) -> None:
        """Asserts that the bytes add up and that every entry is in one sound state."""
        held = sum(entry.held_bytes for entry in self.entries.values())
        assert self.free_bytes + held == self.budget_bytes + self.owed_bytes, (self.free_bytes, held)
        assert self.free_bytes >= 0
        assert self.owed_bytes >= 0
        assert not (self.free_bytes and self.owed_bytes), "free bytes while some are owed"
        promised = dict.fromkeys(self.entries, 0)
        for key, entry in self.entries.items():
            assert entry.key == key
            assert entry.size_bytes >= 0
            assert 0 <= entry.held_bytes <= entry.size_bytes
            assert entry.where == "loading" or entry.held_bytes == entry.size_bytes
            assert entry.leases >= 0
            assert not entry.leases or entry.where == "resident"
            if entry.heir is not None:
                assert entry.where == "leaving"
                assert self.entries.get(entry.heir.key) is entry.heir or entry.heir.where != "loading"
                promised[entry.heir.key] = promised.get(entry.heir.key, 0) + entry.held_bytes
        for entry in self.in_state("loading"):
            assert entry.held_bytes + promised[entry.key] >= entry.size_bytes, (
                f"{entry.key} is promised too little"
            )

    def _get(self, key: str, where: Where) -> Entry:
        entry = self.entries.get(key)
        assert entry is not None, f"{key} is not here"
        assert entry.where == where, f"{key} is {entry.where}, not {where}"
        return entry

    def _give_back(self, size_bytes: int) -> None:
        repaid_bytes = min(size_bytes, self.owed_bytes)
        self.owed_bytes -= repaid_bytes
        self.free_bytes += size_bytes - repaid_bytes
