"""The router between API and engine: who waits, who runs, whose weights are on the device.

Contract
- `submit` validates, queues and returns at once, or raises a `ServeError`; the answer comes through the
  `Ticket`.
- One FIFO queue per variant, so a cold variant delays nobody else. The rules of sharing and the bounds are in
  `README.md`.
- Whatever happens to the engine, every ticket ends.
- It starts and stops no engine: whoever built the engine does, before `start` and after `stop`.

It knows neither torch nor HTTP. Everything runs on one event loop; only the engine's events come from another
thread (`bridge.py`), and only what reads the disk (the catalogue, the size of an artifact) goes to one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zen_train.serve.errors import (
    ConflictError,
    OverloadedError,
    TooLargeError,
    UnknownModelError,
    VariantUnusableError,
)
from zen_train.serve.router.admission import Admission
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.core import Core
from zen_train.serve.router.lane import Lane
from zen_train.serve.router.metrics import NoMetrics, RouterMetrics
from zen_train.serve.router.names import Changes, replaced_error
from zen_train.serve.router.ports import Catalogue, InThread
from zen_train.serve.router.request import RoutedRequest
from zen_train.serve.router.snapshot import RouterSnapshot
from zen_train.serve.router.ticket import Ticket
from zen_train.serve.router.views import snapshot
from zen_train.serve.types import Variant

if TYPE_CHECKING:  # importing the package of the engines would import torch
    from zen_train.serve.engine.interface import Engine

_DRAIN_RETRY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What `load` or `pin` did."""

    variant: Variant
    on_device: bool
    """False: there is no room without making others wait; the first request for it will have it loaded."""


class Router:
    """See the module. `base_name` is the name under which the base itself is asked for."""

    def __init__(
        self,
        engine: Engine,
        catalogue: Catalogue,
        config: RouterConfig,
        *,
        base_name: str = "base",
        clock: Callable[[], float] = time.monotonic,
        metrics: RouterMetrics | None = None,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        self._catalogue = catalogue
        self._in_thread = in_thread
        self._admission = Admission(config=config, limits=engine.limits)
        self._catalogue_lock = asyncio.Lock()
        self._draining = False
        self._core = Core(
            engine,
            config,
            base_name=base_name,
            clock=clock,
            metrics=metrics or NoMetrics(),
            in_thread=in_thread,
        )

    # --- life

    async def start(self) -> None:
        """Take up what the catalogue holds, and the sizes of it. The engine has been started."""
        self._core.open()
        self._core.stats.add(self._core.names.base_name)
        async with self._catalogue_lock:
            await self._follow_catalogue()

    def why_not_ready(self) -> str | None:
        """None: ready. Looks at the engine itself, so the answer is as fresh as its heartbeat."""
        if not self._core.running:
            return "the router is not running"
        return self._core.why_not_ready() or ("the server is draining" if self._draining else None)

    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.why_not_ready() is None

    async def drain(self, timeout_s: float) -> int:
        """Accept nothing new, let the rest finish for `timeout_s`, then cut it off; returns how many."""
        self._draining = True
        self._core.changed()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._core.idle.wait(), timeout_s)
        error = OverloadedError(
            f"the server shuts down and the request was not finished within {timeout_s:g} s; send it again",
            retry_after_s=_DRAIN_RETRY_S,
        )
        cut = self._core.scheduler.fail_all(error, "refused", self._core.lanes.values())
        self._core.changed()
        return cut

    async def stop(self, *, timeout_s: float = 5.0) -> None:
        """Cut off what is left, and wait up to `timeout_s` each for jobs and loads to end. Idempotent."""
        if not self._core.running:
            return
        await self.drain(0.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._core.idle.wait(), timeout_s)
        await self._core.close(timeout_s)

    # --- requests

    async def submit(self, request: RoutedRequest) -> Ticket:
        """Queue one sequence.

        Raises:
            EngineDeadError: the engine stopped or hangs.
            OverloadedError: the server drains, or too many requests wait in all (with Retry-After).
            UnknownModelError: the name is neither the base's nor a variant's.
            VariantUnusableError: it is that of an artifact which the catalogue could not take up.
            ConflictError: the name means other weights than `request.content_hash`.
            BadRequestError: a job that the engine could not run even alone.
            QueueFullError: too many requests wait for this variant (with Retry-After).
        """
        core = self._core
        self._check_open()
        lane = self._lane(request.model)
        if request.content_hash not in (None, lane.key):
            raise replaced_error(request.model)
        self._admission.check_request(request)
        now_s = core.clock()
        self._admission.check_room(
            lane, queued_total=core.scheduler.queued, place_rate=core.stats.place_rate, now_s=now_s
        )
        core.idle.clear()
        core.stats.accepted(request.model, hit=None if lane.is_base else lane.where == "device", now_s=now_s)
        if not lane.is_base:
            core.tier.record_request(lane)
        ticket = core.scheduler.enqueue(request, lane)
        core.changed()
        return ticket

    # --- variants

    async def load(self, name: str, path: Path, *, inplace: bool = False) -> Loaded:
        """Serve a folder under a name, and bring it to the device unless others would have to wait for that.

        Raises:
            ConflictError: the name is served already and `inplace` is False, or it is the base's.
            VariantUnusableError: it cannot be loaded. A new name is not served then; a name that was replaced
            keeps its new
                meaning, and the next request tries again.
            EngineDeadError, OverloadedError: as for `submit`. What the catalogue refuses: see there.
        """
        self._check_open()
        async with self._catalogue_lock:
            served = self._core.names.all()
            if name == self._core.names.base_name:
                raise ConflictError(f"{name!r} is the name of the base; choose another", param="lora_name")
            if name in served and not inplace:
                raise ConflictError(
                    f"{name!r} is served already; unload it first, or send load_inplace: true",
                    param="lora_name",
                )
            await self._in_thread(self._catalogue.add, name, path)
            await self._follow_catalogue()
            lane = self._core.names.lane(name)
            variant = lane.names[name]
        try:
            on_device = await self._bring(lane)
        except VariantUnusableError:
            if name not in served:
                await self.unload(name)
            raise
        return Loaded(variant=variant, on_device=on_device)

    async def unload(self, name: str) -> None:
        """Serve a name no longer; returns when its bytes are free.

        Its waiting requests get 404, its running ones may go on for `unload_grace_s`.

        Raises:
            UnknownModelError: no such name. ConflictError: the base. EngineDeadError: the engine is gone, now
            or meanwhile.
        """
        self._check_alive()
        async with self._catalogue_lock:
            lane = self._core.names.lane(name)
            if lane.is_base:
                raise ConflictError(f"{name!r} is the base and cannot be unloaded", param="lora_name")
            await self._in_thread(self._catalogue.remove, name)
            await self._follow_catalogue()
        await self._core.names.gone(lane)
        self._check_alive()

    async def refresh(self) -> Changes:
        """Look at the catalogue's root again, and serve what is there now."""
        self._check_alive()
        async with self._catalogue_lock:
            await self._in_thread(self._catalogue.rescan)
            return await self._follow_catalogue()

    async def pin(self, name: str) -> Loaded:
        """Keep a variant on the device, and bring it there unless others would have to wait for that.

        Raises:
            UnknownModelError: no such name. ConflictError: the base. OverloadedError, TooLargeError: it does
            not fit
                beside what is pinned; it is not pinned then. VariantUnusableError: it cannot be loaded; it
                stays pinned.
        """
        self._check_open()
        lane = self._core.names.set_pinned(name, True)
        variant = lane.names[name]
        try:
            on_device = await self._bring(lane)
        except (OverloadedError, TooLargeError):
            self._core.names.set_pinned(name, False)
            raise
        return Loaded(variant=variant, on_device=on_device)

    async def unpin(self, name: str) -> None:
        """The policy decides again. Raises UnknownModelError, ConflictError for the base."""
        self._core.names.set_pinned(name, False)
        self._core.changed()

    # --- looking

    def variant(self, name: str) -> Variant | None:
        """What a name means now; None: the base. Raises as `submit` for a name that is not served."""
        lane = self._lane(name)
        return None if lane.is_base else lane.names[name]

    def snapshot(self) -> RouterSnapshot:
        """For metrics and the status page; before any traffic too. Below 0.1 ms a variant."""
        return snapshot(self._core, draining=self._draining, why_not_ready=self.why_not_ready())

    def check(self) -> None:
        """Asserts the router's invariants; for tests and soak runs."""
        self._core.check()

    # --- inside

    def _check_alive(self) -> None:
        if self._core.death is not None:
            raise self._core.dead_error()

    def _check_open(self) -> None:
        self._check_alive()
        if self._draining or not self._core.running:
            raise OverloadedError(
                "the server shuts down and accepts nothing new; try again later", retry_after_s=_DRAIN_RETRY_S
            )

    def _lane(self, name: str) -> Lane:
        try:
            return self._core.names.lane(name)
        except UnknownModelError:
            self._catalogue.get(name)  # knows why, and which names are near
            raise

    async def _follow_catalogue(self) -> Changes:
        """The caller holds the lock: two changes must not overtake each other."""
        core = self._core
        changes = core.names.apply(self._catalogue.variants)
        for name in changes.added:
            core.stats.add(name)
        for name in changes.removed:
            core.stats.drop(name)
        core.changed()
        await core.residency.learn_sizes(list(core.lanes.values()))
        return changes

    async def _bring(self, lane: Lane) -> bool:
        """Whether it is on the device now; raises what its load raised."""
        if lane.where == "device":
            return True
        demand: asyncio.Future[bool | Exception] = asyncio.get_running_loop().create_future()
        lane.demands.append(demand)
        self._core.changed()
        answer = await demand
        if isinstance(answer, Exception):
            raise answer
        return answer
