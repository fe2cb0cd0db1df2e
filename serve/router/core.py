"""The router's parts, put together, and the one place where they act: `pump`.

Everything that happens (a request, a token that ends a job, a load, a deadline, a new variant) only marks
that something changed; `pump` then runs once, on the next turn of the loop, and takes all decisions in a
fixed order: retired lanes, loads and evictions, places. It never waits. What time alone will change is one
timer.

When the engine is dead or hangs, or when the router finds itself broken, every ticket is ended, for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from zen_train.serve.errors import EngineDeadError, OverloadedError, ServeError
from zen_train.serve.router.bridge import EventBridge
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.device_tier import DeviceTier
from zen_train.serve.router.lane import Lane
from zen_train.serve.router.metrics import Outcome, RouterMetrics
from zen_train.serve.router.names import Names
from zen_train.serve.router.ports import InThread
from zen_train.serve.router.residency import Residency
from zen_train.serve.router.scheduler import Scheduler
from zen_train.serve.router.stats import Stats
from zen_train.serve.router.watch import EngineWatch
from zen_train.serve.types import TokenEvent

if TYPE_CHECKING:  # importing the package of the engines would import torch
    from zen_train.serve.engine.interface import Engine

_NEVER = float("inf")


class Core:
    """Event loop only. `router.py` is its public face."""

    def __init__(
        self,
        engine: Engine,
        config: RouterConfig,
        *,
        base_name: str,
        clock: Callable[[], float],
        metrics: RouterMetrics,
        in_thread: InThread,
    ) -> None:
        self.engine = engine
        self.config = config
        self.clock = clock
        self.death: str | None = None
        """Why nothing is answered any more."""
        self.idle = asyncio.Event()
        """No ticket waits, and no job is in the engine."""
        self.lanes: dict[str | None, Lane] = {}
        self.stats = Stats(metrics=metrics, window_s=config.window_s)
        self.tier = DeviceTier(
            self.lanes, budget_bytes=engine.limits.variant_bytes, clock=clock, config=config.cache
        )
        self.scheduler = Scheduler(
            engine=engine,
            config=config,
            clock=clock,
            stats=self.stats,
            leases=self.tier,
            on_change=self.changed,
            on_engine_dead=self.give_up,
        )
        self.names = Names(
            base_name=base_name,
            lanes=self.lanes,
            grace_s=config.unload_grace_s,
            clock=clock,
            move=self.scheduler.move,
            fail=self.scheduler.fail,
            set_pin=self.tier.pin,
            forget=engine.forget,
        )
        self.residency = Residency(
            engine=engine,
            tier=self.tier,
            config=config,
            clock=clock,
            stats=self.stats,
            in_thread=in_thread,
            on_change=self.changed,
            on_failed=self._load_failed,
            on_engine_dead=self.give_up,
            on_broken=self._broken,
        )
        self._watch = EngineWatch(hang_s=config.hang_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bridge: EventBridge | None = None
        self._pump_handle: asyncio.Handle | None = None
        self._wake_handle: asyncio.TimerHandle | None = None
        self._tick_handle: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        """Between `open` and `close`."""
        return self._loop is not None

    def open(self) -> None:
        """Begin; on the loop that everything will run on."""
        self._loop = asyncio.get_running_loop()
        self._bridge = EventBridge(self._loop, self._deliver)
        self._tick()

    async def close(self, timeout_s: float) -> None:
        """End loads and timers; all tickets are over."""
        await self.residency.settle(timeout_s)
        for handle in (self._pump_handle, self._wake_handle, self._tick_handle):
            if handle is not None:
                handle.cancel()
        if self._bridge is not None:
            self._bridge.close()
        self._loop = None
        self.scheduler.forget_jobs()

    def changed(self) -> None:
        """Something may be possible that was not before."""
        if self._loop is not None and self._pump_handle is None:
            self._pump_handle = self._loop.call_soon(self._pump)

    def give_up(self, reason: str) -> None:
        """The engine will answer nothing any more."""
        if self.death is not None:
            return
        self.death = reason
        error = self.dead_error()
        self.scheduler.fail_all(error, "error", self.lanes.values())
        self.scheduler.forget_jobs()
        for lane in self.lanes.values():
            lane.answer(error)
        self.names.release_waiters()
        self.idle.set()

    def dead_error(self) -> EngineDeadError:
        """What everybody is told from then on."""
        return EngineDeadError(f"{self.death}; nothing is answered until the server is started again")

    def why_not_ready(self) -> str | None:
        """What is wrong with the engine at this moment; None: nothing."""
        if self.death is None:
            stats, busy_s = self.engine.stats(), self.clock() - self.scheduler.busy_since_s
            return self._watch.death(stats) or self._watch.hang(stats, busy_s=busy_s)
        return self.death

    # --- inside

    def _pump(self) -> None:
        self._pump_handle = None
        if self.death is not None:
            return
        assert self._loop is not None
        assert self._bridge is not None
        scheduler, config = self.scheduler, self.config
        try:
            due_s = self.names.settle()
            in_time_tokens = config.starvation_s / 2.0 / scheduler.token_s if scheduler.token_s else _NEVER
            due_s = min(due_s, self.residency.plan(list(self.lanes.values()), in_time_tokens=in_time_tokens))
            victims = self.residency.victims
            scheduler.dispatch(
                [lane for lane in self.lanes.values() if lane.where == "device" and lane not in victims],
                self._bridge.sink,
            )
        except Exception as error:
            self._broken(error)
            return
        if scheduler.queued or scheduler.jobs:
            self.idle.clear()
        else:
            self.idle.set()
        if self._wake_handle is not None:
            self._wake_handle.cancel()
            self._wake_handle = None
        if due_s < _NEVER:
            self._wake_handle = self._loop.call_later(max(due_s - self.clock(), 0.0), self.changed)

    def _deliver(self, events: list[TokenEvent]) -> None:
        try:
            self.scheduler.deliver(events)
        except Exception as error:
            self._broken(error)

    def _load_failed(self, lane: Lane, error: ServeError) -> None:
        """Everybody who waits is told; of a retired lane, `Names.settle` moves them on."""
        if not lane.retired:
            outcome: Outcome = "refused" if isinstance(error, OverloadedError) else "error"
            for ticket in list(lane.queue):
                self.scheduler.fail(ticket, error, outcome)

    def _broken(self, error: BaseException) -> None:
        """An invariant of ours does not hold: better an error than a wrong answer, or none."""
        assert self._loop is not None
        self._loop.call_exception_handler({"message": "the router failed", "exception": error})
        self.give_up(f"the router failed: {type(error).__name__}: {error}")

    def _tick(self) -> None:
        assert self._loop is not None
        if self.death is not None:
            return
        self._tick_handle = self._loop.call_later(self.config.watch_interval_s, self._tick)
        try:
            busy_s = self.clock() - self.scheduler.busy_since_s
            reason = self._watch.tick(self.engine.stats(), busy_s=busy_s)
        except Exception as error:
            self._broken(error)
            return
        if reason is not None:
            self.give_up(reason)

    def check(self) -> None:
        """Asserts every invariant. Meant for after a turn of the loop, when no change is pending."""
        lanes = list(self.lanes.values())
        assert all(lane.key == key for key, lane in self.lanes.items())
        self.scheduler.check(self.lanes)
        self.residency.check(lanes)
        self.names.check()
