"""The definition of `one_bit_code_` in plain PyTorch.

Legend: N rows, K columns. Differences are taken in float32, sums in float64.
"""

from torch import Tensor

from zen_train.kernels.common.along import along_scale, change_sums
from zen_train.kernels.common.dither import dither_


def one_bit_code_reference(
    latent_NK: Tensor, base_NK: Tensor, *, per_row: bool, along_weight: float, dither: bool
) -> Tensor:
    """The code, float32 `[N, K]`."""
    origin_NK = base_NK.float()
    d_NK = latent_NK - origin_NK
    alpha_N1 = along_scale(*change_sums(d_NK), d_NK.shape[1], along_weight, per_row=per_row)
    code_NK = origin_NK + alpha_N1.where(d_NK >= 0, -alpha_N1)
    return dither_(code_NK) if dither else code_NK
