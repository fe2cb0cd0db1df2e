"""Who gets the next place in the engine. Pure: lanes and a time in, a lane out.

While places are free every request is started at once and nothing here matters. When they are scarce, two
rules apply:

1. *Bound.* A lane that has had a request waiting for `starvation_s` without getting a place goes first; of
   several, the one that has waited longest.
2. *Share.* Otherwise the lane that was given the fewest tokens goes first (the virtual token counter of Sheng
   et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588): a prompt token counts 1
   when its job starts, an output token `output_weight` when it comes. Deficit round robin, the usual
   alternative, must know a request's cost beforehand, and here the output's length is known afterwards. A
   lane whose queue was empty starts again at the virtual time, the counter of the lane that was chosen last,
   so that idle time earns no credit.

A flood of one variant therefore delays its own requests, not those of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zen_train.serve.router.lane import Lane


class FairShare:
    """The counters' virtual time, and the order."""

    def __init__(self, *, starvation_s: float, output_weight: float) -> None:
        self._starvation_s = starvation_s
        self._output_weight = output_weight
        self._virtual = 0.0

    def joins(self, lane: Lane) -> None:
        """Call when a request enters an empty queue."""
        lane.served = max(lane.served, self._virtual)

    def starts(self, lane: Lane, *, prompt_tokens: int) -> None:
        """Call when a job of the lane is given a place."""
        self._virtual = max(self._virtual, lane.served)
        lane.served += prompt_tokens

    def produced(self, lane: Lane) -> None:
        """Call for every output token."""
        lane.served += self._output_weight

    def starving(self, lane: Lane, now_s: float) -> bool:
        """Whether rule 1 applies."""
        return lane.waiting_s(now_s) >= self._starvation_s

    def order(self, lanes: Iterable[Lane], now_s: float) -> Iterator[Lane]:
        """Lanes with waiting requests, first served first. The base is a lane like any other."""
        starving: list[Lane] = []
        others: list[Lane] = []
        for lane in lanes:
            (starving if self.starving(lane, now_s) else others).append(lane)
        yield from sorted(starving, key=lambda lane: -lane.waiting_s(now_s))
        yield from sorted(others, key=lambda lane: lane.served)
