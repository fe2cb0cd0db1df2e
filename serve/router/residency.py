"""Which variants are on the device: decides through the cache, and has the engine load and unload.

`plan` is called after every change. It looks at the cold lanes that somebody waits for, longest waiting
first, and asks the cache for room. The cache's policy chooses what is evicted; variants in use, or with
waiting requests, hold leases and are never chosen. When there is no room, `claims.py` says which busy lanes
are held back until there is. While an overdue lane still waits for room, nobody younger is given any.

One load per variant, however many wait for it. Loads run side by side within `max_parallel_loads` and
`max_load_bytes`; a load that nobody waits for any more is finished all the same and stays as a cache entry.
What fails reaches everyone who waits and leaves nothing behind: the next request tries again, and asks the
engine for the artifact's size first, so that a variant that is gone or has a damaged header evicts nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any

from zen_train.serve.cache import Wait
from zen_train.serve.errors import EngineDeadError, ServeError, VariantUnusableError
from zen_train.serve.router.claims import claim
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.device_tier import DeviceTier
from zen_train.serve.router.lane import Lane
from zen_train.serve.router.ports import InThread
from zen_train.serve.router.stats import Stats

if TYPE_CHECKING:  # importing the package of the engines would import torch
    from zen_train.serve.engine.interface import Engine

log = logging.getLogger(__name__)

_NEVER = float("inf")
_NEEDS_OTHERS_TO_END = ("in use", "loading", "pinned")
"""What keeps an administrator from waiting for room; the other reasons end by themselves, soon."""


class Residency:
    """Event loop only. `plan` never waits; what takes time runs in tasks of its own."""

    def __init__(
        self,
        *,
        engine: Engine,
        tier: DeviceTier,
        config: RouterConfig,
        clock: Callable[[], float],
        stats: Stats,
        in_thread: InThread,
        on_change: Callable[[], None],
        on_failed: Callable[[Lane, ServeError], None],
        on_engine_dead: Callable[[str], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._config = config
        self._clock = clock
        self._stats = stats
        self._in_thread = in_thread
        self._on_change = on_change
        self._on_failed = on_failed
        self._on_engine_dead = on_engine_dead
        self._on_broken = on_broken
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: set[Lane] = set()
        """Lanes whose size the engine is being asked for."""
        self.loading: dict[Lane, int] = {}
        """Lane -> bytes of its load under way, evictions before it included."""
        self.victims: frozenset[Lane] = frozenset()
        """Busy lanes that are given no new places."""

    def plan(self, lanes: Collection[Lane], *, in_time_tokens: float) -> float:
        """Start what can be started. Returns when it should be called again even if nothing happens."""
        now_s = self._clock()
        for lane in lanes:
            if lane.retired and lane.where == "device" and not lane.queue and not lane.running:
                self._retire(lane)
        cold = [lane for lane in lanes if lane.where == "disk" and lane.wanted]
        cold.sort(key=lambda lane: -lane.waiting_s(now_s))
        for lane in cold:
            if lane.size_bytes is None and lane not in self._asked:
                self._asked.add(lane)
                self._spawn(self._ask_size(lane))
        cold = [lane for lane in cold if lane.size_bytes is not None]
        due_s = self._hold_back(cold, lanes, in_time_tokens, now_s)
        for lane in cold:
            if self._loads_are_full(lane):
                break
            urgent = self._claim_at_s(lane) <= now_s
            room = self._tier.make_room(lane, urgent=urgent)
            if isinstance(room, ServeError):
                self._fail(lane, room)
            elif isinstance(room, Wait):
                if room.blocked_by in _NEEDS_OTHERS_TO_END:
                    lane.answer(False)
                if urgent:
                    break  # what becomes free next is for this lane
                due_s = min(due_s, room.retry_at_s or _NEVER, self._claim_at_s(lane))
            else:
                self._start(lane, room)
        return due_s

    def _loads_are_full(self, lane: Lane) -> bool:
        assert lane.size_bytes is not None
        return bool(self.loading) and (
            len(self.loading) >= self._config.max_parallel_loads
            or sum(self.loading.values()) + lane.size_bytes > self._config.max_load_bytes
        )

    def _claim_at_s(self, lane: Lane) -> float:
        if not lane.queue:
            return _NEVER
        return max(lane.head().submitted_s, lane.last_place_s) + self._config.starvation_s / 2.0

    def _hold_back(
        self, cold: list[Lane], lanes: Collection[Lane], in_time_tokens: float, now_s: float
    ) -> float:
        """Choose the victims, and move leases so that the cache may evict them once they are idle."""
        resident = [lane for lane in lanes if lane.where == "device" and not lane.is_base]
        busy, room_bytes = self._tier.holdings({lane for lane in resident if lane.queue or lane.running})
        claims = claim(
            [lane for lane in cold if self._claim_at_s(lane) <= now_s],
            busy,
            room_bytes=room_bytes,
            previous=self.victims,
            in_time_tokens=in_time_tokens,
            now_s=now_s,
        )
        self.victims = claims.victims
        for lane in resident:
            self._tier.hold(lane, bool(lane.queue) and lane not in self.victims)
        return claims.due_s

    def _start(self, lane: Lane, evict: Collection[Lane]) -> None:
        assert lane.size_bytes is not None
        lane.where = "loading"
        self.loading[lane] = lane.size_bytes
        for victim in evict:
            victim.where = "leaving"
        self.victims -= set(evict)
        self._spawn(self._load(lane, evict))

    def _retire(self, lane: Lane) -> None:
        if self._tier.drop(lane):
            lane.where = "leaving"
            self._spawn(self._unload(lane))

    # --- tasks

    async def learn_sizes(self, lanes: Collection[Lane]) -> None:
        """Ask the engine for every size that is not known yet; what cannot be served stays without one."""
        for lane in lanes:
            if lane.size_bytes is None and lane not in self._asked:
                self._asked.add(lane)
                await self._ask_size(lane)

    async def _ask_size(self, lane: Lane) -> None:
        assert lane.variant is not None
        try:
            size = await self._in_thread(self._engine.device_bytes, lane.variant.folder)
        except Exception as error:
            self._fail(lane, _as_unusable(lane, error))
        else:
            lane.size_bytes = size
        finally:
            self._asked.discard(lane)
            self._on_change()

    async def _load(self, lane: Lane, evict: Collection[Lane]) -> None:
        assert lane.key is not None
        assert lane.variant is not None
        names, size_bytes = list(lane.names), self.loading[lane]
        for victim in evict:
            self._stats.evicted(list(victim.names))
            await self._unload(victim)
        started_s = self._clock()
        failure: Exception | None = None
        try:
            await self._engine.load(lane.key, lane.variant.folder)
        except Exception as error:
            failure = error
        seconds = self._clock() - started_s
        del self.loading[lane]
        self._stats.loaded(names, seconds=seconds, size_bytes=size_bytes, ok=failure is None)
        if failure is None:
            lane.where = "device"
            lane.device_since_s = self._clock()
            self._tier.loaded(lane)
            lane.answer(True)
        else:
            lane.where = "disk"
            lane.size_bytes = None
            self._tier.load_failed(lane)
            if isinstance(failure, EngineDeadError):
                self._on_engine_dead(str(failure))
            self._fail(lane, _as_unusable(lane, failure))
        self._on_change()

    async def _unload(self, lane: Lane) -> None:
        assert lane.key is not None
        try:
            await self._engine.unload(lane.key)
        except EngineDeadError as dead:
            self._on_engine_dead(str(dead))
        except Exception as error:
            # Its bytes are in an unknown state: nothing that is loaded after this could be trusted.
            log.exception("unloading %s failed", lane.title)
            self._on_engine_dead(f"unloading {lane.title} failed: {error}")
        lane.where = "disk"
        self._tier.left(lane)
        self._on_change()

    # --- small things

    def _fail(self, lane: Lane, error: ServeError) -> None:
        lane.answer(error)
        self._on_failed(lane, error)
        self._on_change()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_broken(error)

    async def settle(self, timeout_s: float) -> None:
        """Wait for loads and evictions under way; what is not over in time is cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self, lanes: Collection[Lane]) -> None:
        """Asserts that lanes and cache agree, and that leases are what the jobs and queues say."""
        assert {lane for lane in lanes if lane.where == "loading"} == set(self.loading)
        for lane in self.victims:
            assert lane.where == "device", lane.title
        self._tier.check()


def _as_unusable(lane: Lane, error: Exception) -> ServeError:
    """What waiting requests are told: a fault of the load is a fault of the variant, whatever its class."""
    if isinstance(error, ServeError):
        return error
    log.error("loading %s failed", lane.title, exc_info=error)
    unusable = VariantUnusableError(f"{lane.title} could not be loaded: {type(error).__name__}: {error}")
    unusable.__cause__ = error
    return unusable
