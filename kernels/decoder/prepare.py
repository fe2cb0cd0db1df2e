"""Checks of the stack and of the batch, done where a mistake enters.

Contract: `prepare_blocks` checks every tensor of the stack once (shapes, dtypes, devices); the result may be used for
every step as long as the tensors keep their storage, and they may be filled in place between steps. `check_call` checks
what changes with each step; on CPU tensors it also checks each value that is used as an index, on a GPU it does not,
since that would stop the device. It copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zen_train.kernels.common import DeltaBank, DirectionBank

from .types import Block, DecoderShape, KvPool, Rotary, TokenBatch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedBlocks:
    """A checked stack. Made by `prepare_blocks`, used in place of the list of blocks."""

    blocks: tuple[Block, ...]
    shape: DecoderShape
    hidden: int
    """D."""
    mlp: int
    """F."""
    slots: int
    """V."""
    vectors: int
    """M."""
    dtype: torch.dtype
    device: torch.device
    only_torch: bool
    """Whether a bank holds low-rank factors or column scales, which the `cpu` backend does not take."""
    plans: list[Any] = field(default_factory=list)
    """The C++ side's view of the stack: none before its first use, then one, as long as this object lives."""


def _refuse(name: str, tensor: Tensor, needed: str) -> ValueError:
    return ValueError(
        f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; needed: {needed}."
    )


def _expect(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device:
        raise _refuse(name, tensor, f"{dtype} of shape {shape} on {device}")


def _check_bank(name: str, bank: DeltaBank, slots: int, size: tuple[int, int], device: torch.device) -> None:
    got = (bank.variants, bank.planes, bank.out_features, bank.in_features)
    if got != (slots, 1, *size) or bank.device != device:
        raise ValueError(
            f"{name} has (slots, planes, N, K) = {got} on {bank.device}; needed: {(slots, 1, *size)} on {device}. "
            "A variant of several planes uses several slots of one plane."
        )


def _check_directions(
    name: str, bank: DirectionBank | None, slots: int, size: tuple[int, int], device: torch.device
) -> None:
    if bank is None:
        return
    got = (bank.variants, bank.out_features, bank.in_features)
    if got != (slots, *size) or bank.device != device:
        raise ValueError(
            f"{name} has (slots, N, K) = {got} on {bank.device}; needed: {(slots, *size)} on {device}."
        )


def check_shape(shape: DecoderShape) -> None:
    """Refuse numbers that no model has.

    Raises:
        ValueError: naming the field.
    """
    for name in ("heads", "kv_heads", "head_dim"):
        if getattr(shape, name) < 1:
            raise ValueError(f"{name} is {getattr(shape, name)}; allowed: 1 or more.")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads is {shape.heads}; needed: a multiple of kv_heads, {shape.kv_heads}.")
    if shape.head_dim % 2:
        raise ValueError(
            f"head_dim is {shape.head_dim}; needed: an even number, the rotation pairs its halves."
        )
    if not 0 < shape.norm_eps < 1:
        raise ValueError(f"norm_eps is {shape.norm_eps}; allowed: above 0 and below 1.")
    if shape.window_tokens is not None and shape.window_tokens < 1:
        raise ValueError(
            f"window_tokens is {shape.window_tokens}; allowed: 1 or more, or None for no window."
        )


def prepare_blocks(blocks: Sequence[Block], *, shape: DecoderShape) -> PreparedBlocks:
    """Check a stack once, so that each step need not.

    Raises:
        ValueError: no block, or the first tensor that does not fit, by block number and name.
    """
    check_shape(shape)
    if not blocks:
        raise ValueError("blocks is empty; needed: at least one block.")
    first = blocks[0]
    if first.qkv_NK.dim() != 2 or first.qkv_NK.dtype not in DTYPES:
        raise _refuse("blocks[0].qkv_NK", first.qkv_NK, "bfloat16, float16 or float32 of two dimensions")
    if first.gate_up_NK.dim() != 2 or first.gate_up_NK.shape[0] % 2:
        raise _refuse("blocks[0].gate_up_NK", first.gate_up_NK, "two dimensions, an even number of rows")
    d, f, dtype, device = (
        first.qkv_NK.shape[1],
        first.gate_up_NK.shape[0] // 2,
        first.qkv_NK.dtype,
        first.qkv_NK.device,
    )
    slots, vectors = first.qkv_bank.variants, first.attention_norm_MD.shape[0]
    heads_e = shape.heads * shape.head_dim
    n_qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    sizes = {"qkv": (n_qkv, d), "o": (d, heads_e), "gate_up": (2 * f, d), "down": (d, f)}
    only_torch = False
    for at, block in enumerate(blocks):
        for name, size in sizes.items():
            _expect(f"blocks[{at}].{name}_NK", getattr(block, f"{name}_NK"), dtype, size, device)
            bank: DeltaBank = getattr(block, f"{name}_bank")
            _check_bank(f"blocks[{at}].{name}_bank", bank, slots, size, device)
            only_torch |= bank.left_VNR is not None or bank.col_scale_VPK is not None
            directions: DirectionBank | None = getattr(block, f"{name}_directions")
            _check_directions(f"blocks[{at}].{name}_directions", directions, slots, size, device)
            if (directions is None) != (first.qkv_directions is None):
                raise ValueError(
                    f"blocks[{at}].{name}_directions is given or None unlike blocks[0].qkv_directions; give it in all "
                    "matrices of all blocks or in none."
                )
        rows = {
            "attention_norm_MD": d,
            "mlp_norm_MD": d,
            "qkv_bias_MN": n_qkv,
            "q_norm_ME": shape.head_dim,
            "k_norm_ME": shape.head_dim,
        }
        for name, width in rows.items():
            vector = getattr(block, name)
            if vector is not None:
                _expect(f"blocks[{at}].{name}", vector, torch.float32, (vectors, width), device)
            if (vector is None) != (getattr(first, name) is None):
                raise ValueError(
                    f"blocks[{at}].{name} is given or None unlike blocks[0]; give it in all or none."
                )
    return PreparedBlocks(
        blocks=tuple(blocks),
        shape=shape,
        hidden=d,
        mlp=f,
        slots=slots,
        vectors=vectors,
        dtype=dtype,
        device=device,
        only_torch=only_torch,
    )


def check_call(
    hidden_TD: Tensor, stack: PreparedBlocks, batch: TokenBatch, kv: KvPool, rotary: Rotary
) -> None:
    """Shapes, dtypes and devices of one step; on the CPU also every index.

    Raises:
        ValueError: naming the tensor and, for a value, its place.
    """
    shape, device = stack.shape, stack.device
    tokens = hidden_TD.shape[0] if hidden_TD.dim() == 2 else -1
    _expect("hidden_TD", hidden_TD, stack.dtype, (tokens, stack.hidden), device)
    pool = kv.kv
    if pool.dim() != 6:
        raise _refuse("kv", pool, "six dimensions, [L, 2, pages, G, C, E]")
    pages, page_tokens = pool.shape[2], pool.shape[4]
    _expect(
        "kv",
        pool,
        stack.dtype,
        (len(stack.blocks), 2, pages, shape.kv_heads, page_tokens, shape.head_dim),
        device,
    )
    if pages < 1 or page_tokens < 1:
        raise _refuse("kv", pool, "at least one page of at least one token")
    table = batch.page_table_SJ
    if table.dim() != 2 or batch.plane_PT.dim() != 2:
        wrong = ("page_table_SJ", table) if table.dim() != 2 else ("plane_PT", batch.plane_PT)
        raise _refuse(*wrong, "int32 of two dimensions")
    _expect("page_table_SJ", table, torch.int32, tuple(table.shape), device)
    _expect("plane_PT", batch.plane_PT, torch.int32, (batch.plane_PT.shape[0], tokens), device)
    for name in ("position_T", "sequence_T", "vector_T", "direction_T"):
        if (index := getattr(batch, name)) is not None:
            _expect(name, index, torch.int32, (tokens,), device)
    if batch.direction_T is not None and stack.blocks[0].qkv_directions is None:
        raise ValueError("direction_T is given, but the blocks have no directions. Leave it out.")
    half = shape.head_dim // 2
    for name, angle in (("cos", rotary.cos), ("sin", rotary.sin)):
        _expect(name, angle, torch.float32, (rotary.cos.shape[0], half), device)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        check_indices(stack, batch, kv, rotary)


def check_indices(stack: PreparedBlocks, batch: TokenBatch, kv: KvPool, rotary: Rotary) -> None:
    """Every value of the batch that is used as an index, and the order of tokens within a sequence.

    Raises:
        ValueError: naming the first wrong value, its place and what is allowed.
    """
    sequences, table_pages = batch.page_table_SJ.shape
    pages, page_tokens = kv.kv.shape[2], kv.page_tokens
    positions = min(table_pages * page_tokens, rotary.cos.shape[0])
    bounds = [
        ("position_T", batch.position_T, 0, positions),
        ("sequence_T", batch.sequence_T, 0, sequences),
        ("vector_T", batch.vector_T, 0, stack.vectors),
        ("plane_PT", batch.plane_PT, -1, stack.slots),
        ("page_table_SJ", batch.page_table_SJ, -1, pages),
    ]
    if batch.direction_T is not None:
        bounds.append(("direction_T", batch.direction_T, -1, stack.slots))
    for name, values, low, end in bounds:
        bad = ((values < low) | (values >= end)).nonzero()
        if bad.shape[0]:
            at = tuple(bad[0].tolist())
            raise ValueError(f"{name}{list(at)} is {int(values[at])}; allowed: {low} to {end - 1}.")
    seen: dict[int, int] = {}
    last = -1
    table = batch.page_table_SJ.tolist()
    for t, (sequence, position) in enumerate(
        zip(batch.sequence_T.tolist(), batch.position_T.tolist(), strict=True)
    ):
        if sequence != last and sequence in seen:
            raise ValueError(
                f"sequence_T[{t}] is {sequence} again after other sequences; tokens of a sequence are neighbours."
            )
        if sequence in seen and position != seen[sequence] + 1:
            raise ValueError(
                f"position_T[{t}] is {position} after {seen[sequence]} of the same sequence; needed: one more."
            )
        seen[sequence], last = position, sequence
    for sequence, position in seen.items():
        for j in range(position // page_tokens + 1):
            if table[sequence][j] < 0:
                raise ValueError(
                    f"page_table_SJ[{sequence}, {j}] is -1, but the sequence has a token at position {position}; "
                    f"needed: a page for each {page_tokens} tokens."
                )
