"""The definition of `sign_pack` in plain PyTorch.

Legend: N rows, K columns, B = ceil(K / 8). Differences are taken in float32, sums in float64.
"""

import torch
from torch import Tensor


def pack_bits(positive_NK: Tensor) -> Tensor:
    """Boolean `[..., K]` to uint8 `[..., ceil(K/8)]`: bit i of byte j is column 8j + i; padding bits are zero."""
    k = positive_NK.shape[-1]
    padded = torch.nn.functional.pad(positive_NK, (0, -k % 8)).unflatten(-1, (-1, 8))
    weight = 2 ** torch.arange(8, device=positive_NK.device)
    return (padded * weight).sum(dim=-1).to(torch.uint8)


def sign_pack_reference(w1_NK: Tensor, w0_NK: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed signs uint8 `[N, B]`, sum of |D| and of D^2 (float64 `[N]`), count of exact zeros (int64 `[N]`)."""
    d_NK = w1_NK.to(torch.float32)
    if w0_NK is not None:
        d_NK = d_NK - w0_NK.to(torch.float32)
    wide_NK = d_NK.to(torch.float64)
    return pack_bits(d_NK >= 0), wide_NK.abs().sum(dim=1), wide_NK.square().sum(dim=1), (d_NK == 0).sum(dim=1)
