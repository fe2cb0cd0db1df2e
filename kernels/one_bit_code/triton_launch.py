"""Launch of the Triton kernels of `one_bit_code_`."""

import torch
from torch import Tensor

from zen_train.kernels.common.along import along_scale

from .triton_kernel import change_sums_kernel, one_bit_code_kernel

BLOCK_K = 1024
WARPS = 4


def launch_one_bit_code(
    out: Tensor, latent: Tensor, base: Tensor, per_row: bool, along_weight: float, dither: bool
) -> None:
    """Fill `out` `[N, K]`; its columns are next to each other."""
    n, k = out.shape
    if n == 0:
        return
    latent, base = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (latent, base))
    alpha = out  # not read when every row has its own
    if not per_row:
        size, square = torch.empty(2, n, dtype=torch.float64, device=out.device)
        change_sums_kernel[(n,)](
            latent, base, size, square, k, latent.stride(0), base.stride(0), BLOCK_K=BLOCK_K, num_warps=WARPS
        )
        alpha = along_scale(size, square, k, along_weight, per_row=False)
    one_bit_code_kernel[(n,)](
        out,
        latent,
        base,
        alpha,
        k,
        float(along_weight),
        out.stride(0),
        latent.stride(0),
        base.stride(0),
        PER_ROW=per_row,
        DITHER=dither,
        BLOCK_K=BLOCK_K,
        num_warps=WARPS,
    )
