"""Three ways to the leading right singular vectors of a tall matrix, and a cost model that picks one.

  gram        all eigenvectors of A^T A in float64.
  randomised  the few leading ones from a random start (`leading.py`), for ranks far below the smaller side.
  full        `torch.linalg.svd` in float64: the slowest, for matrices on which the others fail.

Contract: A is float32 [m, n] with m >= n and finite; a route returns (basis [n, rank], s [rank]), float64,
s descending, or raises LinAlgError or NotConverged. Error bounds, constants and timings: `README.md`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zen_train.merge.leading import NotConverged, block_width, leading_directions

# Work in units of one float64 multiply-add pair at matrix-product speed, fitted to measured times.
_EIGH_PER_N3 = 12.5
_EXPECTED_PRODUCTS = 16
_CYCLES_PER_NW2 = 140
# Rows are widened to float64 a block at a time: a copy of a whole embedding would be 226 MB.
_BLOCK_BYTES = 8 << 20

Route = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def cheapest_route(m: int, n: int, rank: int) -> str:
    """The route with the least estimated work for `rank` directions of an [m, n] matrix."""
    m, n = max(m, n), min(m, n)
    width = block_width(rank)
    if 2 * width > n:
        return "gram"
    gram_work = 2 * m * n**2 + _EIGH_PER_N3 * n**3
    products = min(_work_with_gram(m, n, width), _work_without_gram(m, n, width))
    return "randomised" if products + _CYCLES_PER_NW2 * n * width**2 < gram_work else "gram"


def gram_route(tall: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """All eigenvectors of the Gram matrix, cut to `rank`; `seed` is not used."""
    values, vectors = torch.linalg.eigh(_gram(tall))
    return vectors.flip(1)[:, :rank], values.flip(0)[:rank].clamp_min(0.0).sqrt()


def randomised_route(tall: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """The `rank` leading eigenvectors of the Gram matrix, from a random start."""
    m, n = tall.shape
    width = block_width(rank)
    if 2 * width > n:
        raise NotConverged(f"rank {rank} is not far below {n}")
    if _work_with_gram(m, n, width) <= _work_without_gram(m, n, width):
        gram = _gram(tall)

        def multiply(x: Tensor) -> Tensor:
            return gram @ x
    else:

        def multiply(x: Tensor) -> Tensor:
            return _gram_times(tall, x)

    basis, values = leading_directions(multiply, size=n, rank=rank, seed=seed, device=tall.device)
    return basis, values.sqrt()


def full_route(tall: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """LAPACK's divide and conquer in float64, a copy of the whole matrix; `seed` is not used."""
    _, s, vh = torch.linalg.svd(tall.double(), full_matrices=False)
    return vh.mT[:, :rank], s[:rank]


ROUTES: dict[str, Route] = {"gram": gram_route, "randomised": randomised_route, "full": full_route}


def row_blocks(tall: Tensor) -> tuple[Tensor, ...]:
    """Views of a few thousand rows of `tall`, each small enough to widen to float64."""
    return tall.split(max(1, _BLOCK_BYTES // (8 * tall.shape[1])))


def _work_with_gram(m: int, n: int, width: int) -> int:
    return 2 * m * n**2 + _EXPECTED_PRODUCTS * 2 * n**2 * width


def _work_without_gram(m: int, n: int, width: int) -> int:
    return _EXPECTED_PRODUCTS * 4 * m * n * width


def _gram(tall: Tensor) -> Tensor:
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=tall.device)
    for rows in row_blocks(tall):
        wide = rows.double()
        gram.addmm_(wide.mT, wide)
    return gram


def _gram_times(tall: Tensor, x: Tensor) -> Tensor:
    product = torch.zeros_like(x)
    for rows in row_blocks(tall):
        wide = rows.double()
        product.addmm_(wide.mT, wide @ x)
    return product
