"""Several sign planes as one quantiser: Lloyd's iteration over the signs and scales of all planes together.

Coded one after the other, two planes leave 0.132 of the squared norm of a Gaussian delta; together they are a symmetric
quantiser of four levels, whose optimum leaves 0.1175 (Max, 1960). It finds the zero-aware code by itself: where most of
a row is exactly zero, both scales become m/2 and the two signs cancel there, which gives -m, 0 and +m.

    repeat: signs of the nearest level; scales of least squares, alpha = (S S^T)^-1 S d, by row or by matrix

A round that does not make the error of its row (or matrix) smaller is not taken, so refining never loses.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from zen_train.delta.rows import Block, as_float32, packed_width, row_blocks, run_blocks

_ROUNDS = 8
_WORTH_IT = 1e-3
"""A round that takes a smaller share of the error is the last one of its row."""
_SINGULAR = 1e-9

Float64 = npt.NDArray[np.float64]
SignAlpha = tuple[torch.Tensor, torch.Tensor]


def refine_planes(
    base: torch.Tensor, tuned: torch.Tensor, planes: Sequence[SignAlpha], *, transposed: bool
) -> tuple[list[SignAlpha], torch.Tensor]:
    """Better planes for `D = tuned - base`, and `||D - D_hat||^2` with them by row or matrix, float64 `[G]`.

    Args:
        base, tuned: CPU tensors, as for `codec.encode`.
        planes: two or more to start from: sign uint8 `[..., out, B]`, alpha float32 `[..., out]` or `[..., 1]`.
        transposed: stored `[..., in, out]`.
    """
    sign_shape, alpha_shape = planes[0][0].shape, planes[0][1].shape
    rows, groups = planes[0][0][..., 0].numel(), planes[0][1].numel()
    sign_PRB = np.stack([sign.numpy().reshape(rows, -1) for sign, _ in planes])
    alpha_GP = np.stack([alpha.numpy().reshape(-1) for _, alpha in planes], axis=1).astype(np.float64)
    error_G = np.full(groups, np.inf)
    active_G = np.ones(groups, dtype=bool)
    for _ in range(_ROUNDS):
        # From the largest scale down, what is left of an element decides its next sign: the nearest level.
        largest_first_GP = -np.sort(-alpha_GP, axis=1)
        new_PRB, sums = _nearest(base, tuned, largest_first_GP.repeat(rows // groups, axis=0), transposed)
        found_GP, found_G = _least_squares(
            *(each.reshape(groups, -1, *each.shape[1:]).sum(1) for each in sums)
        )
        better_G = active_G & (found_G < error_G)
        better_R = better_G.repeat(rows // groups)
        active_G = better_G & (found_G < (1.0 - _WORTH_IT) * error_G)
        sign_PRB[:, better_R] = new_PRB[:, better_R]
        alpha_GP[better_G], error_G[better_G] = found_GP[better_G], found_G[better_G]
        if not active_G.any():
            break
    refined = [
        (
            torch.from_numpy(sign_RB.copy()).view(sign_shape),
            torch.from_numpy(alpha_G).float().view(alpha_shape),
        )
        for sign_RB, alpha_G in zip(sign_PRB, alpha_GP.T.copy(), strict=True)
    ]
    return refined, torch.from_numpy(error_G)


def _nearest(
    base: torch.Tensor, tuned: torch.Tensor, alpha_RP: Float64, transposed: bool
) -> tuple[npt.NDArray[np.uint8], tuple[Float64, Float64, Float64]]:
    """Signs of the nearest levels, packed `[P, R, B]`; and by row S S^T `[R, P, P]`, S d `[R, P]`, d d `[R]`."""
    rows, planes = alpha_RP.shape
    columns = base.shape[-2] if transposed else base.shape[-1]
    sign_PRB = np.empty((planes, rows, packed_width(columns)), dtype=np.uint8)
    gram_RPP, product_RP = np.empty((rows, planes, planes)), np.empty((rows, planes))
    square_R = np.empty(rows)

    def work(block: Block) -> None:
        start, stop, base_RK, tuned_RK = block
        delta_RK = as_float32(tuned_RK) - as_float32(base_RK)
        left_RK = delta_RK.copy()
        signs = []
        for plane in range(planes):
            positive_RK = left_RK >= 0
            sign_PRB[plane, start:stop] = np.packbits(positive_RK, axis=-1, bitorder="little")
            signs.append(np.where(positive_RK, np.float32(1), np.float32(-1)))
            left_RK -= signs[-1] * alpha_RP[start:stop, plane, None].astype(np.float32)
        for plane, sign_RK in enumerate(signs):
            product_RP[start:stop, plane] = np.einsum("rk,rk->r", sign_RK, delta_RK, dtype=np.float64)
            for other, other_RK in enumerate(signs):
                gram_RPP[start:stop, plane, other] = np.einsum(
                    "rk,rk->r", sign_RK, other_RK, dtype=np.float64
                )
        square_R[start:stop] = np.einsum("rk,rk->r", delta_RK, delta_RK, dtype=np.float64)

    run_blocks(work, row_blocks(base, tuned, transposed=transposed), tuned.numel())
    return sign_PRB, (gram_RPP, product_RP, square_R)


def _least_squares(gram_GPP: Float64, product_GP: Float64, square_G: Float64) -> tuple[Float64, Float64]:
    """Scales `[G, P]`, none negative, and the squared error `[G]` with them."""
    planes = gram_GPP.shape[-1]
    scale_G = np.maximum(gram_GPP[:, 0, 0], 1.0) ** planes
    singular_G = (
        np.abs(np.linalg.det(gram_GPP)) <= _SINGULAR * scale_G
    )  # two planes are equal in the whole row
    inverse_GPP = np.linalg.inv(np.where(singular_G[:, None, None], np.eye(planes), gram_GPP))
    inverse_GPP[singular_G] = np.linalg.pinv(gram_GPP[singular_G], hermitian=True)
    alpha_GP = np.einsum("gpq,gq->gp", inverse_GPP, product_GP)
    alpha_GP = np.maximum(alpha_GP, 0.0).astype(np.float32).astype(np.float64)  # as they are stored
    error_G = (
        square_G
        - 2 * np.einsum("gp,gp->g", alpha_GP, product_GP)
        + np.einsum("gp,gpq,gq->g", alpha_GP, gram_GPP, alpha_GP)
    )
    return alpha_GP, np.maximum(error_G, 0.0)
