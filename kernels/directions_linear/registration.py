"""`torch.library` registration of the Triton kernel, so that `torch.compile` and CUDA graphs see an opaque operator."""

import torch
from torch import Tensor


@torch.library.custom_op("zen_train::triton_direction_rows", mutates_args=())
def triton_rows(coefficient: Tensor, right: Tensor, slot: Tensor, in_features: int) -> Tensor:
    """`rows_reference` as an operator."""
    from .triton_launch import launch_rows

    return launch_rows(coefficient, right, slot, in_features)


@triton_rows.register_fake
def _(coefficient: Tensor, right: Tensor, slot: Tensor, in_features: int) -> Tensor:
    return coefficient.new_empty(coefficient.shape[0], in_features)
