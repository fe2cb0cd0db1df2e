"""One accepted request as its caller holds it: an async iterator of token events, and how long things took.

One task reads a ticket. The router pushes events into it on the event loop; they wait in a buffer whose
length is bounded by the request's `max_tokens`, so a slow reader holds up nobody. The ticket schedules
nothing itself.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Self

from zen_train.serve.errors import ServeError
from zen_train.serve.router.request import RoutedRequest
from zen_train.serve.types import TokenEvent, Variant

if TYPE_CHECKING:
    from zen_train.serve.router.lane import Lane

Place = Literal["queued", "running", "leaving", "over"]
"""queued: in its lane; running: in the engine; leaving: cancelled, which the engine has not confirmed yet."""


class Ticket:
    """Iterate over it: every token, the last event with `finish` set; then the iteration ends.

    The iteration raises, after the tokens that came before:
        DeadlineError: a deadline passed.
        VariantUnusableError: the variant could not be loaded.
        UnknownModelError: the variant was removed while the request waited or, after the grace, while it ran.
        ConflictError: the name means other weights now, and the request asked for the former.
        OverloadedError: the server drained, or there can be no room for the variant.
        EngineDeadError: the engine stopped or hangs.
        Exception: what the engine says of this job alone.

    `async with ticket:` cancels on the way out, whatever the reason; cancelling an ended ticket does nothing.
    """

    def __init__(
        self,
        request: RoutedRequest,
        lane: Lane,
        *,
        job_id: str,
        now_s: float,
        on_leave: Callable[[Ticket, Literal["cancelled", "stop"]], None],
    ) -> None:
        self.request = request
        self.job_id = job_id
        self.submitted_s = now_s
        self.variant: Variant | None = None
        """Whose weights answer; None: the base. Settled once the first event is there."""
        self.queued_s: float | None = None
        """Submit to a place in the engine, loading included; None before."""
        self.load_s: float = 0.0
        """How much of that its variant was not on the device."""
        self.first_token_s: float | None = None
        """Submit to first token; None before."""
        self.output_tokens = 0
        self.place: Place = "queued"
        self.lane = lane
        """Changed by the scheduler only, like `place` and the next."""
        self.claim_tokens = 0
        """KV room that it is counted with while it is in the engine."""
        self._on_leave = on_leave
        self._events: deque[TokenEvent] = deque()
        self._error: Exception | None = None
        self._closed = False
        self._reader: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """Give up: queue entry, engine place and KV are freed, the iteration ends with finish="cancelled"."""
        self._on_leave(self, "cancelled")

    def enough(self) -> None:
        """The reader found a stop string: as `cancel`, but it counts as finished, with finish="stop"."""
        self._on_leave(self, "stop")

    async def batch(self) -> list[TokenEvent]:
        """All events since the last call, at least one; empty once it is over. Raises like the iteration."""
        while not self._events:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return []
            assert self._reader is None, "two tasks read one ticket"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        events = list(self._events)
        self._events.clear()
        return events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._events:
            events = await self.batch()
            if not events:
                raise StopAsyncIteration
            self._events.extend(events)
        return self._events.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.cancel()

    def push(self, event: TokenEvent) -> None:
        """For the router: one more event."""
        assert not self._closed
        self._events.append(event)
        self._notify()

    def close(self, error: Exception | None = None) -> None:
        """For the router: nothing follows."""
        assert not self._closed
        self._closed = True
        self._error = None if error is None else _own_copy(error)
        self._notify()

    @property
    def closed(self) -> bool:
        """Whether the reader will get nothing new."""
        return self._closed

    def _notify(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _own_copy(error: Exception) -> Exception:
    """Raising one exception in many tasks would pile all their tracebacks onto it."""
    if not isinstance(error, ServeError):
        return error  # of one job; not every foreign class can be copied
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    return own
