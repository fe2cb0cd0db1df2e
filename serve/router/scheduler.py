"""The life of tickets: queued, given a place in the engine, fed with tokens, ended.

Places. The engine runs `limits.max_jobs` side by side; the router never hands it more, so that the order
stays the router's. KV room is given optimistically: a job claims its prompt and the first
`kv_headroom_tokens` of its output (all of it when that is less), and more as it produces more; a job starts
when the claims fit `limits.kv_tokens`, or when nothing runs. The engine preempts by itself if many outputs
grow long at once. A lane whose oldest request does not fit is passed over until it starves; then places stay
empty until it fits.

Every job in the engine holds one lease of its variant, from `engine.submit` until the event that ends it:
also when its reader is gone, because until then the engine may read the weights.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from zen_train.serve.errors import DeadlineError, EngineDeadError
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.deadlines import Deadlines
from zen_train.serve.router.fairness import FairShare
from zen_train.serve.router.lane import Lane
from zen_train.serve.router.metrics import Outcome
from zen_train.serve.router.request import RoutedRequest
from zen_train.serve.router.stats import Stats
from zen_train.serve.router.ticket import Ticket
from zen_train.serve.types import Job, TokenEvent

if TYPE_CHECKING:  # importing the package of the engines would import torch
    from zen_train.serve.engine.interface import Engine, Sink

log = logging.getLogger(__name__)

_TOKEN_TIME_WEIGHT = 0.2
"""Of the newest job in the running mean of the time per token."""


class Leases(Protocol):
    """What keeps a variant on the device while the engine may read it."""

    def acquire(self, lane: Lane) -> None: ...

    def release(self, lane: Lane) -> None: ...


class Scheduler:
    """All tickets that are not over. Event loop only."""

    def __init__(
        self,
        *,
        engine: Engine,
        config: RouterConfig,
        clock: Callable[[], float],
        stats: Stats,
        leases: Leases,
        on_change: Callable[[], None],
        on_engine_dead: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._limits = engine.limits
        self._config = config
        self._clock = clock
        self._stats = stats
        self._leases = leases
        self._on_change = on_change
        self._on_engine_dead = on_engine_dead
        self._fair = FairShare(starvation_s=config.starvation_s, output_weight=config.output_weight)
        self._numbers = itertools.count()
        self._deadlines = Deadlines(config=config, clock=clock, expired=self._expired)
        self.jobs: dict[str, Ticket] = {}
        """In the engine: running and leaving."""
        self.queued = 0
        self.kv_claimed_tokens = 0
        self.token_s = 0.0
        """Time per output token of the jobs that ended lately; 0 until one did."""
        self.busy_since_s = float("inf")
        """Since when the engine has had work without a break; infinite while it has none."""

    # --- coming and going

    def enqueue(self, request: RoutedRequest, lane: Lane) -> Ticket:
        """Put an admitted request at the end of its lane."""
        now_s = self._clock()
        ticket = Ticket(
            request, lane, job_id=f"{next(self._numbers)}:{request.id}", now_s=now_s, on_leave=self.leave
        )
        self._append(ticket, lane)
        self._deadlines.queued(ticket)
        return ticket

    def move(self, ticket: Ticket, lane: Lane) -> None:
        """Put a waiting ticket at the end of another lane; its age and deadlines stay."""
        self._take_from_queue(ticket)
        self._append(ticket, lane)

    def leave(self, ticket: Ticket, why: Literal["cancelled", "stop"]) -> None:
        """The reader gave up, or has enough."""
        if not ticket.closed:
            ticket.push(TokenEvent(job_id=ticket.job_id, token=None, finish=why))
            self._close(ticket, why, None)
            self._on_change()

    def fail(self, ticket: Ticket, error: Exception, outcome: Outcome = "error") -> None:
        """End a ticket from this side, wherever it is; nothing happens to one that is over for its reader."""
        if not ticket.closed:
            self._close(ticket, outcome, error)

    def fail_all(self, error: Exception, outcome: Outcome, lanes: Iterable[Lane]) -> int:
        """End every ticket that waits or runs; returns how many those were."""
        tickets = [
            ticket for lane in lanes for ticket in [*lane.queue, *lane.running.values()] if not ticket.closed
        ]
        for ticket in tickets:
            self._close(ticket, outcome, error)
        return len(tickets)

    def forget_jobs(self) -> None:
        """The engine is gone: nothing will end its jobs any more."""
        for ticket in list(self.jobs.values()):
            self._leave_engine(ticket)

    # --- places

    def dispatch(self, lanes: Iterable[Lane], sink: Sink) -> None:
        """Give places while there are any; `lanes`: those on the device that are not held back."""
        ready = [lane for lane in lanes if lane.queue]
        while ready and len(self.jobs) < self._limits.max_jobs:
            lane = self._next(ready)
            if lane is None or not self._start(lane, sink):
                return
            if not lane.queue:
                ready.remove(lane)

    def _next(self, ready: list[Lane]) -> Lane | None:
        now_s = self._clock()
        for lane in self._fair.order(ready, now_s):
            claim = self._claim_at_start(lane.head().request)
            if not self.jobs or self.kv_claimed_tokens + claim <= self._limits.kv_tokens:
                return lane
            if self._fair.starving(lane, now_s):
                return None  # room is being saved for it
        return None

    def _claim_at_start(self, request: RoutedRequest) -> int:
        return len(request.prompt_tokens) + min(request.max_tokens, self._config.kv_headroom_tokens)

    def _start(self, lane: Lane, sink: Sink) -> bool:
        """Returns False when the engine turned out dead."""
        ticket = lane.head()
        request, now_s = ticket.request, self._clock()
        job = Job(
            id=ticket.job_id,
            variant_hash=lane.key,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            stop_tokens=request.stop_tokens,
            min_tokens=request.min_tokens,
            sampling=request.sampling,
        )
        try:
            self._engine.submit(job, sink)
        except EngineDeadError as dead:
            self._on_engine_dead(str(dead))
            return False
        except ValueError as refused:
            log.exception("the engine refused job %s of %s", ticket.job_id, lane.title)
            self._close(ticket, "error", refused)
            return True
        self._take_from_queue(ticket)
        self._leases.acquire(lane)
        ticket.place = "running"
        ticket.queued_s = now_s - ticket.submitted_s
        ticket.load_s = max(lane.device_since_s - ticket.submitted_s, 0.0)
        ticket.claim_tokens = self._claim_at_start(request)
        lane.running[ticket.job_id] = ticket
        lane.last_place_s = now_s
        if not self.jobs:
            self.busy_since_s = now_s
        self.jobs[ticket.job_id] = ticket
        self.kv_claimed_tokens += ticket.claim_tokens
        self._fair.starts(lane, prompt_tokens=len(request.prompt_tokens))
        self._stats.place_rate.add(now_s)
        self._deadlines.placed(ticket)
        return True

    # --- what the engine says

    def deliver(self, events: list[TokenEvent]) -> None:
        """Events in the engine's order; those of jobs that are forgotten are dropped."""
        now_s, ended = self._clock(), False
        for event in events:
            ticket = self.jobs.get(event.job_id)
            if ticket is None:
                continue
            if event.token is not None:
                self._count_token(ticket, now_s)
            if event.finish is not None:
                ended = True
                self._leave_engine(ticket)
            if ticket.closed:
                continue
            if event.finish == "error":
                error = event.error or RuntimeError(
                    f"the engine gave no reason for the end of job {event.job_id}"
                )
                self._close(ticket, "error", error)
                continue
            ticket.push(event)
            if event.finish is not None:
                self._close(ticket, event.finish, None)
        if ended:
            self._on_change()

    def _count_token(self, ticket: Ticket, now_s: float) -> None:
        ticket.output_tokens += 1
        lane, request = ticket.lane, ticket.request
        if len(request.prompt_tokens) + ticket.output_tokens > ticket.claim_tokens:
            ticket.claim_tokens += 1
            self.kv_claimed_tokens += 1
        self._fair.produced(lane)
        self._stats.token(request.model, now_s)
        if ticket.first_token_s is None and not ticket.closed:
            ticket.first_token_s = now_s - ticket.submitted_s
            self._stats.first_token(ticket, now_s)

    # --- bookkeeping

    def _append(self, ticket: Ticket, lane: Lane) -> None:
        if not lane.queue:
            self._fair.joins(lane)
        ticket.lane = lane
        ticket.variant = lane.names.get(ticket.request.model)
        lane.queue[ticket] = None
        self.queued += 1

    def _take_from_queue(self, ticket: Ticket) -> None:
        del ticket.lane.queue[ticket]
        self.queued -= 1

    def _close(self, ticket: Ticket, outcome: Outcome, error: Exception | None) -> None:
        """End it for its reader; the engine is told, and the job leaves when the engine confirms."""
        if ticket.place == "queued":
            self._take_from_queue(ticket)
            ticket.place = "over"
        elif ticket.place == "running":
            ticket.place = "leaving"
            self._engine.cancel(ticket.job_id)
        self._deadlines.over(ticket)
        ticket.close(error)
        self._stats.ended(ticket, outcome, self._clock())

    def _leave_engine(self, ticket: Ticket) -> None:
        lane = ticket.lane
        del lane.running[ticket.job_id]
        del self.jobs[ticket.job_id]
        self.kv_claimed_tokens -= ticket.claim_tokens
        ticket.place = "over"
        self._leases.release(lane)
        if ticket.first_token_s is not None and ticket.output_tokens > 1:
            decoding_s = self._clock() - ticket.submitted_s - ticket.first_token_s
            token_s = decoding_s / (ticket.output_tokens - 1)
            self.token_s += (token_s - self.token_s) * (_TOKEN_TIME_WEIGHT if self.token_s else 1.0)
        if not self.jobs:
            self.busy_since_s = float("inf")

    def _expired(self, ticket: Ticket, error: DeadlineError) -> None:
        self._close(ticket, "deadline", error)
        self._on_change()

    # --- invariants

    def check(self, lanes: Mapping[str | None, Lane]) -> None:
        """Asserts that every ticket is in exactly one place and that all sums agree."""
        queued = [ticket for lane in lanes.values() for ticket in lane.queue]
        running = [ticket for lane in lanes.values() for ticket in lane.running.values()]
        assert len(queued) == self.queued, (len(queued), self.queued)
        assert {t.job_id: t for t in running} == self.jobs
        assert len({*queued, *running}) == len(queued) + len(running), "a ticket is in two places"
        for lane in lanes.values():
            assert all(ticket.lane is lane for ticket in [*lane.queue, *lane.running.values()])
        assert all(ticket.place == "queued" and not ticket.closed for ticket in queued)
        assert all(
            (ticket.place, ticket.closed) in (("running", False), ("leaving", True)) for ticket in running
        )
        assert self._deadlines.armed() == {ticket for ticket in [*queued, *running] if not ticket.closed}
        assert sum(ticket.claim_tokens for ticket in running) == self.kv_claimed_tokens
        assert len(self.jobs) <= self._limits.max_jobs
        assert (self.busy_since_s == float("inf")) == (not self.jobs)
