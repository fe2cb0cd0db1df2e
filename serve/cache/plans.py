"""What the policy answers: frozen values, complete in themselves.

Times are those of the clock that the cache was given, in seconds; sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Blocked = Literal["being freed", "minimum residency", "in use", "loading", "pinned"]
"""What a load waits for: the confirmation of an eviction, time, the end of leases, other loads, or
(automatic pins) its own urgency.
"""
Where = Literal["loading", "resident", "leaving"]


@dataclass(frozen=True, slots=True)
class Hit:
    """It is there: `acquire` it."""


@dataclass(frozen=True, slots=True)
class Join:
    """It is being loaded for somebody else: wait for that load."""


@dataclass(frozen=True, slots=True)
class Start:
    """Load it. Room is reserved, and complete when each of `evict` was freed and confirmed with `evicted`."""

    evict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """No room now, nothing was reserved. Plan again at `retry_at_s`, and whenever something was released,
    evicted, loaded or failed.
    """

    blocked_by: Blocked
    retry_at_s: float | None = None
    """The earliest time at which waiting alone makes room; None: something else must happen first."""
    drain: tuple[str, ...] = ()
    """Blocked by use: what should get no new leases, so that room comes soonest."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """It will not fit however long it waits."""

    size_bytes: int
    budget_bytes: int
    pinned_bytes: int
    """Of others, pinned explicitly."""

    def __str__(self) -> str:
        if self.size_bytes > self.budget_bytes:
            return (
                f"it takes {self.size_bytes:,} bytes and the budget for variants is {self.budget_bytes:,}; "
                "raise the budget, or export it smaller"
            )
        return (
            f"it takes {self.size_bytes:,} bytes; of the budget for variants ({self.budget_bytes:,}) "
            f"{self.pinned_bytes:,} are pinned; unpin a variant, or raise the budget"
        )


Plan = Hit | Join | Start | Wait | TooLarge


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryView:
    """One key on the tier."""

    key: str
    size_bytes: int
    where: Where
    leases: int
    pinned: bool
    """Explicitly."""
    auto_pinned: bool
    """By its traffic, within the share of the budget that automatic pins may take."""
    settled_at_s: float
    """Resident: end of its minimum residency, on the cache's clock; else infinite."""
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """Where the bytes are. The parts add up: free + loading + leaving + in use + pinned + settling +
    evictable is the budget, plus what is still owed to a smaller one.
    """

    budget_bytes: int
    owed_bytes: int
    """Held above the budget after it was made smaller."""
    free_bytes: int
    loading_bytes: int
    leaving_bytes: int
    """Being evicted: not yet confirmed as freed."""
    in_use_bytes: int
    pinned_bytes: int
    """Not in use, pinned explicitly or automatically."""
    settling_bytes: int
    """Not in use, within their minimum residency."""
    evictable_bytes: int
    half_life_s: float
    """What the policy ranks by at present; 0: plain LRU."""
    loads: int
    evictions: int
    loaded_bytes: int
    """Of finished loads, ever."""
    entries: tuple[EntryView, ...]
