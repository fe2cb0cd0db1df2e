# Triton gives parameters their types at launch; Python annotations on them would be wrong.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disallow-untyped-defs=false
"""Triton kernels of `one_bit_code_`: one program for each row.

A row is read twice, the second time from the cache. Partial sums are float32 within a block of columns and float64
across blocks.
"""

import triton
import triton.language as tl

from zen_train.kernels.common.triton_dither import dither


@triton.jit
def _row_sums(latent_row, base_row, K, BLOCK_K: tl.constexpr):
    """Sums of |D| and of D^2 of one row, float64 `[1]`."""
    size = tl.zeros((1,), dtype=tl.float64)
    square = tl.zeros((1,), dtype=tl.float64)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        latent = tl.load(latent_row + k, mask=k < K, other=0.0)
        d = latent - tl.load(base_row + k, mask=k < K, other=0.0).to(tl.float32)
        size += tl.sum(tl.abs(d), 0).to(tl.float64)
        square += tl.sum(d * d, 0).to(tl.float64)
    return size, square


@triton.jit
def change_sums_kernel(
    latent_ptr, base_ptr, size_ptr, square_ptr, K, latent_stride, base_stride, BLOCK_K: tl.constexpr
):
    """Sums of row `program_id(0)`, for one alpha of the matrix."""
    row = tl.program_id(0).to(tl.int64)
    size, square = _row_sums(latent_ptr + row * latent_stride, base_ptr + row * base_stride, K, BLOCK_K)
    tl.store(size_ptr + row + tl.arange(0, 1), size)
    tl.store(square_ptr + row + tl.arange(0, 1), square)


@triton.jit
def one_bit_code_kernel(
    out_ptr,
    latent_ptr,
    base_ptr,
    alpha_ptr,
    K,
    along_weight,
    out_stride,
    latent_stride,
    base_stride,
    PER_ROW: tl.constexpr,
    DITHER: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The code of row `program_id(0)`; alpha from its own sums, or from `alpha_ptr[0]`."""
    row = tl.program_id(0).to(tl.int64)
    latent_row, base_row = latent_ptr + row * latent_stride, base_ptr + row * base_stride
    if PER_ROW:
        size, square = _row_sums(latent_row, base_row, K, BLOCK_K)
        mean = size / K
        kept = tl.where(square > 0, tl.minimum(size * mean / tl.maximum(square, 1e-38), 1.0), 1.0)
        alpha = (mean * (along_weight / (1.0 + (along_weight - 1.0) * kept))).to(tl.float32)
    else:
        alpha = tl.load(alpha_ptr + tl.arange(0, 1))
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        latent = tl.load(latent_row + k, mask=k < K, other=0.0)
        origin = tl.load(base_row + k, mask=k < K, other=0.0).to(tl.float32)
        code = origin + tl.where(latent - origin >= 0, alpha, -alpha)
        if DITHER:
            code = dither(code, k)
        tl.store(out_ptr + row * out_stride + k, code, mask=k < K)
