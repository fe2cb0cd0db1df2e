# Triton gives parameters their types at launch; Python annotations on them would be wrong.
# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=false
"""Triton kernels of operator 1: `decode_kernel` for few tokens, `prefill_kernel` for many.

Legend: T tokens, K inputs, N outputs, V variants, P sign planes, B = ceil(K / 8) bytes of a sign row.
Both work on W @ x^T: weights are the M side of the tensor-core instruction, so few tokens waste nothing. Tokens come
sorted by variant: `order_ptr` holds token numbers, `start_ptr` the first place of each of V + 2 groups (base, the V
variants, indices out of range). Rows of the last group become NaN. Nothing here looks at values on the host. B is an
argument, not computed from K, so that its divisibility by 16 is known and sign loads are wide. Slots lie `sign_stride`
bytes apart.

`decode_kernel` reads each W tile once for all tokens and, for each variant that occurs, its sign tile once; only the
variant's own columns of x are fetched, so one accumulator serves all variants and the scale is applied once at the end.
Its loops over K hold no branch, so that they are software-pipelined.
`prefill_kernel` gives each block of tokens of one variant a tile of W + alpha S formed in registers: one product.
"""

import triton
import triton.language as tl

from zen_train.kernels.common.triton_dither import dither


@triton.jit
def expand_signs(sign_ptr, rows, row_ok, k0, B, BLOCK_K: tl.constexpr):
    """Packed bytes of `rows` from column k0 to booleans [rows, BLOCK_K]; each byte is loaded once."""
    cols = k0 // 8 + tl.arange(0, BLOCK_K // 8)
    packed = tl.load(
        sign_ptr + rows[:, None] * B + cols[None, :],
        mask=row_ok[:, None] & (cols[None, :] < B),
        other=0,
    )
    bits = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :].to(tl.uint8)) & 1
    return tl.reshape(bits, (rows.shape[0], BLOCK_K)) != 0


@triton.jit
def multiply(a, b, acc, INTERPRETED: tl.constexpr):
    """a @ b + acc. The interpreter multiplies the bits of bfloat16 as integers, so it gets float32 operands."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def decode_kernel(
    y_ptr,
    x_ptr,
    w_ptr,
    bias_ptr,
    sign_ptr,
    row_ptr,
    col_ptr,
    order_ptr,
    start_ptr,
    group_ptr,
    T,
    N,
    K,
    B,
    V,
    sign_stride,
    y_stride,
    x_stride,
    w_stride,
    HAS_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_COL: tl.constexpr,
    PER_MATRIX: tl.constexpr,
    PLANES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """All tokens (T <= BLOCK_T) for BLOCK_N outputs. Without W the result is added onto y."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < N
    place = tl.arange(0, BLOCK_T)
    live = place < T
    token = tl.load(order_ptr + place, mask=live, other=0)
    group = tl.load(group_ptr + place, mask=live, other=0)  # 0 base, 1 + v, V + 1 out of range
    slot = tl.where((group >= 1) & (group <= V), group - 1, 0).to(tl.int64)
    plane_bytes = tl.cast(N, tl.int64) * B
    wide_rows = rows.to(tl.int64)
    wide_token = token.to(tl.int64)
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    if HAS_W:
        for k0 in range(0, K, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(
                x_ptr + wide_token[None, :] * x_stride + k[:, None],
                mask=live[None, :] & (k[:, None] < K),
                other=0.0,
            )
            w = tl.load(
                w_ptr + wide_rows[:, None] * w_stride + k[None, :],
                mask=row_ok[:, None] & (k[None, :] < K),
                other=0.0,
            )
            total = multiply(w, x, total, INTERPRETED)
    for p in tl.static_range(PLANES):
        sign_acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for v in range(V):
            lo = tl.load(start_ptr + v + 1)
            hi = tl.load(start_ptr + v + 2)
            if hi > lo:
                mine = (place >= lo) & (place < hi)  # only these columns of x are fetched
                plane_ptr = sign_ptr + v * tl.cast(sign_stride, tl.int64) + p * plane_bytes
                for k0 in range(0, K, BLOCK_K):
                    k = k0 + tl.arange(0, BLOCK_K)
                    x = tl.load(
                        x_ptr + wide_token[None, :] * x_stride + k[:, None],
                        mask=mine[None, :] & (k[:, None] < K),
                        other=0.0,
                    )
                    if HAS_COL:
                        col = tl.load(col_ptr + (v * PLANES + p) * K + k, mask=k < K, other=0.0)
                        x = (x.to(tl.float32) * col[:, None]).to(x.dtype)
                    sign = expand_signs(plane_ptr, wide_rows, row_ok, k0, B, BLOCK_K)
                    one = tl.where(sign, 1.0, -1.0).to(x.dtype)
                    sign_acc = multiply(one, x, sign_acc, INTERPRETED)
        if PER_MATRIX:
            scale = tl.load(row_ptr + slot * PLANES + p)[None, :]
        else:
            scale = tl.load(
                row_ptr + (slot[None, :] * PLANES + p) * N + wide_rows[:, None],
                mask=row_ok[:, None],
                other=0.0,
            )
        total += tl.where((group >= 1)[None, :], sign_acc * scale, 0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    total = tl.where((group == V + 1)[None, :], float("nan"), total)
    out = tl.trans(total)
    at = y_ptr + wide_token[:, None] * y_stride + rows[None, :]
    ok = live[:, None] & row_ok[None, :]
    if not HAS_W:
        out += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    tl.store(at, out.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def prefill_kernel(
    y_ptr,
    x_ptr,
    w_ptr,
    bias_ptr,
    sign_ptr,
    row_ptr,
    col_ptr,
    order_ptr,
    start_ptr,
    T,
    N,
    K,
    B,
    V,
    sign_stride,
    y_stride,
    x_stride,
    w_stride,
    HAS_W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_COL: tl.constexpr,
    PER_MATRIX: tl.constexpr,
    PLANES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    GROUPS: tl.constexpr,
    T_CLASS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_T tokens of one group for BLOCK_N outputs. GROUPS is V + 2 rounded up to a power of two;
    T_CLASS only keys the tuning."""
    # Which group does this block of tokens belong to? Group g takes cdiv(its tokens, BLOCK_T) blocks.
    g = tl.arange(0, GROUPS)
    first = tl.load(start_ptr + g, mask=g < V + 2, other=0)
    last = tl.load(start_ptr + g + 1, mask=g < V + 2, other=0)
    blocks = (last - first + BLOCK_T - 1) // BLOCK_T
    ends = tl.cumsum(blocks, 0)
    pid = tl.program_id(0)
    group = tl.sum((ends <= pid).to(tl.int32), 0)
    if group >= V + 2:
        return
    before = tl.sum(tl.where(g < group, blocks, 0), 0)
    lo = tl.load(start_ptr + group) + (pid - before) * BLOCK_T
    hi = tl.load(start_ptr + group + 1)
    has_delta = (group >= 1) & (group <= V)
    if not HAS_W and group == 0:
        return
    slot = tl.where(has_delta, group - 1, 0).to(tl.int64)
    sign_ptr += slot * sign_stride

    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < N
    wide_rows = rows.to(tl.int64)
    place = lo + tl.arange(0, BLOCK_T)
    live = place < hi
    token = tl.load(order_ptr + place, mask=live, other=0).to(tl.int64)
    acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + token[None, :] * x_stride + k[:, None], mask=live[None, :] & (k[:, None] < K), other=0.0
        )
        if HAS_W:
            w = tl.load(
                w_ptr + wide_rows[:, None] * w_stride + k[None, :],
                mask=row_ok[:, None] & (k[None, :] < K),
                other=0.0,
            ).to(tl.float32)
        else:
            w = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        for p in tl.static_range(PLANES):
            if PER_MATRIX:
                scale = tl.zeros((BLOCK_N,), dtype=tl.float32) + tl.load(row_ptr + slot * PLANES + p)
            else:
                scale = tl.load(row_ptr + (slot * PLANES + p) * N + wide_rows, mask=row_ok, other=0.0)
            step = tl.where(has_delta, scale, 0.0)[:, None]
            if HAS_COL:
                step = step * tl.load(col_ptr + (slot * PLANES + p) * K + k, mask=k < K, other=0.0)[None, :]
            plane_ptr = sign_ptr + p * tl.cast(N, tl.int64) * B
            sign = expand_signs(plane_ptr, wide_rows, row_ok, k0, B, BLOCK_K)
            w += tl.where(sign, step, -step)
        if x.dtype == tl.bfloat16:
            w = dither(w, k[None, :])
        acc = multiply(w.to(x.dtype), x, acc, INTERPRETED)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=row_ok, other=0.0).to(tl.float32)[:, None]
    acc = tl.where(group == V + 1, float("nan"), acc)
    out = tl.trans(acc)
    at = y_ptr + token[:, None] * y_stride + rows[None, :]
    ok = live[:, None] & row_ok[None, :]
    if not HAS_W:
        out += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    tl.store(at, out.to(y_ptr.dtype.element_ty), mask=ok)
