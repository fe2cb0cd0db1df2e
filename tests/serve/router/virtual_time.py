"""An event loop whose clock jumps to the next timer instead of waiting: hours pass in milliseconds.

When nothing is ready and no timer is set, nothing can ever happen: that is an error (a lost wake-up), not a
hang. So is a test that runs past `LIMIT_S` of virtual time (timers that re-arm each other while a request is
forgotten).
"""

from __future__ import annotations

import asyncio
import functools
import gc
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

LIMIT_S = 100_000.0


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout=None):
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is None:
            raise AssertionError("nothing is ready and no timer is set: a wake-up was lost")
        self.now_s += timeout
        if self.now_s > LIMIT_S:
            raise AssertionError(f"still running after {LIMIT_S} s of virtual time")
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a coroutine a test that runs in virtual time, whatever plugins are installed."""

    @functools.wraps(test)
    def runs(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return runs


def run(main: Coroutine[Any, Any, Any], *, loop_factory=VirtualTimeLoop) -> Any:
    """Run to the end; a task left over, or an exception that nobody looked at, fails the test."""
    complaints: list[str] = []
    gc.freeze()  # the collection below then looks at what the test made, not at all of torch
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _loop, context: complaints.append(str(context)))
        result = runner.run(_then_count_tasks(main, complaints))
        gc.collect()
    gc.unfreeze()
    assert not complaints, complaints
    return result


async def _then_count_tasks(main: Coroutine[Any, Any, Any], complaints: list[str]) -> Any:
    try:
        return await main
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        complaints.extend(f"left over: {task!r}" for task in left)
