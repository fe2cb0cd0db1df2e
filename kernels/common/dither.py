"""Rounding to bf16 that keeps small deltas: `dither_bf16`.

The base lies on the bf16 grid. A delta below half a step of that grid would vanish if `W0 + alpha S` were rounded to
nearest; on SmolLM2-135M that took 40 % of the weights' deltas and 2 to 7 % of a fine-tune's gain. So a value is rounded
up with a probability equal to its place between its neighbours, and products with the result are right on average:
99.7 to 99.9 % of the gain stays (`scripts/bench_rounding.py`). The "probability" is a fixed sequence along the columns,
`GOLDEN k mod 2^16`, added to the 16 bits that are cut off: equal inputs give equal outputs, and its values are evenly
spread (a golden-ratio sequence), so that errors cancel faster than random ones. What bf16 holds exactly is unchanged.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E37
"""2^16 divided by the golden ratio, odd."""
_BLOCK = 1 << 20


def dither_bf16(weight: Tensor) -> Tensor:
    """`[..., K]` to bfloat16, each element to one of its two neighbours on the grid. Finite values only."""
    columns = weight.shape[-1]
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    # A block at a time, so that no second copy of a large matrix is held.
    rows = max(1, _BLOCK // max(columns, 1))
    for part, place in zip(
        weight.reshape(-1, columns).split(rows), out.view(-1, columns).split(rows), strict=True
    ):
        place.copy_(dither_(part.to(torch.float32, copy=True)))
    return out


def dither_(weight: Tensor) -> Tensor:
    """The same for float32 in place: afterwards every element is one that bfloat16 holds. Returns `weight`."""
    columns = torch.arange(weight.shape[-1], dtype=torch.int32, device=weight.device)
    weight.view(torch.int32).add_((columns * GOLDEN) & 0xFFFF).bitwise_and_(-0x10000)
    return weight
