"""The engine as the router sees it. Implementations: `torch_engine` here; another process or another project later.

Threads: the engine runs its steps in a thread of its own. `submit` and `cancel` may be called from any thread and
return at once. `sink` is called from the engine's thread and must not block (hand over with
`loop.call_soon_threadsafe`). `load` and `unload` are called on the event loop and do their work elsewhere; several
loads run side by side, and no step waits for the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from zen_train.serve.types import EngineLimits, EngineStats, Job, TokenEvent

Sink = Callable[[TokenEvent], None]


class Engine(Protocol):
    """One resident base and the deltas beside it."""

    @property
    def limits(self) -> EngineLimits: ...

    def start(self) -> None:
        """Start the thread; returns when the first step could run."""

    def submit(self, job: Job, sink: Sink) -> None:
        """Queue a job whose variant is loaded. Every job ends with exactly one event that has `finish` set.

        Raises:
            ValueError: a variant that is not loaded, or a job above `limits`. No event follows then.
            EngineDeadError: the engine is not alive.
        """

    def cancel(self, job_id: str) -> None:
        """End a job before the next step (finish="cancelled"); an unknown or ended job is ignored."""

    def device_bytes(self, folder: Path) -> int:
        """What an artifact would take on the device; raises VariantUnusableError when it cannot be served at all."""

    def verify(self, folder: Path) -> None:
        """Check an artifact's bytes ahead of its first load, which then only copies; raises as the load would.
        Slow: call it in a thread. An engine without such a step does nothing.
        """

    async def load(self, content_hash: str, folder: Path) -> None:
        """Copy an artifact's tensors to the device; it can be used when this returns.

        Raises:
            VariantUnusableError: damaged, vanished, another hash than expected, another base, no free slot.
                Nothing is resident then.
        """

    async def unload(self, content_hash: str) -> None:
        """Free a variant's bytes. Its jobs have ended (the caller sees to that; refused with ValueError otherwise)."""

    def forget(self, content_hash: str) -> None:
        """Nothing that is served has these weights any more: give back what is kept of them beside the device (host
        memory, records of checks). They are not resident. Returns at once. Asked for again, they are read anew.
        """

    def stats(self) -> EngineStats:
        """A snapshot."""

    def stop(self) -> None:
        """End the thread after the current step; running jobs end with finish="cancelled". Idempotent."""
