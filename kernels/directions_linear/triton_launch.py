"""Launch of the Triton kernel for rows of an embedding's delta, without a host synchronisation."""

import torch
import triton
from torch import Tensor

from .triton_kernel import rows_kernel

BLOCK_R, BLOCK_K, WARPS = 32, 256, 4


def launch_rows(coefficient_TR: Tensor, right_VRB: Tensor, slot_T: Tensor, in_features: int) -> Tensor:
    """`[T, K]` float32. The slots of `right_VRB` may lie apart."""
    tokens, stacked = coefficient_TR.shape
    out_TK = torch.empty(tokens, in_features, dtype=torch.float32, device=coefficient_TR.device)
    if tokens:
        rows_kernel[(tokens, triton.cdiv(in_features, BLOCK_K))](
            out_TK,
            coefficient_TR.contiguous(),
            right_VRB,
            slot_T.contiguous(),
            right_VRB.shape[0],
            stacked,
            in_features,
            right_VRB.shape[2],
            right_VRB.stride(0),
            BLOCK_R=BLOCK_R,
            BLOCK_K=BLOCK_K,
            num_warps=WARPS,
        )
    return out_TK
