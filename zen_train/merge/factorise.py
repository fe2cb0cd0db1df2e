"""Exact, fast truncated SVD of one float32 matrix: the route is chosen by cost, and its result is checked.

A route (see `routes.py`) that does not converge or returns something not finite hands over to the next one;
when the last one fails too, `MergeError`. The global random state is neither read nor moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zen_train.errors import MergeError
from zen_train.merge.leading import NotConverged
from zen_train.merge.norms import sum_of_squares
from zen_train.merge.routes import ROUTES, cheapest_route, row_blocks

METHODS = ("auto", *ROUTES)

# Below this ratio to the largest singular value, A v / s is not orthogonal to float32 accuracy any more.
_SAFE_RATIO = 1e-4


@dataclass(frozen=True, kw_only=True)
class SVDResult:
    """`matrix ~ u @ diag(s) @ vh`, all float32.

    u: [m, r], s: [r] descending, none negative, vh: [r, n]; u and vh.T have orthonormal columns.
    method: the route that produced it. energy_kept: sum(s^2) over the squared norm of the matrix, 1 for zero.
    """

    u: Tensor
    s: Tensor
    vh: Tensor
    method: str
    energy_kept: float


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Half an SVD, which is all that a projection needs.

    basis: [p, r] float64, orthonormal columns, p the smaller side: right singular vectors where side is
        "right" (m >= n), left ones where it is "left".
    s: [r] float64, descending. energy: squared norm of the whole matrix. method: the route used.
    """

    basis: Tensor
    s: Tensor
    side: str
    energy: float
    method: str

    @property
    def energy_kept(self) -> float:
        """Share of the squared norm inside the r directions; 1 for a zero matrix."""
        return min(1.0, float(self.s.square().sum()) / self.energy) if self.energy > 0.0 else 1.0

    def add_projection_(self, target: Tensor, matrix: Tensor, *, rank: int, scale: float) -> None:
        """`target += scale * (best approximation of our matrix at `rank`)`, in place.

        The approximation is D V V^T or U U^T D, so the vectors of the larger side are never formed.
        """
        basis = self.basis[:, :rank].float()
        if self.side == "right":
            target.addmm_(matrix @ basis, basis.mT, alpha=scale)
        else:
            target.addmm_(basis, basis.mT @ matrix, alpha=scale)


def svd(matrix: Tensor, *, rank: int | None = None, method: str = "auto", seed: int = 0) -> SVDResult:
    """Truncated SVD of `matrix` [m, n].

    rank: leading directions to return; None, or more than min(m, n), means all of them.
    method: "auto" picks the cheapest; a named one is tried first. The result says which one was used.
    seed: of the private generator of "randomised".

    Raises MergeError for an input that is not a finite floating point matrix with at least one element, an
    unknown method, a rank below 1, and when no route converges.
    """
    half = spectrum(matrix, rank=rank, method=method, seed=seed)
    basis = half.basis.float()
    if half.side == "right":
        u, vh = _other_side(matrix.float(), half), basis.mT
    else:
        u, vh = basis, _other_side(matrix.float().mT, half).mT
    return SVDResult(
        u=u.contiguous(),
        s=half.s.float(),
        vh=vh.contiguous(),
        method=half.method,
        energy_kept=half.energy_kept,
    )


def spectrum(matrix: Tensor, *, rank: int | None = None, method: str = "auto", seed: int = 0) -> Spectrum:
    """Singular values and the singular vectors of the smaller side; arguments and errors as for `svd`."""
    if matrix.ndim != 2 or matrix.numel() == 0 or not matrix.is_floating_point():
        raise MergeError(
            f"svd: got a {matrix.dtype} tensor of shape {tuple(matrix.shape)}; it takes a floating point "
            "matrix [m, n] with at least one element"
        )
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
        raise MergeError(
            f"svd: rank={rank!r} must be a whole number of at least 1, or None for all directions"
        )
    if method not in METHODS:
        raise MergeError(f"svd: unknown method {method!r}; allowed: {', '.join(METHODS)}")
    matrix = matrix.float()
    energy = sum_of_squares(matrix)
    if not math.isfinite(energy):
        raise MergeError(f"svd: the matrix of shape {tuple(matrix.shape)} holds NaN or inf; skip this tensor")

    m, n = matrix.shape
    wanted = min(m, n) if rank is None else min(rank, m, n)
    tall = matrix if m >= n else matrix.mT
    first = cheapest_route(m, n, wanted) if method == "auto" else method
    failures = []
    for name in dict.fromkeys((first, "gram", "full")):
        try:
            basis, s = ROUTES[name](tall, wanted, seed)
        except (torch.linalg.LinAlgError, NotConverged) as error:
            failures.append(f"{name}: {error}")
            continue
        if bool(torch.isfinite(s).all()) and bool(torch.isfinite(basis).all()):
            side = "right" if m >= n else "left"
            return Spectrum(basis=basis, s=s, side=side, energy=energy, method=name)
        failures.append(f"{name}: the result is not finite")
    raise MergeError(
        f"svd: no method converged on the matrix of shape {(m, n)} ({'; '.join(failures)}); skip this tensor"
    )


def _other_side(tall: Tensor, half: Spectrum) -> Tensor:
    """[m, r] float32: singular vectors of the larger side, A v_i / s_i; orthonormal even where s_i is 0."""
    s = half.s
    scale = torch.where(s > 0.0, 1.0 / s.clamp_min(torch.finfo(s.dtype).tiny), 1.0)
    other = torch.cat([rows.double() @ half.basis * scale for rows in row_blocks(tall)])
    if float(s[-1]) < _SAFE_RATIO * float(s[0]) or float(s[0]) == 0.0:
        # Householder QR, largest direction first, keeps the accurate columns and completes the others.
        q, r = torch.linalg.qr(other)
        other = q * torch.where(r.diagonal() < 0.0, -1.0, 1.0)
    return other.float()
