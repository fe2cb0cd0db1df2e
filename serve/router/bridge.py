"""Carries events from the engine's thread to the event loop, one wake-up per burst.

`loop.call_soon_threadsafe` costs a lock, a handle and a byte through a pipe. The engine calls its sink once
per job and step; only the first call after a delivery wakes the loop, the others of the same step ride along.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from zen_train.serve.types import TokenEvent


class EventBridge:
    """`sink` may be called from any thread; `deliver` gets batches in order, on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[TokenEvent]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._lock = threading.Lock()
        self._events: list[TokenEvent] = []
        self._closed = False
        self.wakeups = 0
        """How often the loop was woken: for tests and measurements."""

    def sink(self, event: TokenEvent) -> None:
        """Hand one event over. After `close` it is dropped: nobody waits for it."""
        with self._lock:
            if self._closed:
                return
            self._events.append(event)
            if len(self._events) > 1:
                return
            self.wakeups += 1
            self._loop.call_soon_threadsafe(self._flush)

    def close(self) -> None:
        """Call on the loop before it goes: a late event must not reach a closed loop."""
        with self._lock:
            self._closed = True
            self._events.clear()

    def _flush(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        if events:
            self._deliver(events)
