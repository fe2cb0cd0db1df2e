"""The definition of `decoder_stack` in plain PyTorch: float32 throughout, one sequence and one token after another.

Legend as in types.py. It decides what is correct and is slow. Rounding: keys and values are rounded to the pool's dtype
when they are written, and the result to the dtype of hidden; nothing else is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zen_train.kernels.bitdelta_linear.reference import dense_delta, low_rank_term
from zen_train.kernels.common import DeltaBank, DirectionBank
from zen_train.kernels.directions_linear.reference import dense_directions

from .types import Block, DecoderShape, KvPool, Rotary, TokenBatch


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in the dtype of x (float32 or wider)."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rotate_reference(x_THE: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Rotary embedding of halves: `(a cos - b sin, b cos + a sin)`, F = E/2."""
    a, b = x_THE.chunk(2, dim=-1)
    cos, sin = cos_TF.unsqueeze(1), sin_TF.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def linear_planes(
    x_TK: Tensor,
    weight_NK: Tensor,
    bank: DeltaBank,
    plane_PT: Tensor,
    directions: DirectionBank | None = None,
    direction_T: Tensor | None = None,
) -> Tensor:
    """`x W^T` plus the one-bit term of each of the token's slots and that of its directions, in the dtype of x."""
    out_TN = x_TK @ weight_NK.to(x_TK.dtype).T
    for slot in plane_PT.unique().tolist():
        if slot < 0:
            continue
        col = None if bank.col_scale_VPK is None else bank.col_scale_VPK[slot]
        delta_NK = dense_delta(bank.sign_VPNB[slot], bank.row_scale_VPN[slot], col, bank.in_features)
        term_TN = x_TK @ delta_NK.to(x_TK.dtype).T
        uses_T = (plane_PT == slot).sum(dim=0).to(x_TK.dtype)
        out_TN = out_TN + term_TN * uses_T.unsqueeze(1)
    if bank.left_VNR is not None and bank.right_VRK is not None:
        for plane_T in plane_PT:
            out_TN = out_TN + low_rank_term(x_TK, bank.left_VNR, bank.right_VRK, plane_T).to(x_TK.dtype)
    if directions is not None and direction_T is not None:
        for slot in direction_T[direction_T >= 0].unique().tolist():
            term_TN = x_TK @ dense_directions(directions, slot, x_TK.dtype).T
            out_TN = out_TN + term_TN * (direction_T == slot).to(x_TK.dtype).unsqueeze(1)
    return out_TN


def attention_reference(
    q_THE: Tensor, layer: int, shape: DecoderShape, batch: TokenBatch, kv: KvPool
) -> Tensor:
    """Causal attention of each token over its sequence's pages, `[T, H E]`."""
    rows = []
    for t in range(q_THE.shape[0]):
        position, sequence = int(batch.position_T[t]), int(batch.sequence_T[t])
        first = 0 if shape.window_tokens is None else max(0, position - shape.window_tokens + 1)
        seen = torch.arange(first, position + 1, device=q_THE.device)
        page = batch.page_table_SJ[sequence].long()[seen // kv.page_tokens]
        place = seen % kv.page_tokens
        keys_SGE, values_SGE = (kv.kv[layer, part][page, :, place].to(q_THE.dtype) for part in (0, 1))
        repeat = shape.heads // shape.kv_heads
        keys_SHE = keys_SGE.repeat_interleave(repeat, dim=1)
        values_SHE = values_SGE.repeat_interleave(repeat, dim=1)
        score_HS = torch.einsum("he,she->hs", q_THE[t], keys_SHE) * shape.head_dim**-0.5
        rows.append(torch.einsum("hs,she->he", score_HS.softmax(dim=-1), values_SHE).flatten())
    return torch.stack(rows) if rows else q_THE.flatten(1)


def write_reference(k_TGE: Tensor, v_TGE: Tensor, layer: int, batch: TokenBatch, kv: KvPool) -> None:
    """Store keys and values at each token's place."""
    position_T = batch.position_T.long()
    page_T = batch.page_table_SJ.long()[batch.sequence_T.long(), position_T // kv.page_tokens]
    place_T = position_T % kv.page_tokens
    kv.kv[layer, 0][page_T, :, place_T] = k_TGE.to(kv.kv.dtype)
    kv.kv[layer, 1][page_T, :, place_T] = v_TGE.to(kv.kv.dtype)


def block_reference(
    x_TD: Tensor, layer: int, block: Block, shape: DecoderShape, batch: TokenBatch, kv: KvPool, rotary: Rotary
) -> Tensor:
    """One block."""
    wide, vector_T = x_TD.dtype, batch.vector_T.long()
    tokens, h, g, e = x_TD.shape[0], shape.heads, shape.kv_heads, shape.head_dim

    def table(vectors: Tensor) -> Tensor:
        return vectors[vector_T].to(wide)

    def linear(x_TK: Tensor, weight_NK: Tensor, bank: DeltaBank, directions: DirectionBank | None) -> Tensor:
        return linear_planes(x_TK, weight_NK, bank, batch.plane_PT, directions, batch.direction_T)

    normed = norm_reference(x_TD, table(block.attention_norm_MD), shape.norm_eps)
    qkv = linear(normed, block.qkv_NK, block.qkv_bank, block.qkv_directions)
    if block.qkv_bias_MN is not None:
        qkv = qkv + table(block.qkv_bias_MN)
    q, k, v = (
        part.reshape(tokens, heads, e)
        for part, heads in zip(qkv.split([h * e, g * e, g * e], dim=1), (h, g, g), strict=True)
    )
    if block.q_norm_ME is not None:
        q = norm_reference(q, table(block.q_norm_ME).unsqueeze(1), shape.norm_eps)
    if block.k_norm_ME is not None:
        k = norm_reference(k, table(block.k_norm_ME).unsqueeze(1), shape.norm_eps)
    cos, sin = (angle[batch.position_T.long()].to(wide) for angle in (rotary.cos, rotary.sin))
    q, k = rotate_reference(q, cos, sin), rotate_reference(k, cos, sin)
    write_reference(k, v, layer, batch, kv)
    attended = attention_reference(q, layer, shape, batch, kv)
    x_TD = x_TD + linear(attended, block.o_NK, block.o_bank, block.o_directions)
    normed = norm_reference(x_TD, table(block.mlp_norm_MD), shape.norm_eps)
    gate, up = linear(normed, block.gate_up_NK, block.gate_up_bank, block.gate_up_directions).chunk(2, dim=1)
    hidden = torch.nn.functional.silu(gate) * up
    return x_TD + linear(hidden, block.down_NK, block.down_bank, block.down_directions)


def stack_reference(
    hidden_TD: Tensor,
    blocks: tuple[Block, ...],
    shape: DecoderShape,
    batch: TokenBatch,
    kv: KvPool,
    rotary: Rotary,
    wide: torch.dtype = torch.float32,
) -> Tensor:
    """All blocks, `[T, D]` in the dtype of hidden. `wide` is the dtype of the arithmetic (float64 in tests)."""
    x_TD = hidden_TD.to(wide)
    for layer, block in enumerate(blocks):
        x_TD = block_reference(x_TD, layer, block, shape, batch, kv, rotary)
    return x_TD.to(hidden_TD.dtype)
