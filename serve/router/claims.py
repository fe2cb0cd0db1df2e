"""Which busy variants must give up their slots for cold ones that have waited too long. Pure.

A cold lane whose oldest request has waited `claim_s` becomes a *claimant*. What can be evicted at once counts
as room first; for the rest, busy lanes become *victims*: they get no new places, their running jobs end, and
then the cache can evict them.

A victim is not pinned by anybody, past its minimum residency, and has been given at least one place since it
was loaded when requests wait for it (or its load would have been wasted). Among several, in this order: one
that is a victim already (so that the choice does not flap); one whose jobs can end in time over one whose
jobs cannot, and of the latter the one that ends first; one that nobody waits for; the one with the least
traffic.

Claims are served oldest first, and the claim of a lane that cannot be met now takes no victim: a victim that
stands still for nothing helps nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zen_train.serve.router.lane import Lane


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What a lane holds on the device, as far as claims care."""

    size_bytes: int
    pinned: bool
    settled_at_s: float
    """End of its minimum residency."""
    requests_per_s: float


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Who is held back, and when the answer may be another without anything happening."""

    victims: frozenset[Lane]
    due_s: float
    """Infinite: only an event can change it."""


def claim(
    claimants: Iterable[Lane],
    busy: Mapping[Lane, Holding],
    *,
    room_bytes: int,
    previous: frozenset[Lane],
    in_time_tokens: float,
    now_s: float,
) -> Claims:
    """Choose victims.

    Args:
        claimants: cold lanes with known sizes, longest waiting first.
        busy: lanes on the device that somebody runs on or waits for.
        room_bytes: free, or freed as soon as somebody asks.
        previous: the victims until now.
        in_time_tokens: output tokens that a job produces within the time that draining should take.
    """
    due_s = float("inf")
    candidates = []
    for lane, holding in busy.items():
        if holding.pinned or (lane.queue and lane.last_place_s < lane.device_since_s):
            continue
        if holding.settled_at_s > now_s:
            due_s = min(due_s, holding.settled_at_s)
            continue
        candidates.append(lane)

    def preference(lane: Lane) -> tuple[bool, float, bool, float]:
        to_go = lane.tokens_to_go()
        return (
            lane not in previous,
            to_go if to_go > in_time_tokens else 0,
            bool(lane.queue),
            busy[lane].requests_per_s,
        )

    candidates.sort(key=preference)
    victims: set[Lane] = set()
    for claimant in claimants:
        assert claimant.size_bytes is not None
        chosen, gained = 0, 0
        while room_bytes + gained < claimant.size_bytes and chosen < len(candidates):
            gained += busy[candidates[chosen]].size_bytes
            chosen += 1
        if room_bytes + gained < claimant.size_bytes:
            return Claims(victims=frozenset(victims), due_s=due_s)
        victims.update(candidates[:chosen])
        del candidates[:chosen]
        room_bytes += gained - claimant.size_bytes
    return Claims(victims=frozenset(victims), due_s=float("inf"))
