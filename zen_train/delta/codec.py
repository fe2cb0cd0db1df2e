"""The one-bit code: `D = tuned - base` becomes `alpha * sign(D)`, one bit an element, more planes on demand.

    D_hat = alpha * S,  S in {-1, +1},  alpha = mean|D| per output row or per matrix   (arXiv 2402.10193)

mean|D| minimises ||D - alpha*S||_F for S = sign(D). An element that is exactly zero takes +1. Each further
plane codes what the planes before left over; then all planes are refined together (see `refine`). Packing: bit i
of byte j of a row is input column 8j+i, 1 = +1, padding bits 0. Arithmetic is float32; sums are accumulated in
float64. All work goes block by block over rows (see `rows`), so that the memory beyond the packed result is a few
megabytes.

A stored parameter `[..., out, in]`, or `[..., in, out]` with `transposed=True`, has sign `[..., out,
ceil(in/8)]` and alpha `[..., out]` (scale "row") or `[..., 1]` (scale "matrix": one for each matrix of a
stack, `[1]` for a single matrix).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch

from zen_train.delta.refine import refine_planes
from zen_train.delta.rows import (
    Block,
    Float32,
    PackedRows,
    SignPack,
    as_float32,
    packed_width,
    padding_is_zero,
    row_blocks,
    run_blocks,
    sign_pack_rows,
    signed_rows,
    square_sum,
)
from zen_train.errors import DeltaError
from zen_train.kernels.common.along import along_factor

Scale = Literal["row", "matrix"]
SCALES: tuple[Scale, ...] = ("row", "matrix")


class Plane(NamedTuple):
    """One bit plane: sign uint8 `[..., out, B]`, alpha float32 `[..., out]` or `[..., 1]`."""

    sign: torch.Tensor
    alpha: torch.Tensor


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A coded delta with what the code did to it."""

    planes: tuple[Plane, ...]
    shape: tuple[int, ...]  # as stored in the model
    transposed: bool
    zeros: float  # share of elements of D that are exactly zero
    noisy_zeros: (
        float  # the same, counting only rows whose alpha is not zero: these elements get a wrong value
    )
    delta_square: float  # ||D||^2
    error_square: float  # ||D - D_hat||^2
    least_square: float  # the same with the scales of least squares: how well the signs fit

    @property
    def relative_error(self) -> float:
        """||D - D_hat|| / ||D||; 0 for a zero delta."""
        return (self.error_square / self.delta_square) ** 0.5 if self.delta_square else 0.0

    @property
    def sign(self) -> torch.Tensor:
        return self.planes[0].sign

    @property
    def alpha(self) -> torch.Tensor:
        return self.planes[0].alpha


def matrix_shape(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """`[..., out, in]` of a parameter stored with this shape."""
    if len(shape) < 2:
        raise DeltaError(
            f"a tensor of shape {list(shape)} has no rows and columns; packing needs 2 or more dimensions"
        )
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def encode(
    base: torch.Tensor,
    tuned: torch.Tensor,
    *,
    scale: Scale = "row",
    planes: int = 1,
    transposed: bool = False,
    along_weight: float = 1.0,
    sign_pack: SignPack = sign_pack_rows,
) -> EncodedTensor:
    """Code `tuned - base` (same shape, two or more dimensions, any floating dtypes).

    `along_weight`: how many times an error along the delta counts (see `along`); 1 is least squares.
    Raises DeltaError when shapes differ, when a value is NaN or infinite, or for an unknown scale.
    """
    if scale not in SCALES:
        raise DeltaError(f"scale {scale!r} is unknown; allowed: {', '.join(SCALES)}")
    if planes < 1:
        raise DeltaError(f"planes={planes} is not possible; at least 1 is needed")
    if not 1.0 <= along_weight < float("inf"):
        raise DeltaError(f"along_weight={along_weight} is not possible; 1 (least squares) or more is needed")
    if base.shape != tuned.shape:
        raise DeltaError(
            f"base has shape {list(base.shape)}, tuned has {list(tuned.shape)}; they must be equal"
        )
    shape = matrix_shape(tuple(tuned.shape), transposed)
    stack, (rows, columns) = shape[:-2], shape[-2:]
    group = (*stack, rows) if scale == "row" else (*stack, 1)
    per_alpha = columns if scale == "row" else rows * columns
    done: list[Plane] = []
    delta_square, least_G = 0.0, torch.zeros(group)
    squares_G = least_G
    zeros_R = torch.zeros(prod(shape[:-1]), dtype=torch.int64)
    for number in range(planes):
        packed = _pack_plane(base, tuned, transposed, done, sign_pack, zeros_R)
        sums = packed.abs_sum_R.view(*group, -1).sum(-1) if tuned.numel() else torch.zeros(group)
        squares = packed.square_sum_R.view(*group, -1).sum(-1) if tuned.numel() else torch.zeros(group)
        alpha = (sums / max(per_alpha, 1)).to(torch.float32)
        if not bool(torch.isfinite(alpha).all()):
            _refuse_not_finite(base, tuned)
        left = squares - 2 * alpha.double() * sums + per_alpha * alpha.double().square()
        least_G = left.clamp_min(0)
        if number == 0:
            squares_G, delta_square = squares, float(squares.sum())
        done.append(Plane(packed.sign_RB.view(*stack, rows, packed_width(columns)), alpha))
    if planes > 1 and 0.0 < delta_square < float("inf"):
        refined, least_G = refine_planes(base.cpu(), tuned.cpu(), done, transposed=transposed)
        done = [Plane(*plane) for plane in refined]
    error_square = least_square = float(least_G.sum())
    if along_weight != 1.0:
        done, error_square = _pushed(done, squares_G, least_G.view(group), along_weight)
    total = max(tuned.numel(), 1)
    noisy_R = zeros_R if scale == "matrix" else zeros_R[done[0].alpha.view(-1) > 0]
    return EncodedTensor(
        planes=tuple(done),
        shape=tuple(tuned.shape),
        transposed=transposed,
        zeros=int(zeros_R.sum()) / total,
        noisy_zeros=int(noisy_R.sum()) / total if delta_square else 0.0,
        delta_square=delta_square,
        error_square=error_square,
        least_square=least_square,
    )


def decode(planes: Sequence[Plane], shape: tuple[int, ...], *, transposed: bool = False) -> torch.Tensor:
    """The float32 delta `D_hat` in the stored shape. Raises DeltaError when planes and shape do not fit."""
    return add_delta(torch.zeros(shape), planes, transposed=transposed)


def add_delta(base: torch.Tensor, planes: Sequence[Plane], *, transposed: bool = False) -> torch.Tensor:
    """`base + D_hat` as a new float32 tensor; `base` may have any floating dtype, in the stored shape.

    Raises DeltaError when planes and shape do not fit.
    """
    columns = check_planes(planes, tuple(base.shape), transposed=transposed)
    out = torch.empty(base.shape, dtype=torch.float32)

    def work(block: Block) -> None:
        start, stop, base_RK, out_RK = block
        out_RK.numpy()[...] = as_float32(base_RK) + _sum_planes(planes, start, stop, columns)

    run_blocks(work, row_blocks(base, out, transposed=transposed), out.numel())
    return out


def measure(
    base: torch.Tensor, tuned: torch.Tensor, planes: Sequence[Plane], *, transposed: bool = False
) -> tuple[float, float]:
    """(||D||^2, ||D - D_hat||^2) of stored planes against `D = tuned - base`, element by element."""
    columns = check_planes(planes, tuple(tuned.shape), transposed=transposed)

    def work(block: Block) -> tuple[float, float]:
        start, stop, base_RK, tuned_RK = block
        delta_RK = as_float32(tuned_RK) - as_float32(base_RK)
        left_RK = delta_RK - _sum_planes(planes, start, stop, columns)
        return square_sum(delta_RK), square_sum(left_RK)

    squares = run_blocks(work, row_blocks(base, tuned, transposed=transposed), tuned.numel())
    return sum(delta for delta, _ in squares), sum(left for _, left in squares)


def check_planes(planes: Sequence[Plane], shape: tuple[int, ...], *, transposed: bool) -> int:
    """Refuse planes that do not fit a parameter of this shape, or hold bad values. Returns the column
    count.
    """
    rows_shape = matrix_shape(shape, transposed)
    stack, rows, columns = rows_shape[:-2], rows_shape[-2], rows_shape[-1]
    if not planes:
        raise DeltaError("a delta needs at least one plane")
    for number, (sign, alpha) in enumerate(planes):
        sign_shape = (*stack, rows, packed_width(columns))
        if sign.dtype != torch.uint8 or tuple(sign.shape) != sign_shape:
            raise DeltaError(
                f"sign of plane {number} is {sign.dtype} {list(sign.shape)}, not uint8 {list(sign_shape)}"
            )
        if alpha.dtype != torch.float32 or tuple(alpha.shape) not in {(*stack, rows), (*stack, 1)}:
            raise DeltaError(
                f"alpha of plane {number} is {alpha.dtype} {list(alpha.shape)}; "
                f"expected float32 {[*stack, rows]} or {[*stack, 1]}"
            )
        if not bool(torch.isfinite(alpha).all()) or bool((alpha < 0).any()):
            raise DeltaError(
                f"alpha of plane {number} holds NaN, infinity or a negative value; the data is damaged"
            )
        if not padding_is_zero(sign, columns):
            raise DeltaError(
                f"sign of plane {number}: padding bits past column {columns} are not zero; it is damaged"
            )
    return columns


def _pushed(
    planes: Sequence[Plane], squares_G: torch.Tensor, least_G: torch.Tensor, along_weight: float
) -> tuple[list[Plane], float]:
    """Planes of least squares with their scales pushed along the delta, and the squared error with those."""
    lost_G = torch.where(squares_G > 0, least_G / squares_G.clamp_min(1e-300), 0.0)
    factor_G = along_factor(lost_G, along_weight)
    error_G = squares_G * (1.0 - (2.0 - factor_G) * factor_G * (1.0 - lost_G))
    pushed = [Plane(sign, (alpha.double() * factor_G).float()) for sign, alpha in planes]
    return pushed, float(error_G.sum())


def _pack_plane(
    base: torch.Tensor,
    tuned: torch.Tensor,
    transposed: bool,
    done: list[Plane],
    sign_pack: SignPack,
    zeros_R: torch.Tensor,
) -> PackedRows:
    """One plane over all rows, of what the planes in `done` leave of `tuned - base`. The first fills
    `zeros_R`.
    """
    shape = matrix_shape(tuple(tuned.shape), transposed)
    columns = shape[-1]
    sign_RB = torch.empty(prod(shape[:-1]), packed_width(columns), dtype=torch.uint8)
    abs_sum_R, square_sum_R = torch.zeros(2, prod(shape[:-1]), dtype=torch.float64)

    def work(block: Block) -> None:
        start, stop, base_RK, tuned_RK = block
        if done:
            delta_RK = as_float32(tuned_RK.cpu()) - as_float32(base_RK.cpu())
            tuned_RK = torch.from_numpy(delta_RK).to(tuned.device)
            base_RK = torch.from_numpy(_sum_planes(done, start, stop, columns)).to(tuned.device)
        packed = sign_pack(base_RK, tuned_RK)
        sign_RB[start:stop] = packed.sign_RB
        abs_sum_R[start:stop] = packed.abs_sum_R
        square_sum_R[start:stop] = packed.square_sum_R
        if not done and packed.zeros_R is not None:
            zeros_R[start:stop] = packed.zeros_R

    run_blocks(work, row_blocks(base, tuned, transposed=transposed), tuned.numel())
    return PackedRows(sign_RB, abs_sum_R, square_sum_R, zeros_R)


def _sum_planes(planes: Sequence[Plane], start: int, stop: int, columns: int) -> Float32:
    """Rows `start:stop` (over all matrices of a stack) of `D_hat`, float32 `[R, K]`."""
    parts = (
        signed_rows(
            sign.reshape(-1, sign.shape[-1])[start:stop],
            alpha.expand(sign.shape[:-1]).reshape(-1, 1)[start:stop],
            columns,
        )
        for sign, alpha in planes
    )
    total = next(parts)
    for part in parts:
        total += part
    return total


def _refuse_not_finite(base: torch.Tensor, tuned: torch.Tensor) -> None:
    for what, tensor in (("base", base), ("tuned", tuned)):
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            raise DeltaError(f"the {what} tensor holds {bad} NaN or infinite values of {tensor.numel()}")
    raise DeltaError("the difference of tuned and base overflows float32")
