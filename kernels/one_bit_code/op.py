"""`one_bit_code_`: what a one-bit delta of trained weights would give back, written while they train.

Contract: one pass forms alpha and writes the code; a difference of zero counts as +1, as in the artifact. NaN and
infinities are not looked for: a training step must not wait for a check, and they show in the next loss.
It does not pack signs (`sign_pack` does) and keeps nothing.
"""

import torch
from torch import Tensor

from zen_train.kernels.common import choose_backend
from zen_train.kernels.cpu import path_number

from . import registration

BASE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def one_bit_code_(
    out_NK: Tensor,
    latent_NK: Tensor,
    base_NK: Tensor,
    *,
    per_row: bool,
    along_weight: float,
    dither: bool,
    backend: str = "auto",
) -> Tensor:
    """Write `base + alpha * sign(latent - base)` into `out_NK`, and return it.

    Args:
        out_NK: float32 `[N, K]`, K >= 1; overwritten.
        latent_NK: float32 `[N, K]`, what the optimizer moves.
        base_NK: bfloat16, float16 or float32 `[N, K]`.
        per_row: one alpha for each row, or one for the matrix.
        along_weight: how far alpha goes beyond the mean of |latent - base| (`kernels/common/along.py`); 1 is the mean.
        dither: round to values that bfloat16 holds (`kernels/common/dither.py`).
        backend: `auto`, `reference`, `cpu` or `triton`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or an `along_weight` below 1.
    """
    _check(out_NK, latent_NK, base_NK, along_weight)
    chosen = choose_backend(backend, out_NK.device)
    if out_NK.stride(1) != 1 and chosen != "reference":  # stored as [K, N]
        code_NK = torch.empty_like(out_NK, memory_format=torch.contiguous_format)
        parts = (code_NK, latent_NK, base_NK)
        return out_NK.copy_(
            one_bit_code_(*parts, per_row=per_row, along_weight=along_weight, dither=dither, backend=backend)
        )
    if chosen == "cpu":
        torch.ops.zen_train.cpu_one_bit_code_(
            out_NK, latent_NK, base_NK, per_row, along_weight, dither, path_number()
        )
    elif chosen == "triton":
        registration.triton_one_bit_code_(out_NK, latent_NK, base_NK, per_row, along_weight, dither)
    else:
        registration.reference_one_bit_code_(out_NK, latent_NK, base_NK, per_row, along_weight, dither)
    return out_NK


def _check(out_NK: Tensor, latent_NK: Tensor, base_NK: Tensor, along_weight: float) -> None:
    for name, tensor, dtypes in (
        ("out_NK", out_NK, (torch.float32,)),
        ("latent_NK", latent_NK, (torch.float32,)),
        ("base_NK", base_NK, BASE_DTYPES),
    ):
        if tensor.dtype not in dtypes:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name} is {tensor.dtype}; allowed: {allowed}. Convert it first.")
        if tensor.dim() != 2 or tensor.shape[1] < 1 or tensor.shape != out_NK.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; needed: [N, K] with K >= 1, as out_NK "
                f"{tuple(out_NK.shape)}."
            )
        if tensor.device != out_NK.device:
            raise ValueError(
                f"{name} is on {tensor.device}; needed: {out_NK.device}, as out_NK. Move it first."
            )
    if not along_weight >= 1.0:
        raise ValueError(f"along_weight is {along_weight}; allowed: 1 (least squares) or more.")
