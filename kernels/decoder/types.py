"""What the decoder operator works on: a stack of Llama-style blocks, a mixed batch of tokens, a paged KV pool.

Legend: L layers, T tokens, S sequences, D hidden size, H query heads, G key/value heads, E head size, F MLP width,
V plane slots of the banks, P planes a variant may have, M rows of the vector tables (row 0 is the base, the others
are variants), J pages a sequence may have, C tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zen_train.kernels.common import DeltaBank, DirectionBank


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """What all blocks of the stack have in common."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    window_tokens: int | None = None
    """Sliding window: a token sees itself and the `window_tokens - 1` before it. None: all."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """One block: `x += o(attention(qkv(norm(x))))`, then `x += down(silu(gate(norm(x))) * up(norm(x)))`.

    Weights have the dtype of the activations; vectors are float32, one row for the base and one for each variant.
    Banks have one plane; a variant with several planes uses several slots (`TokenBatch.plane_PT`).
    """

    attention_norm_MD: Tensor
    qkv_NK: Tensor
    """`[(H + 2G) E, D]`: rows of q, then k, then v."""
    qkv_bias_MN: Tensor | None
    q_norm_ME: Tensor | None
    """RMS norm of each query head before the rotation (Qwen3), or None."""
    k_norm_ME: Tensor | None
    o_NK: Tensor
    """`[D, H E]`."""
    mlp_norm_MD: Tensor
    gate_up_NK: Tensor
    """`[2F, D]`: rows of gate, then up."""
    down_NK: Tensor
    """`[D, F]`."""
    qkv_bank: DeltaBank
    o_bank: DeltaBank
    gate_up_bank: DeltaBank
    down_bank: DeltaBank
    qkv_directions: DirectionBank | None = None
    """Coded directions in the memory of the bank's slots, in all matrices of all blocks or in none."""
    o_directions: DirectionBank | None = None
    gate_up_directions: DirectionBank | None = None
    down_directions: DirectionBank | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Tokens of several sequences in one forward. Those of a sequence are neighbours, in ascending positions.

    Keys and values of all of them are written to their pages before any of them attends.
    """

    position_T: Tensor
    """int32; place in the sequence, 0 first."""
    sequence_T: Tensor
    """int32; row of the page table."""
    plane_PT: Tensor
    """int32 `[P, T]`; bank slot of each plane of the token's variant, -1: none (the base: all -1)."""
    vector_T: Tensor
    """int32; row of the vector tables, 0 for the base."""
    page_table_SJ: Tensor
    """int32; page numbers in order, -1 beyond the last."""
    direction_T: Tensor | None = None
    """int32; slot whose directions are the token's, -1: none (then its planes count). None: no token has any."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KvPool:
    """Keys and values of all sequences. Token at position p of a sequence lies in its page p // C at place p % C."""

    kv: Tensor
    """`[L, 2, pages, G, C, E]`; index 1 is 0 for keys (rotated), 1 for values; dtype of the activations."""

    @property
    def page_tokens(self) -> int:
        """C."""
        return int(self.kv.shape[4])


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    """Rotation tables, scaling included: float32 `[positions, E/2]` each. Halves are rotated as in transformers'
    Llama.
    """

    cos: Tensor
    sin: Tensor
