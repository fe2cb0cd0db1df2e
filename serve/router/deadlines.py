"""When a request must have a place, and when it must be over. One timer a ticket, gone when the ticket is.

The first timer is that of the queue or of the whole, whichever ends first; with a place the ticket gets that
of the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from zen_train.serve.errors import DeadlineError
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.ticket import Ticket

Kind = Literal["queue", "total"]


class Deadlines:
    """`expired` is told the error that the ticket ends with."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        clock: Callable[[], float],
        expired: Callable[[Ticket, DeadlineError], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._expired = expired
        self._timers: dict[Ticket, asyncio.TimerHandle] = {}

    def queued(self, ticket: Ticket) -> None:
        """A request was accepted now."""
        queue_s = ticket.request.queue_deadline_s or self._config.queue_deadline_s
        total_s = self._total_s(ticket)
        self._arm(ticket, min(queue_s, total_s), "queue" if queue_s < total_s else "total")

    def placed(self, ticket: Ticket) -> None:
        """It got a place."""
        self.over(ticket)
        age_s = self._clock() - ticket.submitted_s
        self._arm(ticket, self._total_s(ticket) - age_s, "total")

    def over(self, ticket: Ticket) -> None:
        """It needs no deadline any more."""
        self._timers.pop(ticket).cancel()

    def armed(self) -> set[Ticket]:
        """For checks."""
        return set(self._timers)

    def _total_s(self, ticket: Ticket) -> float:
        return ticket.request.total_deadline_s or self._config.total_deadline_s

    def _arm(self, ticket: Ticket, delay_s: float, kind: Kind) -> None:
        loop = asyncio.get_running_loop()
        self._timers[ticket] = loop.call_later(max(delay_s, 0.0), self._expire, ticket, kind)

    def _expire(self, ticket: Ticket, kind: Kind) -> None:
        age_s = self._clock() - ticket.submitted_s
        missed = "no place in the engine was found" if kind == "queue" else "it was not finished"
        error = DeadlineError(
            f"request {ticket.request.id!r} for {ticket.request.model!r}: {missed} within {age_s:.1f} s, its "
            f"{kind} deadline; try again later or allow more time"
        )
        self._expired(ticket, error)
