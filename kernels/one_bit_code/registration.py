"""`torch.library` registration of `one_bit_code_` (the C++ one registers itself)."""

import torch
from torch import Tensor

from .reference import one_bit_code_reference


@torch.library.custom_op("zen_train::reference_one_bit_code_", mutates_args=("out",))
def reference_one_bit_code_(
    out: Tensor, latent: Tensor, base: Tensor, per_row: bool, along_weight: float, dither: bool
) -> None:
    """`one_bit_code_reference` as an operator."""
    out.copy_(one_bit_code_reference(latent, base, per_row=per_row, along_weight=along_weight, dither=dither))


@torch.library.custom_op("zen_train::triton_one_bit_code_", mutates_args=("out",))
def triton_one_bit_code_(
    out: Tensor, latent: Tensor, base: Tensor, per_row: bool, along_weight: float, dither: bool
) -> None:
    """The Triton kernels as an operator."""
    from .triton_launch import launch_one_bit_code

    launch_one_bit_code(out, latent, base, per_row, along_weight, dither)


@reference_one_bit_code_.register_fake
@triton_one_bit_code_.register_fake
def _(*_: object) -> None:
    return None
