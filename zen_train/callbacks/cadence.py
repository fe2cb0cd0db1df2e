"""When something that happens every N optimizer steps is due.

It fires on crossing a multiple of N, never on `step % N == 0`: a step counter that skips or repeats a value
(accumulation, an epoch's short last window, a resume) then neither misses a turn nor takes it twice
(Lightning #17958, #17903, #17207, #11979).
"""

from __future__ import annotations


class Cadence:
    """Turns of N optimizer steps. `last_step` is all the state there is; save it and restore it."""

    def __init__(self, every_n_steps: int) -> None:
        assert every_n_steps > 0
        self.every_n_steps = every_n_steps
        self.last_step = 0

    def due(self, step: int) -> bool:
        """Whether `step` has crossed into a new turn since the last one taken. Takes it when it has."""
        crossed = step // self.every_n_steps > self.last_step // self.every_n_steps
        if crossed:
            self.last_step = step
        return crossed
