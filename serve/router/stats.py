"""What happened under each name since it is served. One object per name, so their number is bounded.

Counters belong to names, not to content hashes: a variant that is replaced keeps its history.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zen_train.serve.router.gauges import DecayedRate, LatencyWindow
from zen_train.serve.router.metrics import Outcome, RouterMetrics
from zen_train.serve.router.ticket import Ticket

_RATE_HALF_LIFE_S = 30.0


@dataclass(slots=True, kw_only=True)
class NameStats:
    """Counters of one name."""

    first_token: LatencyWindow
    requests: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    output_tokens: int = 0
    lookups: int = 0
    hits: int = 0
    loads: int = 0
    load_failures: int = 0
    evictions: int = 0
    last_load_s: float | None = None
    request_rate: DecayedRate = field(default_factory=lambda: DecayedRate(half_life_s=_RATE_HALF_LIFE_S))
    token_rate: DecayedRate = field(default_factory=lambda: DecayedRate(half_life_s=_RATE_HALF_LIFE_S))


class Stats:
    """Counts, and passes each fact on to `metrics`. Facts about a name that is gone are dropped."""

    def __init__(self, *, metrics: RouterMetrics, window_s: float) -> None:
        self._metrics = metrics
        self._window_s = window_s
        self._by_name: dict[str, NameStats] = {}
        self.place_rate = DecayedRate(half_life_s=_RATE_HALF_LIFE_S)
        """Places given, over all variants."""

    def add(self, name: str) -> None:
        """A name is served from now on; one that is served already keeps its counters."""
        self._by_name.setdefault(name, NameStats(first_token=LatencyWindow(window_s=self._window_s)))

    def drop(self, name: str) -> None:
        """A name is gone."""
        self._by_name.pop(name, None)

    def of(self, name: str) -> NameStats:
        """The counters of a name that is served."""
        return self._by_name[name]

    def accepted(self, name: str, *, hit: bool | None, now_s: float) -> None:
        """A request is queued; `hit` is None for the base."""
        stats = self._by_name[name]
        stats.requests += 1
        stats.request_rate.add(now_s)
        if hit is not None:
            stats.lookups += 1
            stats.hits += hit
            self._metrics.lookup(name, hit=hit)

    def token(self, name: str, now_s: float) -> None:
        """A token came."""
        stats = self._by_name.get(name)
        if stats is not None:
            stats.output_tokens += 1
            stats.token_rate.add(now_s)

    def first_token(self, ticket: Ticket, now_s: float) -> None:
        """A ticket's first token came; its `first_token_s` and `queued_s` are set."""
        assert ticket.first_token_s is not None
        assert ticket.queued_s is not None
        name = ticket.request.model
        stats = self._by_name.get(name)
        if stats is not None:
            stats.first_token.add(now_s, ticket.first_token_s)
            self._metrics.first_token(
                name, queued_s=ticket.queued_s, load_s=ticket.load_s, total_s=ticket.first_token_s
            )

    def ended(self, ticket: Ticket, outcome: Outcome, now_s: float) -> None:
        """A ticket is over for its reader."""
        name = ticket.request.model
        stats = self._by_name.get(name)
        if stats is None:
            return
        if outcome in ("stop", "length"):
            stats.completed += 1
        elif outcome == "cancelled":
            stats.cancelled += 1
        else:
            stats.failed += 1
        self._metrics.end(
            name, outcome=outcome, output_tokens=ticket.output_tokens, total_s=now_s - ticket.submitted_s
        )

    def loaded(self, names: list[str], *, seconds: float, size_bytes: int, ok: bool) -> None:
        """One load ended; it counts for every name of the variant."""
        for name in names:
            stats = self._by_name.get(name)
            if stats is None:
                continue
            stats.loads += ok
            stats.load_failures += not ok
            stats.last_load_s = seconds
            self._metrics.load(name, seconds=seconds, size_bytes=size_bytes, ok=ok)

    def evicted(self, names: list[str]) -> None:
        """A variant left the device to make room."""
        for name in names:
            stats = self._by_name.get(name)
            if stats is not None:
                stats.evictions += 1
                self._metrics.eviction(name)
