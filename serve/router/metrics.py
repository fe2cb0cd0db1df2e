"""What the router tells whoever counts: one call per fact, on the event loop, cheap.

The API implements `RouterMetrics` with its Prometheus collectors; states (queue lengths, tiers, pins) are not
pushed but read from `Router.snapshot()` when somebody scrapes. `variant` is always a name of the catalogue or
the base's, so label values stay bounded. No call is made per token.
"""

from __future__ import annotations

from typing import Literal, Protocol

Outcome = Literal["stop", "length", "cancelled", "error", "deadline", "refused"]


class RouterMetrics(Protocol):
    """Counters and histograms."""

    def lookup(self, variant: str, *, hit: bool) -> None:
        """A request was accepted; `hit`: its variant was on the device already. Not called for the base."""

    def load(self, variant: str, *, seconds: float, size_bytes: int, ok: bool) -> None:
        """One load ended."""

    def eviction(self, variant: str) -> None:
        """A variant left the device to make room."""

    def first_token(self, variant: str, *, queued_s: float, load_s: float, total_s: float) -> None:
        """A request got its first token, `total_s` after it was submitted."""

    def end(self, variant: str, *, outcome: Outcome, output_tokens: int, total_s: float) -> None:
        """A request that `submit` had accepted is over."""


class NoMetrics:
    """Counts nothing."""

    def lookup(self, variant: str, *, hit: bool) -> None:
        """See `RouterMetrics`."""

    def load(self, variant: str, *, seconds: float, size_bytes: int, ok: bool) -> None:
        """See `RouterMetrics`."""

    def eviction(self, variant: str) -> None:
        """See `RouterMetrics`."""

    def first_token(self, variant: str, *, queued_s: float, load_s: float, total_s: float) -> None:
        """See `RouterMetrics`."""

    def end(self, variant: str, *, outcome: Outcome, output_tokens: int, total_s: float) -> None:
        """See `RouterMetrics`."""
