"""Training-free codes of one delta matrix, ours and others', as what they make of it and the bits that they take.

All take `D = W1 - W0`, float32 `[N, K]`, and return (`D_hat`, bits). Peers:
- `low_rank`: truncated SVD, factors in bf16, of the rank that one bit a weight pays for.
- `delta_come`: Delta-CoMe (arXiv 2406.08903), singular vectors in mixed precision: 2 at 8 bits, 32 at 3, then 2 bits
  as far as the budget of one bit a weight goes; rounded to nearest in groups of 128 (with the paper's
  GPTQ: `fidelity_calibrated`).
- `ternary`: -a, 0, +a with the threshold 0.7 mean|D| (TWN, arXiv 1605.04711); its size is its entropy, which no format
  that can be indexed reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from zen_train.config import ExportSection
from zen_train.delta.codec import Scale, decode, encode
from zen_train.delta.directions import encode_directions, singular_factors
from zen_train.delta.directions_parts import directions_product

Code = Callable[[Tensor], tuple[Tensor, float]]
ALONG_WEIGHT = ExportSection().along_weight
_SCALE_BITS = 32
GROUP = 128


def planes(delta_NK: Tensor, *, scale: Scale, count: int, along_weight: float = 1.0) -> tuple[Tensor, float]:
    """Ours: sign planes with scales by row or by matrix."""
    coded = encode(torch.zeros_like(delta_NK), delta_NK, scale=scale, planes=count, along_weight=along_weight)
    scales = sum(plane.alpha.numel() for plane in coded.planes)
    return decode(coded.planes, tuple(delta_NK.shape)), count * delta_NK.numel() + _SCALE_BITS * scales


def low_rank(delta_NK: Tensor, *, bits: float = 1.0) -> tuple[Tensor, float]:
    """The best approximation of a rank, by Eckart and Young."""
    rank = max(1, int(bits * delta_NK.numel() / (16 * sum(delta_NK.shape))))
    left_NR, right_RK = (factor.bfloat16().float() for factor in factors(delta_NK, rank))
    return left_NR @ right_RK, 16.0 * rank * sum(delta_NK.shape)


def delta_come(delta_NK: Tensor, *, bits: float = 1.0) -> tuple[Tensor, float]:
    """Singular vectors in 8, 3 and 2 bits."""
    width_R = torch.tensor(delta_come_widths(delta_NK.shape[0], delta_NK.shape[1], bits))
    left_NR, right_RK = factors(delta_NK, len(width_R))
    made_NK = rounded(left_NR.T, width_R).T @ rounded(right_RK, width_R)
    return made_NK, vectors_bits(width_R) * sum(delta_NK.shape)


def delta_come_widths(rows: int, columns: int, bits: float) -> list[int]:
    """Bits of each direction under a budget a weight."""
    left = bits * rows * columns
    widths: list[int] = []
    for width, most in ((8, 2), (3, 32), (2, min(rows, columns))):
        cost = vector_bits(width) * (rows + columns)
        count = min(most, min(rows, columns) - len(widths), int(left / cost))
        widths += [width] * count
        left -= cost * count
    return widths


def directions(delta_NK: Tensor, *, bits: float = 1.0) -> tuple[Tensor, float]:
    """Ours: coded singular directions, counted as they are stored; signs where so few bits pay for none."""
    coded = encode_directions(torch.zeros_like(delta_NK), delta_NK, bits=bits, transposed=False)
    if coded is None:
        return planes(delta_NK, scale="row", count=1, along_weight=ALONG_WEIGHT)
    return directions_product(coded.parts, delta_NK.shape[1]), 8.0 * coded.parts.size_bytes


def ternary(delta_NK: Tensor) -> tuple[Tensor, float]:
    """-a, 0, +a by row."""
    size_NK = delta_NK.abs()
    kept_NK = size_NK > 0.7 * size_NK.mean(1, keepdim=True)
    count_N1 = kept_NK.sum(1, keepdim=True).clamp_min(1)
    alpha_N1 = (size_NK * kept_NK).sum(1, keepdim=True) / count_N1
    share = float(kept_NK.float().mean())
    shares = torch.tensor([share / 2, share / 2, 1 - share])
    entropy = float(-(shares * shares.clamp_min(1e-12).log2()).sum())
    bits = entropy * delta_NK.numel() + _SCALE_BITS * delta_NK.shape[0]
    return torch.where(kept_NK, alpha_N1 * delta_NK.sign(), 0.0), bits


def factors(delta_NK: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """`[N, R]` and `[R, K]`, the singular values shared evenly between them."""
    left_RN, right_RK, _ = singular_factors(delta_NK, rank)
    return left_RN.T, right_RK


def vector_bits(width: int) -> float:
    """Of one entry, with a 16-bit scale and a 16-bit offset for each group."""
    return width + 32 / GROUP


def vectors_bits(width_R: Tensor) -> float:
    """Of one entry of every vector."""
    return sum(vector_bits(int(width)) for width in width_R)


def rounded(vectors_RL: Tensor, width_R: Tensor) -> Tensor:
    """Each vector to its width, in groups, between smallest and largest value."""
    length = vectors_RL.shape[1]
    padded = torch.nn.functional.pad(vectors_RL, (0, -length % GROUP))
    groups = padded.view(len(vectors_RL), -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((high - low) / (2.0 ** width_R.view(-1, 1, 1) - 1)).clamp_min(1e-30)
    return (((groups - low) / step).round() * step + low).flatten(1)[:, :length]


def low_rank_and_signs(delta_NK: Tensor, *, bits: float = 0.25) -> tuple[Tensor, float]:
    """Ours: so many bits of leading directions, one pushed sign plane for what they leave."""
    part_NK, part_bits = low_rank(delta_NK, bits=bits)
    rest_NK, rest_bits = planes(delta_NK - part_NK, scale="row", count=1, along_weight=ALONG_WEIGHT)
    return part_NK + rest_NK, part_bits + rest_bits


CODES: dict[str, Code] = {
    "matrix": partial(planes, scale="matrix", count=1),
    "row": partial(planes, scale="row", count=1),
    "pushed": partial(planes, scale="row", count=1, along_weight=ALONG_WEIGHT),
    "two_bits": partial(planes, scale="row", count=2, along_weight=ALONG_WEIGHT),
    "low_rank_and_signs": low_rank_and_signs,
    "low_rank": low_rank,
    "delta_come": delta_come,
    "directions": directions,
    "directions_0.5": partial(directions, bits=0.5),
    "ternary": ternary,
}
