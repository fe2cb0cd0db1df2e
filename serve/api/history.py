"""The last minutes as the status page draws them: a sample every few seconds, oldest dropped, in memory only."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from zen_train.serve.router.snapshot import RouterSnapshot
from zen_train.serve.types import EngineStats

_EVERY_S = 2.0
_SAMPLES = 150  # five minutes


class History:
    """Samples tokens a second, running and waiting sequences, and memory."""

    def __init__(self, snapshot: Callable[[], RouterSnapshot], stats: Callable[[], EngineStats]) -> None:
        self._snapshot = snapshot
        self._stats = stats
        self._samples: deque[tuple[float, float, int, int, int]] = deque(maxlen=_SAMPLES)
        self._last: tuple[float, int] | None = None

    def sample(self, now_s: float) -> None:
        """Take one; `now_s` is on any steady clock."""
        engine, router = self._stats(), self._snapshot()
        last_s, last_tokens = self._last or (now_s, engine.tokens_generated)
        rate = (engine.tokens_generated - last_tokens) / (now_s - last_s) if now_s > last_s else 0.0
        self._last = (now_s, engine.tokens_generated)
        self._samples.append((now_s, rate, router.running, router.queued, engine.kv_tokens_used))

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample(time.monotonic())
            await asyncio.sleep(_EVERY_S)

    def columns(self) -> dict[str, list[Any]]:
        """One list a quantity, oldest first; ages in seconds before the newest sample."""
        newest = self._samples[-1][0] if self._samples else 0.0
        rows = [(round(newest - at, 1), round(rate, 1), *rest) for at, rate, *rest in self._samples]
        names = ("age_s", "tokens_per_s", "running", "queued", "kv_tokens")
        return {name: [row[index] for row in rows] for index, name in enumerate(names)}
