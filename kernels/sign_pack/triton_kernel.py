# Triton gives parameters their types at launch; Python annotations on them would be wrong.
# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=false
"""Triton kernel of `sign_pack`: one program for each row, one pass over both matrices.

Partial sums are float32 within a block of columns and float64 across blocks.
"""

import triton
import triton.language as tl


@triton.jit
def sign_pack_kernel(
    w1_ptr,
    w0_ptr,
    sign_ptr,
    abs_ptr,
    square_ptr,
    zeros_ptr,
    K,
    w1_stride,
    w0_stride,
    HAS_W0: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Signs, sums and zero count of row `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    row_bytes = (K + 7) // 8
    abs_total = tl.zeros((1,), dtype=tl.float64)
    square_total = tl.zeros((1,), dtype=tl.float64)
    zero_total = tl.zeros((1,), dtype=tl.int64)
    weight = (1 << tl.arange(0, 8)).to(tl.int32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        ok = k < K
        d = tl.load(w1_ptr + row * w1_stride + k, mask=ok, other=0.0).to(tl.float32)
        if HAS_W0:
            d -= tl.load(w0_ptr + row * w0_stride + k, mask=ok, other=0.0).to(tl.float32)
        abs_total += tl.sum(tl.abs(d), 0).to(tl.float64)
        square_total += tl.sum(d * d, 0).to(tl.float64)
        zero_total += tl.sum(((d == 0.0) & ok).to(tl.int32), 0).to(tl.int64)
        bits = tl.reshape(((d >= 0.0) & ok).to(tl.int32), (BLOCK_K // 8, 8))
        byte = k0 // 8 + tl.arange(0, BLOCK_K // 8)
        packed = tl.sum(bits * weight[None, :], 1)
        tl.store(sign_ptr + row * row_bytes + byte, packed.to(tl.uint8), mask=byte < row_bytes)
    one = tl.arange(0, 1)
    tl.store(abs_ptr + row + one, abs_total)
    tl.store(square_ptr + row + one, square_total)
    tl.store(zeros_ptr + row + one, zero_total)
