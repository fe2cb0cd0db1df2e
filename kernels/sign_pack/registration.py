"""`torch.library` registration of operator 2 (the C++ one registers itself)."""

import torch
from torch import Tensor

from .reference import sign_pack_reference

Packed = tuple[Tensor, Tensor, Tensor, Tensor]


def _empty(w1: Tensor) -> Packed:
    n, k = w1.shape
    return (
        w1.new_empty(n, (k + 7) // 8, dtype=torch.uint8),
        w1.new_empty(n, dtype=torch.float64),
        w1.new_empty(n, dtype=torch.float64),
        w1.new_empty(n, dtype=torch.int64),
    )


@torch.library.custom_op("zen_train::reference_sign_pack", mutates_args=())
def reference_sign_pack(w1: Tensor, w0: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sign_pack_reference` as an operator."""
    return sign_pack_reference(w1, w0)


@torch.library.custom_op("zen_train::triton_sign_pack", mutates_args=())
def triton_sign_pack(w1: Tensor, w0: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Triton kernel as an operator."""
    from .triton_launch import launch_sign_pack

    out = _empty(w1)
    launch_sign_pack(w1, w0, *out)
    return out


@reference_sign_pack.register_fake
@triton_sign_pack.register_fake
def _(w1: Tensor, w0: Tensor | None) -> Packed:
    return _empty(w1)
