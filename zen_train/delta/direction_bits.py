"""How many bits each singular direction of one matrix gets, and what a vector loses with so many.

    minimise  sum of sigma_i^2 loss(b_i)   with   sum of b_i (N + K) + 32 for each kept direction  <=  budget

A direction in b bits keeps the share (1 - f_b)^2 of itself, f_b being what the best uniform quantiser of b bits leaves
of a Gaussian (Max, 1960). The scale that makes it unbiased turns the loss e = 1 - (1 - f_b)^2 into noise, and `along`
says what noise is worth beside a missing share. Steps along the lower hull are taken in the order of what a bit buys,
as in `allocate`, for eight neighbours at a time: their bits fill whole bytes, and nothing is padded.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from zen_train.delta.allocate import lower_hull
from zen_train.kernels.common.along import along_factor

SCALE_BITS = 32
GROUP = 8
"""Directions that share their bits."""
BEST_STEP = (1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
"""Distance of two levels for 1, 2, ... bits of a Gaussian of variance 1."""
_LEFT = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000306, 0.000089)
"""f_b for 0, 1, 2, ... bits."""
MOST_BITS = len(BEST_STEP)
ALONG_WEIGHT = 4.0
"""How many times a share of a direction that is missing counts against noise of the same square; measured."""


def direction_losses() -> list[float]:
    """What a direction of square 1 costs with 0, 1, 2, ... bits."""
    lost = 1.0 - (1.0 - torch.tensor(_LEFT, dtype=torch.float64)).square()
    losses: list[float] = (lost * along_factor(lost, ALONG_WEIGHT)).tolist()
    return losses


def most_directions(rows: int, columns: int, bits: float) -> int:
    """As many as `bits` a weight pay for with one bit on each vector."""
    most = min(rows, columns, int(bits * rows * columns / (rows + columns + SCALE_BITS)))
    return most if most < GROUP else most - most % GROUP


def spread_bits(square_R: Sequence[float], *, rows: int, columns: int, bits: float) -> list[int]:
    """Bits of each direction, from its squared singular value, under `bits` a weight of the matrix; scales count."""
    losses, left = direction_losses(), bits * rows * columns
    size = 1 if len(square_R) < GROUP else GROUP  # of a matrix that small each is by itself
    groups = [sum(square_R[start : start + size]) for start in range(0, len(square_R) - size + 1, size)]
    steps = sorted(
        (square * (losses[after] - losses[before]) / (after - before), group, before, after)
        for group, square in enumerate(groups)
        if square > 0
        for before, after in pairwise(lower_hull(losses))
    )
    bits_G = [0] * len(groups)
    for _, group, before, after in steps:
        price = size * ((after - before) * (rows + columns) + (0 if before else SCALE_BITS))
        if bits_G[group] == before and price <= left:  # a step left out takes those behind it with it
            bits_G[group] = after
            left -= price
    return [bits for bits in bits_G for _ in range(size)]
