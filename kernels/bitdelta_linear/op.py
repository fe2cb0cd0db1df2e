"""The two entry points of operator 1 under one dispatcher: `bitdelta_linear` and `bitdelta_add_`.

Contract: arguments are checked once (names, shapes, dtypes, devices): by the C++ operator where it runs, because a
call of a small layer takes microseconds, and here otherwise. The C++ operator also checks the values that it uses as an
index or a scale. On a GPU a value check would stop the device, so an index out of range yields NaN rows there and never
reads out of bounds; `DeltaBank.check_values()` is for the loader.
It keeps no state and moves nothing between devices.
"""

import torch
from torch import Tensor

from zen_train.kernels.common import DeltaBank, choose_backend
from zen_train.kernels.cpu import path_number

from . import registration
from .reference import low_rank_term

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FOLD_TOKENS = 128
"""From this many tokens of one variant on, the CPU kernels form W0 + alpha S and do one product."""


def _check(x: Tensor, bank: DeltaBank, variant: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}; allowed: bfloat16, float16, float32. Convert it first.")
    if x.dim() < 1 or x.shape[-1] != bank.in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}; needed: [..., {bank.in_features}] as the bank has.")
    if variant.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"variant is {variant.dtype}; allowed: int32, int64. Convert it first.")
    if variant.shape != x.shape[:-1]:
        raise ValueError(
            f"variant has shape {tuple(variant.shape)}; needed: {tuple(x.shape[:-1])}, one per token."
        )
    for name, device in (("variant", variant.device), ("bank", bank.device)):
        if device != x.device:
            raise ValueError(f"{name} is on {device}; needed: {x.device}, where x is. Move it first.")


def bitdelta_linear(
    x: Tensor,
    weight_NK: Tensor,
    bank: DeltaBank,
    variant: Tensor,
    *,
    bias_N: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Linear layer with a one-bit delta per token: `x W0^T + bias + delta(v)`; formula in README.md.

    Args:
        x: `[..., K]` activations, bfloat16, float16 or float32.
        weight_NK: base weight `[N, K]`, same dtype and device as x.
        bank: the deltas; `bank.out_features` is N and `bank.in_features` is K.
        variant: int32 or int64 `[...]`, the slot of each token, -1 for the base.
        bias_N: `[N]` in the dtype of x, or None.
        backend: `auto`, `reference`, `cpu` or `triton`.

    Returns:
        `[..., N]` in the dtype of x; float32 accumulation.

    Raises:
        ValueError: a shape, dtype, device or backend that does not fit; on CPU also an index out of range or a scale
            that is not finite.
    """
    chosen = choose_backend(backend, x.device)
    if chosen == "cpu" and bank.left_VNR is None and x.dim() == 2 and x.shape[1] == bank.in_features:
        return torch.ops.zen_train.cpu_linear.default(
            x,
            weight_NK,
            bias_N,
            bank.sign_VPNB,
            bank.row_scale_VPN,
            bank.col_scale_VPK,
            variant,
            path_number(),
            FOLD_TOKENS,
        )
    _check(x, bank, variant)
    n, k = bank.out_features, bank.in_features
    if weight_NK.shape != (n, k) or weight_NK.dtype != x.dtype or weight_NK.device != x.device:
        raise ValueError(
            f"weight_NK is {weight_NK.dtype} {tuple(weight_NK.shape)} on {weight_NK.device}; "
            f"needed: {x.dtype} {(n, k)} on {x.device}."
        )
    if bias_N is not None and (bias_N.shape != (n,) or bias_N.dtype != x.dtype or bias_N.device != x.device):
        raise ValueError(
            f"bias_N is {bias_N.dtype} {tuple(bias_N.shape)} on {bias_N.device}; "
            f"needed: {x.dtype} {(n,)} on {x.device}."
        )
    x_TK, variant_T = x.reshape(-1, k), variant.reshape(-1)
    parts = (bank.sign_VPNB, bank.row_scale_VPN, bank.col_scale_VPK, variant_T)
    if chosen == "cpu":
        y_TN = torch.ops.zen_train.cpu_linear(x_TK, weight_NK, bias_N, *parts, path_number(), FOLD_TOKENS)
    elif chosen == "triton":
        y_TN = registration.triton_linear(x_TK, weight_NK, bias_N, *parts)
    else:
        registration.check_values(*parts)
        y_TN = registration.reference_linear(x_TK, weight_NK, bias_N, *parts)
    if bank.left_VNR is not None and bank.right_VRK is not None:
        y_TN = (y_TN + low_rank_term(x_TK, bank.left_VNR, bank.right_VRK, variant_T)).to(x.dtype)
    return y_TN.view(*x.shape[:-1], n)


def bitdelta_add_(y: Tensor, x: Tensor, bank: DeltaBank, variant: Tensor, *, backend: str = "auto") -> Tensor:
    """Add the delta term alone onto `y`, in place: for engines that do the base product themselves.

    Args:
        y: `[..., N]`, dtype and device of x. It must be viewable as `[T, N]`.
        x, bank, variant, backend: as for `bitdelta_linear`.

    Returns:
        y.

    Raises:
        ValueError: as for `bitdelta_linear`. y is unchanged then.
    """
    _check(x, bank, variant)
    n, k = bank.out_features, bank.in_features
    if y.shape != (*x.shape[:-1], n) or y.dtype != x.dtype or y.device != x.device:
        raise ValueError(
            f"y is {y.dtype} {tuple(y.shape)} on {y.device}; needed: {x.dtype} {(*x.shape[:-1], n)} on {x.device}."
        )
    chosen = choose_backend(backend, x.device)
    x_TK, variant_T = x.reshape(-1, k), variant.reshape(-1)
    try:
        y_TN = y.view(-1, n)
    except RuntimeError as error:
        raise ValueError(
            f"y has strides {y.stride()}, which do not view as [T, {n}]; make it contiguous."
        ) from error
    parts = (bank.sign_VPNB, bank.row_scale_VPN, bank.col_scale_VPK, variant_T)
    if chosen == "cpu":
        torch.ops.zen_train.cpu_add_(y_TN, x_TK, *parts, path_number(), FOLD_TOKENS)
    elif chosen == "triton":
        registration.triton_add_(y_TN, x_TK, *parts)
    else:
        registration.check_values(*parts)
        registration.reference_add_(y_TN, x_TK, *parts)
    if bank.left_VNR is not None and bank.right_VRK is not None:
        y_TN += low_rank_term(x_TK, bank.left_VNR, bank.right_VRK, variant_T).to(y.dtype)
    return y
