# Triton gives parameters their types at launch; Python annotations on them would be wrong.
# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=false
"""A row of an embedding's delta from coded directions: the signs of all right vectors, weighted and added up.

One program for a token and BLOCK_K columns. It reads `[R, BLOCK_K / 8]` bytes of its slot and R coefficients.
"""

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
    out_ptr,
    coefficient_ptr,
    right_ptr,
    slot_ptr,
    V,
    R,
    K,
    B,
    right_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`out[t] = sum_r coefficient[t, r] S[slot(t), r]`; NaN where the slot is out of range, 0 for -1."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    at = tl.program_id(1) * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8)
    slot = tl.load(slot_ptr + token)
    valid = (slot >= 0) & (slot < V)
    right = right_ptr + tl.where(valid, slot, 0).to(tl.int64) * right_stride
    total = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for r0 in range(0, R, BLOCK_R):
        rows = r0 + tl.arange(0, BLOCK_R)
        weight = tl.load(coefficient_ptr + token * R + rows, mask=rows < R, other=0.0)
        packed = tl.load(
            right + rows.to(tl.int64)[:, None] * B + at[None, :],
            mask=(rows < R)[:, None] & (at < B)[None, :],
            other=0,
        )
        bits = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :].to(tl.uint8)) & 1
        sign = tl.reshape(bits, (BLOCK_R, BLOCK_K)) != 0
        total += tl.sum(tl.where(sign, weight[:, None], -weight[:, None]), 0)
    total = tl.where(valid, total, 0.0)
    total = tl.where((slot < -1) | (slot >= V), float("nan"), total)
    tl.store(out_ptr + token * K + columns, total, mask=columns < K)
