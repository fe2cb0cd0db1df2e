"""`torch.library` registration of operator 3 (the C++ one registers itself)."""

import torch
from torch import Tensor

from .reference import embedding_reference


@torch.library.custom_op("zen_train::reference_embedding", mutates_args=())
def reference_embedding(
    ids: Tensor, variant: Tensor, table: Tensor, sign: Tensor, row_scale: Tensor, col_scale: Tensor | None
) -> Tensor:
    """`embedding_reference` as an operator."""
    return embedding_reference(ids, variant, table, sign, row_scale, col_scale)


@torch.library.custom_op("zen_train::triton_embedding", mutates_args=())
def triton_embedding(
    ids: Tensor, variant: Tensor, table: Tensor, sign: Tensor, row_scale: Tensor, col_scale: Tensor | None
) -> Tensor:
    """The Triton kernel as an operator."""
    from .triton_launch import launch_embedding

    out = table.new_empty(ids.shape[0], table.shape[1])
    launch_embedding(out, ids, variant, table, sign, row_scale, col_scale)
    return out


@reference_embedding.register_fake
@triton_embedding.register_fake
def _(ids: Tensor, variant: Tensor, table: Tensor, *_: object) -> Tensor:
    return table.new_empty(ids.shape[0], table.shape[1])
