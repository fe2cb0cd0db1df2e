"""The definition of `directions_linear` in plain PyTorch: runs anywhere, decides what is correct. It is not fast."""

import torch
from torch import Tensor

from zen_train.kernels.bitdelta_linear.reference import unpack_signs
from zen_train.kernels.common.direction_bank import DirectionBank


def fold(stacked_TR: Tensor, bank: DirectionBank, slot_T: Tensor) -> Tensor:
    """The inputs of the left product from the outputs of the right one, `[T, R]` in its dtype; 0 for slot -1.

    It is its own transpose: applied to a row of left signs it gives the coefficients of the right ones.
    """
    slot = slot_T.long().clamp(min=0, max=bank.variants - 1)
    home_TR = bank.home_VR[slot].long()
    weight_TR = torch.exp2(-bank.plane_VR[slot].to(stacked_TR.dtype))
    folded_TR = torch.zeros_like(stacked_TR).scatter_add_(1, home_TR, stacked_TR * weight_TR)
    scale_TR = bank.scale_VR[slot].to(stacked_TR.dtype).gather(1, home_TR)
    inner_TR = folded_TR.gather(1, home_TR) * weight_TR * scale_TR
    return torch.where((slot_T >= 0).unsqueeze(1), inner_TR, 0.0)


def dense_directions(bank: DirectionBank, slot: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The delta of one slot, `[N, K]`."""
    right_RK = unpack_signs(bank.right_VRB[slot], bank.in_features).to(dtype)
    parts = []
    for left, span in zip(bank.left, bank.spans(), strict=True):
        left_NR = torch.zeros(left.shape[1], bank.stacked, dtype=dtype, device=bank.device)
        left_NR[:, span] = unpack_signs(left[slot], span.stop - span.start).to(dtype)
        index = torch.full((left.shape[1],), slot, device=bank.device)
        parts.append(fold(left_NR, bank, index) @ right_RK)
    return torch.cat(parts)


def directions_reference(x_TK: Tensor, bank: DirectionBank, slot_T: Tensor) -> Tensor:
    """The term of each token, float32 `[T, N]`; rows of slot -1 are zero."""
    x32_TK = x_TK.to(torch.float32)
    out_TN = x32_TK.new_zeros(x_TK.shape[0], bank.out_features)
    for slot in slot_T.unique().tolist():
        if slot >= 0:
            term_TN = x32_TK @ dense_directions(bank, slot).T
            out_TN = torch.where((slot_T == slot).unsqueeze(-1), term_TN, out_TN)
    return out_TN


def rows_reference(coefficient_TR: Tensor, bank: DirectionBank, slot_T: Tensor) -> Tensor:
    """`sum_r coefficient[t, r] S[slot(t), r]`, float32 `[T, K]`: rows of a table, from their folded left signs."""
    index = slot_T.long().clamp(min=0)
    terms = [
        coefficient_R @ unpack_signs(bank.right_VRB[slot], bank.in_features)
        for coefficient_R, slot in zip(coefficient_TR, index.tolist(), strict=True)
    ]
    return torch.stack(terms) if terms else coefficient_TR.new_zeros(0, bank.in_features)
