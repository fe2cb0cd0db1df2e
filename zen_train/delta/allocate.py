"""How many sign planes each matrix gets when all of them together may take so many bits a weight.

    minimise  sum over matrices of loss[name][planes[name]]   with   sum of numel * planes <= bits * sum of numel

Steps along the lower convex hull of every matrix are taken in the order of what a bit buys: the optimum of the problem
with the last step taken in part, and so at most that one step away from the optimum of this one (Shoham and Gersho,
1988). Scales are not counted: a float32 for each row, 0.02 to 0.06 bits a weight.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

from zen_train.errors import DeltaError


def allocate(loss: Mapping[str, Sequence[float]], numel: Mapping[str, int], *, bits: float) -> dict[str, int]:
    """Planes by name.

    Args:
        loss: what is lost with 0, 1, 2, ... planes, by name.
        numel: elements, by name.
        bits: a weight, on average over all of them.
    """
    if bits <= 0:
        raise DeltaError(f"bits={bits:g} a weight leave nothing to store; more than 0 is needed")
    planes = dict.fromkeys(loss, 0)
    left = bits * sum(numel[name] for name in loss)
    steps = [step for name, losses in loss.items() for step in _steps(name, losses, numel[name])]
    heapq.heapify(steps)
    full: set[str] = set()
    while steps:
        _, name, before, after = heapq.heappop(steps)
        cost = (after - before) * numel[name]
        if name in full or cost > left:
            full.add(name)  # the steps behind this one build on it
            continue
        left -= cost
        planes[name] = after
    return planes


def _steps(name: str, losses: Sequence[float], numel: int) -> list[tuple[float, str, int, int]]:
    """(loss per bit, negative; name; planes before; planes after) along the lower hull, best first."""
    return [(_slope(losses, a, b) / numel, name, a, b) for a, b in pairwise(lower_hull(losses))]


def lower_hull(losses: Sequence[float]) -> list[int]:
    """The numbers of bits from 0 on that lie on the lower convex hull of their losses."""
    hull = [0]
    for point in range(1, len(losses)):
        if losses[point] >= losses[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(losses, hull[-2], hull[-1]) >= _slope(losses, hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(losses: Sequence[float], a: int, b: int) -> float:
    return (losses[b] - losses[a]) / (b - a)
