"""The few leading eigenvectors of a Gram matrix, from a random start, stopped by an error estimate.

Subspace iteration (Halko, Martinsson, Tropp 2011, section 4.5) sped up by a Chebyshev filter (Zhou, Saad,
Tiago, Chelikowsky 2006): between two orthonormalisations the block is multiplied by a polynomial that is
small on the spectrum below the block and large above it. Derivation and error bound: `README.md`.

Contract: deterministic for a seed, never touches the global random state, and raises `NotConverged` instead
of returning directions that miss the tolerance. Whether it is worth running is decided in `routes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Largest share of the squared norm that the returned directions may miss against the best ones.
ENERGY_TOLERANCE = 1e-12
_MAX_CYCLES = 6
_MAX_DEGREE = 12
_EPS = torch.finfo(torch.float64).eps
_TINY = torch.finfo(torch.float64).tiny


class NotConverged(ArithmeticError):
    """The error estimate did not fall below the tolerance within the allowed cycles."""


def block_width(rank: int) -> int:
    """Columns iterated on for `rank` wanted ones: half as many again give the filter a gap to work with."""
    return rank + max(16, rank // 2)


def leading_directions(
    multiply: Callable[[Tensor], Tensor], *, size: int, rank: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Leading eigenvectors [size, rank] and eigenvalues [rank], float64, descending, of a Gram matrix G.

    multiply: X -> G X for X [size, block_width(rank)], float64.
    Raises NotConverged, and torch.linalg.LinAlgError when the small eigenproblem fails.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(size, block_width(rank), generator=generator)
    x = torch.linalg.qr(multiply(start.to(device).double())).Q
    missed = tolerance = math.inf
    for _ in range(_MAX_CYCLES):
        image = multiply(x)
        small = x.mT @ image
        values, rotation = torch.linalg.eigh((small + small.mT) / 2)
        values, rotation = values.flip(0), rotation.flip(1)
        x, image = x @ rotation, image @ rotation
        cut = float(values[-1].clamp_min(_EPS * float(values[0])))
        residual = torch.linalg.vector_norm(image - x * values, dim=0)
        missed = missed_energy(values[:rank], residual[:rank], cut)
        tolerance = ENERGY_TOLERANCE * float(values.sum())
        if missed <= tolerance:
            return x[:, :rank], values[:rank].clamp_min(0.0)
        degree = _degree(values, residual, cut, rank=rank, reduction=missed / tolerance)
        x = torch.linalg.qr(_filtered(multiply, x, image, cut, degree)).Q
    raise NotConverged(f"still misses {missed:.1e} after {_MAX_CYCLES} cycles, allowed {tolerance:.1e}")


def missed_energy(values: Tensor, residual: Tensor, cut: float) -> float:
    """Estimate of (sum of the leading eigenvalues) - (sum of the Ritz `values`); `residual` are their norms.

    Each value is coupled by its residual to a complement that lies below `cut`; the larger eigenvalue of that
    2 x 2 problem exceeds the Ritz value by `(sqrt(gap^2 + 4 residual^2) - gap) / 2`, written here without
    cancellation.
    """
    gap = (values - cut).clamp_min(0.0)
    return float((2.0 * residual.square() / (gap + torch.hypot(gap, 2.0 * residual)).clamp_min(_TINY)).sum())


def _degree(values: Tensor, residual: Tensor, cut: float, *, rank: int, reduction: float) -> int:
    """The degree that should reduce the missed energy by `reduction`, or the largest that rounding allows.

    A column holds a share of about residual_j / value_j of direction j, and the filter multiplies that share
    by T(x_j) / T(x_rank). Past sqrt(tolerance) / eps, orthonormalising would leave too few correct digits.
    """
    theta = torch.acosh((2.0 * values / cut - 1.0).clamp_min(1.0))
    share = (residual / values.clamp_min(_TINY)).clamp_min(_EPS)
    largest_growth = ENERGY_TOLERANCE**0.5 / _EPS
    for degree in range(1, _MAX_DEGREE):
        if math.cosh(degree * float(theta[rank - 1])) ** 2 > 10.0 * reduction:
            return degree
        next_theta = (degree + 1) * theta
        growth = share * torch.cosh(next_theta) / torch.cosh(next_theta[rank - 1])
        if float(growth.max()) > largest_growth:
            return degree
    return _MAX_DEGREE


def _filtered(
    multiply: Callable[[Tensor], Tensor], x: Tensor, image: Tensor, cut: float, degree: int
) -> Tensor:
    """`T_degree(2 G / cut - 1) x`, columns scaled to norm 1; `image` is G x. |T| <= 1 on [0, cut]."""
    before, now = x, image * (2.0 / cut) - x
    for _ in range(degree - 1):
        before, now = now, multiply(now).mul_(4.0 / cut).sub_(now, alpha=2.0).sub_(before)
    return now / torch.linalg.vector_norm(now, dim=0).clamp_min(_TINY)
