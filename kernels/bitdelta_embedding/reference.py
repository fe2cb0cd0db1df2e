"""The definition of `bitdelta_embedding` in plain PyTorch.

Legend: T tokens, N rows of the table (the vocabulary), K columns, V variants, P sign planes.
"""

import torch
from torch import Tensor

from zen_train.kernels.bitdelta_linear.reference import round_folded, unpack_signs


def embedding_reference(
    ids_T: Tensor,
    variant_T: Tensor,
    table_NK: Tensor,
    sign_VPNB: Tensor,
    row_scale_VPN: Tensor,
    col_scale_VPK: Tensor | None,
) -> Tensor:
    """`table[id] + sum_p row * col * sign` of the token's row, `[T, K]` in the table's dtype, one rounding
    (dithered to bf16: see `zen_train.kernels.common.dither`).
    """
    ids, slot = ids_T.long(), variant_T.long().clamp(min=0)
    out_TK = table_NK[ids].to(torch.float32)
    row_T1 = row_scale_VPN.shape[2] == 1
    for p in range(sign_VPNB.shape[1]):
        step_TK = unpack_signs(sign_VPNB[slot, p, ids], table_NK.shape[1])
        step_TK = step_TK * row_scale_VPN[slot, p, torch.zeros_like(ids) if row_T1 else ids].unsqueeze(1)
        if col_scale_VPK is not None:
            step_TK = step_TK * col_scale_VPK[slot, p]
        out_TK = torch.where((variant_T >= 0).unsqueeze(1), out_TK + step_TK, out_TK)
    return round_folded(out_TK, table_NK.dtype)
