"""Launch of the Triton kernel of operator 3."""

import triton
from torch import Tensor

from .triton_kernel import embedding_kernel

BLOCK_K = 1024
WARPS = 4


def launch_embedding(
    out: Tensor,
    ids: Tensor,
    variant: Tensor,
    table: Tensor,
    sign: Tensor,
    row_scale: Tensor,
    col_scale: Tensor | None,
) -> None:
    """Fill `out [T, K]`."""
    n, k = table.shape
    if ids.shape[0] == 0:
        return
    table = table if table.stride(1) == 1 else table.contiguous()
    row_scale = row_scale.contiguous()
    embedding_kernel[(ids.shape[0], triton.cdiv(k, BLOCK_K))](
        out,
        ids.contiguous(),
        variant.contiguous(),
        table,
        sign.contiguous(),
        row_scale,
        row_scale if col_scale is None else col_scale.contiguous(),
        n,
        k,
        sign.shape[0],
        table.stride(0),
        HAS_COL=col_scale is not None,
        PER_MATRIX=row_scale.shape[2] == 1 and n != 1,
        PLANES=sign.shape[1],
        BLOCK_K=BLOCK_K,
        num_warps=WARPS,
    )
