"""`sign_pack`: one pass over a fine-tuned and a base matrix gives all that a one-bit delta needs.

Contract: the sums are per row, so that a caller may stream slices of rows and join them with
`PackedSigns.concatenate`; every scale rule and every error norm follows from them without another pass. An exact
zero counts as +1 and is counted. It does not choose a scale rule, keep tensors or write files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zen_train.kernels.common import choose_backend
from zen_train.kernels.cpu import path_number

from . import registration

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSigns:
    """Signs and sums of D = W1 - W0, `[N, K]`."""

    in_features: int
    """K."""
    sign_NB: Tensor
    """uint8 `[N, ceil(K/8)]`; 1 means D >= 0; padding bits are zero."""
    abs_sum_N: Tensor
    """float64 `[N]`, sum of |D| over the row."""
    square_sum_N: Tensor
    """float64 `[N]`, sum of D^2 over the row."""
    zeros_N: Tensor
    """int64 `[N]`, exact zeros in the row."""

    @classmethod
    def concatenate(cls, parts: Sequence["PackedSigns"]) -> "PackedSigns":
        """Join consecutive slices of rows."""
        if not parts or len({part.in_features for part in parts}) != 1:
            raise ValueError(
                f"parts have in_features {[part.in_features for part in parts]}; needed: one common value."
            )
        return cls(
            in_features=parts[0].in_features,
            sign_NB=torch.cat([part.sign_NB for part in parts]),
            abs_sum_N=torch.cat([part.abs_sum_N for part in parts]),
            square_sum_N=torch.cat([part.square_sum_N for part in parts]),
            zeros_N=torch.cat([part.zeros_N for part in parts]),
        )

    def row_scale(self) -> Tensor:
        """float32 `[N]`: mean |D| of each row, the scale that minimises the row's squared error."""
        return (self.abs_sum_N / self.in_features).to(torch.float32)

    def matrix_scale(self) -> Tensor:
        """float32 `[1]`: mean |D| of the matrix (the rule of arXiv 2402.10193)."""
        return (
            (self.abs_sum_N.sum() / (self.abs_sum_N.numel() * self.in_features)).to(torch.float32).reshape(1)
        )

    def squared_error(self, scale: Tensor) -> Tensor:
        """float64 `[N]`: `sum (D - scale S)^2 = sum D^2 - 2 scale sum |D| + K scale^2` of each row."""
        wide = scale.to(torch.float64)
        return self.square_sum_N - 2 * wide * self.abs_sum_N + self.in_features * wide.square()

    def relative_error(self, scale: Tensor) -> float:
        """`||D - scale S||^2 / ||D||^2` of the matrix; 0 for a zero matrix with a zero scale."""
        total = float(self.square_sum_N.sum())
        error = float(self.squared_error(scale).sum())
        if total > 0:
            return max(error, 0.0) / total
        return 0.0 if error == 0 else float("inf")

    @property
    def zero_share(self) -> float:
        """Share of elements that are exactly zero."""
        return float(self.zeros_N.sum()) / max(1, self.zeros_N.numel() * self.in_features)


def sign_pack(w1_NK: Tensor, w0_NK: Tensor | None = None, *, backend: str = "auto") -> PackedSigns:
    """Pack the signs of `w1 - w0` and sum what scales and errors need, in one pass.

    Args:
        w1_NK: `[N, K]`, bfloat16, float16 or float32, K >= 1.
        w0_NK: same shape, dtype and device, or None for zeros (then `w1_NK` is a difference already).
        backend: `auto`, `reference`, `cpu` or `triton`.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or a difference that is not finite.
    """
    if w1_NK.dim() != 2 or w1_NK.shape[1] < 1:
        raise ValueError(f"w1_NK has shape {tuple(w1_NK.shape)}; needed: [N, K] with K >= 1.")
    if w1_NK.dtype not in DTYPES:
        raise ValueError(f"w1_NK is {w1_NK.dtype}; allowed: bfloat16, float16, float32. Convert it first.")
    if w0_NK is not None and (w0_NK.shape, w0_NK.dtype, w0_NK.device) != (
        w1_NK.shape,
        w1_NK.dtype,
        w1_NK.device,
    ):
        raise ValueError(
            f"w0_NK is {w0_NK.dtype} {tuple(w0_NK.shape)} on {w0_NK.device}; "
            f"needed: {w1_NK.dtype} {tuple(w1_NK.shape)} on {w1_NK.device}, as w1_NK."
        )
    chosen = choose_backend(backend, w1_NK.device)
    if chosen == "cpu":
        sign, abs_sum, square_sum, zeros = torch.ops.zen_train.cpu_sign_pack(w1_NK, w0_NK, path_number())
    elif chosen == "triton":
        sign, abs_sum, square_sum, zeros = registration.triton_sign_pack(w1_NK, w0_NK)
    else:
        sign, abs_sum, square_sum, zeros = registration.reference_sign_pack(w1_NK, w0_NK)
    if chosen != "cpu" and not bool(torch.isfinite(abs_sum).all()):
        row = int((~torch.isfinite(abs_sum)).nonzero()[0, 0])
        raise ValueError(
            f"row {row} of w1 - w0 holds a NaN or an infinity; allowed: finite values. Check both weights."
        )
    return PackedSigns(
        in_features=w1_NK.shape[1], sign_NB=sign, abs_sum_N=abs_sum, square_sum_N=square_sum, zeros_N=zeros
    )
