"""The C++ operator behind `decoder_stack`: one call for all blocks, on a plan that is checked once.

Contract: every value used as an index is checked in C++ in every call. The plan keeps the tensors of the stack
alive and reads them in place, so a slot or a vector row may be refilled between calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zen_train.kernels.common import DirectionBank
from zen_train.kernels.cpu import path_number

from .prepare import PreparedBlocks
from .types import DecoderShape, KvPool, Rotary, TokenBatch

ALL_TOKENS = 1 << 40
"""Stands for no window."""


def layer_tensors(stack: PreparedBlocks) -> list[Tensor | None]:
    """The tensors of all layers in the operator's order, 45 for each."""
    flat: list[Tensor | None] = []
    for block in stack.blocks:
        flat += [
            block.attention_norm_MD,
            block.qkv_NK,
            block.qkv_bias_MN,
            block.q_norm_ME,
            block.k_norm_ME,
            block.o_NK,
            block.mlp_norm_MD,
            block.gate_up_NK,
            block.down_NK,
        ]
        for bank in (block.qkv_bank, block.o_bank, block.gate_up_bank, block.down_bank):
            flat += [bank.sign_VPNB, bank.row_scale_VPN]
        for directions in (
            block.qkv_directions,
            block.o_directions,
            block.gate_up_directions,
            block.down_directions,
        ):
            flat += direction_tensors(directions)
    return flat


def direction_tensors(directions: DirectionBank | None) -> list[Tensor | None]:
    """Seven, of a matrix; None without directions."""
    return directions.tensors() if directions is not None else [None] * 7


def shape_numbers(shape: DecoderShape) -> tuple[int, int, int, int, float]:
    """The shape as the operator takes it."""
    window = ALL_TOKENS if shape.window_tokens is None else shape.window_tokens
    return shape.heads, shape.kv_heads, shape.head_dim, window, shape.norm_eps


def plan_of(stack: PreparedBlocks) -> Any:
    """The stack's plan, made at the first call.

    Raises:
        ValueError: a tensor that is not contiguous.
    """
    if not stack.plans:
        stack.plans.append(
            torch.classes.zen_train.DecoderPlan(layer_tensors(stack), *shape_numbers(stack.shape))
        )
    return stack.plans[0]


def cpu_stack(
    hidden_TD: Tensor, stack: PreparedBlocks, batch: TokenBatch, kv: KvPool, rotary: Rotary
) -> Tensor:
    """All blocks in one call. hidden_TD is overwritten and returned (a copy, where it is not contiguous).

    Raises:
        ValueError: a shape, dtype or index that does not fit; the pool is unchanged then.
    """
    hidden_TD = hidden_TD.contiguous()
    torch.ops.zen_train.cpu_decoder_step_(
        plan_of(stack),
        hidden_TD,
        kv.kv,
        batch.position_T,
        batch.sequence_T,
        batch.plane_PT,
        batch.direction_T,
        batch.vector_T,
        batch.page_table_SJ,
        rotary.cos,
        rotary.sin,
        path_number(),
    )
    return hidden_TD
