"""The definition of `bitdelta_linear` in plain PyTorch: runs anywhere, decides what is correct.

Legend: T tokens, K inputs, N outputs, V variants, P sign planes, B = ceil(K / 8), R rank.
Rounding points: products and sums in float32 (float64 for float64 inputs of a test), one rounding to the dtype of x
at the end. `round_weight=True` repeats the one extra rounding of the prefill kernels, which form W0 + alpha S in the
weight's dtype (for bf16 with `dither_bf16`). Variant -1 is the base. It is not fast: it unpacks every variant.
"""

import torch
from torch import Tensor

from zen_train.kernels.common.dither import dither_bf16


def unpack_signs(sign: Tensor, in_features: int) -> Tensor:
    """Packed uint8 `[..., ceil(K/8)]` to float32 +1 / -1 `[..., K]`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=sign.device)
    bits = (sign.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)[..., :in_features].to(torch.float32) * 2 - 1


def dense_delta(
    sign_PNB: Tensor, row_scale_PN: Tensor, col_scale_PK: Tensor | None, in_features: int
) -> Tensor:
    """The delta of one variant as float32 `[N, K]`: the sum over planes of row x column x sign."""
    plane_PNK = unpack_signs(sign_PNB, in_features) * row_scale_PN.unsqueeze(-1)
    if col_scale_PK is not None:
        plane_PNK = plane_PNK * col_scale_PK.unsqueeze(-2)
    return plane_PNK.sum(dim=0)


def delta_term(
    x_TK: Tensor, sign_VPNB: Tensor, row_scale_VPN: Tensor, col_scale_VPK: Tensor | None, variant_T: Tensor
) -> Tensor:
    """The one-bit term alone, float32 `[T, N]`; rows of base tokens are zero."""
    x32_TK = x_TK.to(torch.float32)
    out_TN = x32_TK.new_zeros(x_TK.shape[0], sign_VPNB.shape[2])
    for v in range(sign_VPNB.shape[0]):
        col_PK = None if col_scale_VPK is None else col_scale_VPK[v]
        delta_NK = dense_delta(sign_VPNB[v], row_scale_VPN[v], col_PK, x_TK.shape[1])
        out_TN = torch.where((variant_T == v).unsqueeze(-1), x32_TK @ delta_NK.T, out_TN)
    return out_TN


def round_folded(folded_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """W0 + alpha S in the weight's dtype: dithered to bf16, whose grid is coarser than most deltas; else to nearest."""
    return dither_bf16(folded_NK) if dtype == torch.bfloat16 else folded_NK.to(dtype)


def linear_reference(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    sign_VPNB: Tensor,
    row_scale_VPN: Tensor,
    col_scale_VPK: Tensor | None,
    variant_T: Tensor,
    round_weight: bool = False,
) -> Tensor:
    """Base product plus one-bit term, `[T, N]` in the dtype of x."""
    x32_TK, w32_NK = x_TK.to(torch.float32), weight_NK.to(torch.float32)
    if round_weight:
        out_TN = x32_TK @ w32_NK.T
        for v in range(sign_VPNB.shape[0]):
            col_PK = None if col_scale_VPK is None else col_scale_VPK[v]
            folded_NK = w32_NK + dense_delta(sign_VPNB[v], row_scale_VPN[v], col_PK, x_TK.shape[1])
            folded_NK = round_folded(folded_NK, weight_NK.dtype).to(torch.float32)
            out_TN = torch.where((variant_T == v).unsqueeze(-1), x32_TK @ folded_NK.T, out_TN)
    else:
        out_TN = x32_TK @ w32_NK.T + delta_term(x_TK, sign_VPNB, row_scale_VPN, col_scale_VPK, variant_T)
    if bias_N is not None:
        out_TN = out_TN + bias_N.to(torch.float32)
    return out_TN.to(x_TK.dtype)


def low_rank_term(x_TK: Tensor, left_VNR: Tensor, right_VRK: Tensor, variant_T: Tensor) -> Tensor:
    """`left[v(t)] (right[v(t)] x[t])`, `[T, N]` in the factors' dtype, as two dense products.

    All variants' factors side by side form one `[V R, K]` matrix; each token keeps its own variant's R entries. The
    work grows with V R, which stays small beside K, and nothing depends on which variants occur.
    """
    v, n, r = left_VNR.shape
    inner_TVR = (x_TK.to(right_VRK.dtype) @ right_VRK.flatten(0, 1).T).unflatten(1, (v, r))
    own_TV = variant_T.unsqueeze(1) == torch.arange(v, device=x_TK.device)
    inner_TVR = torch.where(own_TV.unsqueeze(-1), inner_TVR, torch.zeros_like(inner_TVR))
    return inner_TVR.flatten(1) @ left_VNR.permute(0, 2, 1).reshape(v * r, n)
