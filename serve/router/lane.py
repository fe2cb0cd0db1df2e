"""One variant's place in the router: its FIFO queue, its jobs in the engine, and where its weights are.

A lane belongs to a content hash, never to a name: new weights under an old name get a new lane, and the old
lane lives on without a name until its last job ends. The base is a lane too, always on the device.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from zen_train.serve.router.ticket import Ticket
from zen_train.serve.types import Variant

Where = Literal["disk", "loading", "device", "leaving"]
"""loading: room is reserved, the copy is under way. leaving: no job uses it, the bytes are being freed."""


@dataclass(eq=False, slots=True, kw_only=True)
class Lane:
    """Changed by the scheduler and by residency only."""

    key: str | None
    """Content hash; None: the base."""
    variant: Variant | None
    names: dict[str, Variant] = field(default_factory=dict)
    """Under which it is served; empty for the base and for a retired lane."""
    where: Where = "disk"
    size_bytes: int | None = None
    """On the device; None until the engine was asked."""
    queue: dict[Ticket, None] = field(default_factory=dict)
    """Oldest first; a dict, so that a cancelled request leaves from the middle in O(1)."""
    running: dict[str, Ticket] = field(default_factory=dict)
    """Job id -> ticket, until the engine says the job has ended."""
    demands: list[asyncio.Future[bool | Exception]] = field(default_factory=list)
    """Administrators who want it on the device; answered with whether it is, or why it cannot be."""
    served: float = 0.0
    """Fairness: weighted tokens, in the virtual time of `fairness.py`."""
    last_place_s: float = float("-inf")
    device_since_s: float = float("-inf")

    @property
    def is_base(self) -> bool:
        return self.key is None

    @property
    def retired(self) -> bool:
        """No name means it any more."""
        return not self.is_base and not self.names

    @property
    def wanted(self) -> bool:
        """Somebody waits for it."""
        return bool(self.queue or self.demands)

    @property
    def title(self) -> str:
        """For messages and logs."""
        return "the base" if self.variant is None else f"variant {self.variant.name!r}"

    def answer(self, answer: bool | Exception) -> None:
        """Tell those who wanted it on the device."""
        for demand in self.demands:
            if not demand.done():
                demand.set_result(answer)
        self.demands.clear()

    def head(self) -> Ticket:
        """The oldest waiting request. The queue is not empty."""
        return next(iter(self.queue))

    def waiting_s(self, now_s: float) -> float:
        """How long the lane has had a request waiting without getting a place; 0 with an empty queue."""
        if not self.queue:
            return 0.0
        return now_s - max(self.head().submitted_s, self.last_place_s)

    def tokens_to_go(self) -> int:
        """Output tokens until its longest job must be over: an upper bound, most stop earlier."""
        return max((t.request.max_tokens - t.output_tokens for t in self.running.values()), default=0)
