"""`decoder_stack` composed of `bitdelta_linear` and torch operators: any device, low-rank parts, CUDA graphs.

Contract: shapes depend on the arguments' shapes only and nothing waits for the device, so a call can be captured in
a CUDA graph. An index out of range is clamped on a GPU (nothing is read out of bounds). Attention reads all J pages
of the table for each token: pass a table as narrow as the longest sequence needs. `one_bit` is the backend of
`bitdelta_linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zen_train.kernels.bitdelta_linear import bitdelta_add_, bitdelta_linear
from zen_train.kernels.common import DeltaBank, DirectionBank
from zen_train.kernels.directions_linear import directions_add_

from .types import Block, DecoderShape, KvPool, Rotary, TokenBatch

GATHER_BYTES = 256 << 20
"""Keys and values gathered at a time; longer batches attend in several parts."""


def table_rows(table_MD: Tensor, vector_T: Tensor) -> Tensor:
    """Each token's row, `[T, D]`."""
    return table_MD.index_select(0, vector_T.clamp(0, table_MD.shape[0] - 1))


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension in float32, one rounding to the dtype of x."""
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bank: DeltaBank,
    plane_PT: Tensor,
    *,
    directions: DirectionBank | None = None,
    direction_T: Tensor | None = None,
    one_bit: str = "auto",
) -> Tensor:
    """Base product plus the term of each plane and that of the directions, `[T, N]`."""
    if plane_PT.shape[0] == 0:
        out_TN = torch.nn.functional.linear(x_TK, weight_NK)
    else:
        out_TN = bitdelta_linear(x_TK, weight_NK, bank, plane_PT[0], backend=one_bit)
    for plane_T in plane_PT[1:]:
        bitdelta_add_(out_TN, x_TK, bank, plane_T, backend=one_bit)
    if directions is not None and direction_T is not None:
        directions_add_(out_TN, x_TK, directions, direction_T, backend=one_bit)
    return out_TN


def _rotate(x_THE: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    a, b = x_THE.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos_TF.unsqueeze(1), sin_TF.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_THE.dtype)


class _Places:
    """Where the tokens of a batch write and what they may see: the same for all layers."""

    def __init__(self, shape: DecoderShape, batch: TokenBatch, kv: KvPool) -> None:
        pages, page_tokens = kv.kv.shape[2], kv.page_tokens
        sequences, table_pages = batch.page_table_SJ.shape
        position_T = batch.position_T.long().clamp(0, table_pages * page_tokens - 1)
        table_TJ = batch.page_table_SJ.long().clamp(0, pages - 1)[
            batch.sequence_T.long().clamp(0, sequences - 1)
        ]
        self.table_TJ = table_TJ
        self.page_T = table_TJ.gather(1, (position_T // page_tokens).unsqueeze(1)).squeeze(1)
        self.place_T = position_T % page_tokens
        seen = torch.arange(table_pages * page_tokens, device=position_T.device)
        self.visible_TS = seen <= position_T.unsqueeze(1)
        if shape.window_tokens is not None:
            self.visible_TS &= seen > position_T.unsqueeze(1) - shape.window_tokens


def _attend(q_THE: Tensor, layer_kv: Tensor, places: _Places) -> Tensor:
    """`[T, H E]`. Places that a token does not see are zeroed: they may hold anything, a NaN too."""
    tokens, heads, e = q_THE.shape
    g, c = layer_kv.shape[2], layer_kv.shape[3]
    per_token = 2 * places.table_TJ.shape[1] * g * c * e * layer_kv.element_size()
    step = max(1, GATHER_BYTES // per_token)
    parts = []
    for t0 in range(0, tokens, step):
        some = slice(t0, min(t0 + step, tokens))
        hidden_TS = ~places.visible_TS[some, None, :, None]
        gathered = layer_kv[:, places.table_TJ[some]]  # [2, T, J, G, C, E]
        keys, values = (
            part.transpose(1, 2).flatten(2, 3).masked_fill(hidden_TS, 0.0) for part in gathered.unbind(0)
        )
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                q_THE[some].unsqueeze(2),
                keys,
                values,
                attn_mask=places.visible_TS[some, None, None, :],
                enable_gqa=True,
            ).squeeze(2)
        )
    return (torch.cat(parts) if parts else q_THE).reshape(tokens, heads * e)


def _block(
    x_TD: Tensor,
    block: Block,
    shape: DecoderShape,
    batch: TokenBatch,
    layer_kv: Tensor,
    places: _Places,
    angles: tuple[Tensor, Tensor],
    one_bit: str,
) -> Tensor:
    tokens, h, g, e = x_TD.shape[0], shape.heads, shape.kv_heads, shape.head_dim
    vector = batch.vector_T

    def product(x_TK: Tensor, weight_NK: Tensor, bank: DeltaBank, directions: DirectionBank | None) -> Tensor:
        return linear(
            x_TK,
            weight_NK,
            bank,
            batch.plane_PT,
            directions=directions,
            direction_T=batch.direction_T,
            one_bit=one_bit,
        )

    normed = norm_rows(x_TD, table_rows(block.attention_norm_MD, vector), shape.norm_eps)
    qkv = product(normed, block.qkv_NK, block.qkv_bank, block.qkv_directions)
    if block.qkv_bias_MN is not None:
        qkv = (qkv + table_rows(block.qkv_bias_MN, vector)).to(x_TD.dtype)
    q, k, v = (part.reshape(tokens, -1, e) for part in qkv.split([h * e, g * e, g * e], dim=1))
    if block.q_norm_ME is not None:
        q = norm_rows(q, table_rows(block.q_norm_ME, vector).unsqueeze(1), shape.norm_eps)
    if block.k_norm_ME is not None:
        k = norm_rows(k, table_rows(block.k_norm_ME, vector).unsqueeze(1), shape.norm_eps)
    q, k = _rotate(q, *angles), _rotate(k, *angles)
    layer_kv[0][places.page_T, :, places.place_T] = k
    layer_kv[1][places.page_T, :, places.place_T] = v
    attended = _attend(q, layer_kv, places)
    x_TD = x_TD + product(attended, block.o_NK, block.o_bank, block.o_directions)
    normed = norm_rows(x_TD, table_rows(block.mlp_norm_MD, vector), shape.norm_eps)
    gate, up = product(normed, block.gate_up_NK, block.gate_up_bank, block.gate_up_directions).chunk(2, dim=1)
    hidden = torch.nn.functional.silu(gate) * up
    return x_TD + product(hidden, block.down_NK, block.down_bank, block.down_directions)


def torch_stack(
    hidden_TD: Tensor,
    blocks: tuple[Block, ...],
    shape: DecoderShape,
    batch: TokenBatch,
    kv: KvPool,
    rotary: Rotary,
    *,
    one_bit: str = "auto",
) -> Tensor:
    """All blocks, `[T, D]` in the dtype of hidden; every operator rounds to that dtype."""
    if hidden_TD.shape[0] == 0:
        return hidden_TD
    places = _Places(shape, batch, kv)
    position_T = batch.position_T.clamp(0, rotary.cos.shape[0] - 1)
    angles = (rotary.cos.index_select(0, position_T), rotary.sin.index_select(0, position_T))
    for block, layer_kv in zip(blocks, kv.kv, strict=True):
        hidden_TD = _block(hidden_TD, block, shape, batch, layer_kv, places, angles, one_bit)
    return hidden_TD
