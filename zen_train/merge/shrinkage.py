"""The numbers of MonoSoup (arXiv 2602.09689): where to cut a spectrum, and how much of each side to keep.

Pure arithmetic on singular values; the factorisation and the weights are elsewhere. Derivation: `README.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zen_train.errors import MergeError

# exp(entropy) of r equal singular values is exactly r; rounding must not make its ceiling r + 1.
_CEIL_SLACK = 1e-6


@dataclass(frozen=True, kw_only=True)
class Shrinkage:
    """How MonoSoup edits one matrix: `W = W0 + lam_high * D_high + lam_low * D_low`.

    rank: k, the number of leading singular directions that make up `D_high`.
    energy_high: P_k, their share of the sum of squares.
    """

    rank: int
    energy_high: float
    rho: float
    lam_high: float
    lam_low: float


def monosoup_shrinkage(s: Tensor, *, energy: float | None = None) -> Shrinkage:
    """The cut and the two factors for singular values `s` (1-D, descending, not all zero).

    energy None: the published rule, `k = ceil(exp(entropy of s / sum s))`. A share in (0, 1]: the paper's
    ablation, the smallest k whose squares reach that share. Raises MergeError when `s` is empty, zero or not
    finite.
    """
    s = s.double()
    total = float(s.square().sum())
    if s.ndim != 1 or not math.isfinite(total) or total <= 0.0:
        raise MergeError(
            f"monosoup_shrinkage: the singular values (shape {tuple(s.shape)}, sum of squares {total}) must "
            "be a vector of finite numbers that are not all zero; skip a matrix that did not change"
        )
    squares_up_to = s.square().cumsum(0)
    if energy is None:
        p = s / s.sum()
        entropy = -float(torch.xlogy(p, p).sum())
        rank = math.ceil(math.exp(entropy) * (1.0 - _CEIL_SLACK))
    else:
        check_energy(energy)
        rank = int((squares_up_to < energy * squares_up_to[-1]).sum()) + 1
    rank = min(max(rank, 1), s.numel())

    energy_high = float(squares_up_to[rank - 1] / squares_up_to[-1])
    rho = float((s[rank] / s[0]).square()) if rank < s.numel() else 0.0
    cos = math.sqrt(max(0.0, 1.0 - energy_high))
    lam_low = min(max(rho + (1.0 - rho) * cos, 0.0), 1.0)
    return Shrinkage(rank=rank, energy_high=energy_high, rho=rho, lam_high=1.0 - lam_low, lam_low=lam_low)


def check_energy(energy: float) -> None:
    """Raise MergeError unless `energy` is a share in (0, 1]."""
    if isinstance(energy, bool) or not 0.0 < energy <= 1.0:
        raise MergeError(
            f"merge: energy={energy!r} must lie in (0, 1], the share of squared singular values above the "
            "cut (the paper's ablation uses 0.8), or be None for the published entropy rule"
        )
