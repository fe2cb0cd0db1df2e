# Triton gives parameters their types at launch; Python annotations on them would be wrong.
# ruff: noqa: ANN001, ANN201, SIM108
# mypy: disallow-untyped-defs=false
"""Triton kernel of `bitdelta_embedding`: one program for each token and block of columns."""

import triton
import triton.language as tl

from zen_train.kernels.common.triton_dither import dither


@triton.jit
def embedding_kernel(
    out_ptr,
    ids_ptr,
    variant_ptr,
    table_ptr,
    sign_ptr,
    row_ptr,
    col_ptr,
    N,
    K,
    V,
    table_stride,
    HAS_COL: tl.constexpr,
    PER_MATRIX: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t] = table[id] + delta. An id or a variant out of range gives NaN and reads row 0, slot 0."""
    t = tl.program_id(0)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    ok = k < K
    row = tl.load(ids_ptr + t).to(tl.int64)
    variant = tl.load(variant_ptr + t).to(tl.int64)
    bad = (row < 0) | (row >= N) | (variant < -1) | (variant >= V)
    row = tl.where(bad, 0, row)
    slot = tl.where(bad | (variant < 0), 0, variant)
    row_bytes = (K + 7) // 8
    out = tl.load(table_ptr + row * table_stride + k, mask=ok, other=0.0).to(tl.float32)
    for p in tl.static_range(PLANES):
        plane = slot * PLANES + p
        packed = tl.load(sign_ptr + (plane * N + row) * row_bytes + k // 8, mask=ok, other=0)
        sign = ((packed >> (k % 8).to(tl.uint8)) & 1) != 0
        if PER_MATRIX:
            scale = tl.load(row_ptr + plane)
        else:
            scale = tl.load(row_ptr + plane * N + row)
        step = tl.zeros((BLOCK_K,), dtype=tl.float32) + tl.where(variant >= 0, scale, 0.0)
        if HAS_COL:
            step = step * tl.load(col_ptr + plane * K + k, mask=ok, other=0.0)
        out += tl.where(sign, step, -step)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        out = dither(out, k)
    out = tl.where(bad, float("nan"), out)
    tl.store(out_ptr + t.to(tl.int64) * K + k, out.to(out_ptr.dtype.element_ty), mask=ok)
