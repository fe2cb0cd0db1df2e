"""The definition of `one_bit_code_` in plain PyTorch.

Legend: N rows, K columns. Differences are taken in float32, sums in float64.
"""

from torch import Tensor

from zen_train.kernels.common.along import along_scale
from zen_train.kernels.common.dither import dither_


def one_bit_code_reference(
    latent_NK: Tensor, base_NK: Tensor, *, per_row: bool, along_weight: float, dither: bool
) -> Tensor:
    """The code, float32 `[N, K]`."""
    origin_NK = base_NK.float()
    d_NK = latent_NK - origin_NK
    size_N, square_N = change_sums_reference(d_NK)
    count = d_NK.shape[1]
    if not per_row:
        size_N, square_N, count = size_N.sum()[None], square_N.sum()[None], d_NK.numel()
    alpha_N1 = along_scale(size_N, square_N, count, along_weight)[:, None]
    code_NK = origin_NK + alpha_N1.where(d_NK >= 0, -alpha_N1)
    return dither_(code_NK) if dither else code_NK


def change_sums_reference(d_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of |D| and of D^2 by row, float64 `[N]`."""
    wide_NK = d_NK.double()
    return wide_NK.abs().sum(dim=1), wide_NK.square().sum(dim=1)
