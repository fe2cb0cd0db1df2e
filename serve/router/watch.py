"""Is the engine alive? Asked at every tick of `watch_interval_s`, so that readiness turns within seconds.

Dead: the engine says so. Hung: no step began for `hang_s`, although it has had work for at least as long (an
idle engine's heartbeat is old, and the first job after a pause must not look like a hang). A hang makes the
server not ready at once, and is believed when the next tick sees it too: after a process was stopped for a
while and goes on, the first tick may come before the engine's first step. Then it is final, as a death is:
what a thread that comes back after minutes has computed is nobody's any more.
"""

from __future__ import annotations

from zen_train.serve.types import EngineStats


class EngineWatch:
    """Time is passed in; the verdicts are texts for people."""

    def __init__(self, *, hang_s: float) -> None:
        self._hang_s = hang_s
        self._suspected = False

    def death(self, stats: EngineStats) -> str | None:
        """Why it is dead; None: it lives."""
        return None if stats.alive else f"the engine stopped: {stats.death or 'it gives no reason'}"

    def hang(self, stats: EngineStats, *, busy_s: float) -> str | None:
        """Why it seems to hang; None: it does not. `busy_s`: how long it has had work without a break."""
        silent_s = min(stats.heartbeat_age_s, busy_s)
        if silent_s <= self._hang_s:
            return None
        return f"the engine has work and began no step for {silent_s:.1f} s (hang_s={self._hang_s:g})"

    def tick(self, stats: EngineStats, *, busy_s: float) -> str | None:
        """Why it must be given up now; None: not yet, or it is well."""
        death = self.death(stats)
        if death is not None:
            return death
        hang = self.hang(stats, busy_s=busy_s)
        believed, self._suspected = self._suspected and hang is not None, hang is not None
        return hang if believed else None
