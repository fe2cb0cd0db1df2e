"""`directions_add_`: the delta of coded singular directions for tokens of many variants, added onto a base product.

Contract: as for `bitdelta_add_`, of which it is two calls; formula in README.md. Nothing waits for the device, and no
shape depends on a value, so a call can be captured in a CUDA graph. Activations in bfloat16 stay that between the two
products (it has the range of float32); float16 goes through float32, since sums over K may leave its range.
"""

import torch
from torch import Tensor

from zen_train.kernels.bitdelta_linear import bitdelta_add_, round_folded, unpack_signs
from zen_train.kernels.common import DirectionBank, choose_backend
from zen_train.kernels.cpu import path_number

from . import registration
from .reference import directions_reference, fold, rows_reference


def directions_add_(
    y: Tensor, x: Tensor, bank: DirectionBank, slot: Tensor, *, backend: str = "auto"
) -> Tensor:
    """`y += D(slot) x`, in place.

    Args:
        y: `[T, N]`, dtype and device of x.
        x: `[T, K]`, bfloat16, float16 or float32.
        bank: the deltas.
        slot: int32 or int64 `[T]`, -1 for tokens of the base or of another code.
        backend: `auto`, `reference`, `cpu` or `triton`.

    Returns:
        y.

    Raises:
        ValueError: a shape, dtype, device or backend that does not fit; on CPU also an index out of range.
    """
    if y.shape != (x.shape[0], bank.out_features) or y.dtype != x.dtype:
        raise ValueError(
            f"y is {y.dtype} {tuple(y.shape)}; needed: {x.dtype} {(x.shape[0], bank.out_features)}."
        )
    if choose_backend(backend, x.device) == "reference":
        return y.copy_(y.to(torch.float32) + directions_reference(x, bank, slot))
    wide = x.to(torch.float32) if x.dtype == torch.float16 else x
    stacked_TR = wide.new_zeros(x.shape[0], bank.stacked)
    bitdelta_add_(stacked_TR, wide, bank.right_bank, slot, backend=backend)
    inner_TR = fold(stacked_TR.to(torch.float32), bank, slot).to(wide.dtype)
    for left, span, outputs in zip(bank.left_banks, bank.spans(), bank.outputs(), strict=True):
        part_TN, inner_TS = y[:, outputs], inner_TR[:, span].contiguous()
        if part_TN.dtype == wide.dtype:
            bitdelta_add_(part_TN, inner_TS, left, slot, backend=backend)
        else:
            term_TN = wide.new_zeros(part_TN.shape)
            part_TN += bitdelta_add_(term_TN, inner_TS, left, slot, backend=backend).to(y.dtype)
    return y


def direction_rows(
    rows_TK: Tensor, ids: Tensor, bank: DirectionBank, slot: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Rows `ids` of an embedding table with their deltas added, `rows_TK + D(slot)[ids]`.

    Args:
        rows_TK: the base's rows of these tokens.
        ids: int32 `[T]`.
        bank: the deltas of the table, of one part.
        slot: int32 `[T]`, -1 for none.
        backend: `auto`, `reference`, `cpu` or `triton`.

    Returns:
        `[T, K]` in the dtype of rows_TK, one rounding (dithered to bf16: see `zen_train.kernels.common.dither`).

    Raises:
        ValueError: a shape, dtype, device or backend that does not fit; on CPU also an index out of range.
    """
    if rows_TK.shape != (ids.shape[0], bank.in_features) or len(bank.left) != 1:
        raise ValueError(
            f"rows_TK has shape {tuple(rows_TK.shape)} and the bank {len(bank.left)} parts; needed: "
            f"{(ids.shape[0], bank.in_features)} and 1."
        )
    chosen = choose_backend(backend, rows_TK.device)
    if chosen == "cpu":
        return torch.ops.zen_train.cpu_direction_rows(
            rows_TK.contiguous(), ids, slot, bank.tensors(), path_number()
        )
    index, row = slot.long().clamp(0, bank.variants - 1), ids.long().clamp(0, bank.out_features - 1)
    coefficient_TR = fold(unpack_signs(bank.left[0][index, row], bank.stacked), bank, slot)
    if chosen == "triton":
        term_TK = registration.triton_rows(coefficient_TR, bank.right_VRB, slot, bank.in_features)
    else:
        term_TK = rows_reference(coefficient_TR, bank, slot)
    return round_folded(rows_TK.to(torch.float32) + term_TK, rows_TK.dtype)
