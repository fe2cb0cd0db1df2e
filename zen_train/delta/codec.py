"""The one-bit code: `D = tuned - base` becomes `alpha * sign(D)`, one bit an element, more planes on demand.

    D_hat = alpha * S,  S in {-1, +1},  alpha = mean|D| per output row or per matrix   (arXiv 2402.10193)

mean|D| minimises ||D - alpha*S||_F for S = sign(D). An element that is exactly zero takes +1. Each further
plane codes what the planes before left over. Packing: bit i of byte j of a row is input column 8j+i, 1 =
+1, padding bits 0. Arithmetic is float32; sums are accumulated in float64. All work goes block by block
over rows, so that the memory beyond the packed result is a few megabytes.

Shapes: R rows (output rows, over all matrices of a stack), K input columns, B = ceil(K/8) bytes a row. A
stored parameter `[..., out, in]`, or `[..., in, out]` with `transposed=True`, has sign `[..., out, B]` and
alpha `[..., out]` (scale "row") or `[..., 1]` (scale "matrix": one for each matrix of a stack, `[1]` for a
single matrix).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import torch

from zen_train.errors import DeltaError

Scale = Literal["row", "matrix"]
SCALES: tuple[Scale, ...] = ("row", "matrix")
_BLOCK_ELEMENTS = 1 << 17  # half a megabyte of float32: a block and its temporaries stay in the L2 cache


class PackedRows(NamedTuple):
    """What one pass over a block of rows yields."""

    sign_RB: torch.Tensor  # uint8
    abs_sum_R: torch.Tensor  # float64, sum of |D|
    square_sum_R: torch.Tensor  # float64, sum of D*D
    zeros_R: torch.Tensor | None  # int64, elements that are exactly zero; None: there are none


SignPack = Callable[[torch.Tensor, torch.Tensor], PackedRows]
"""(base_RK, tuned_RK) of any floating dtype -> PackedRows. The seam for a fused kernel."""


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


def packed_width(columns: int) -> int:
    """Bytes a row of `columns` bits takes."""
    return (columns + 7) // 8


def matrix_shape(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """`[..., out, in]` of a parameter stored with this shape."""
    if len(shape) < 2:
        raise DeltaError(
            f"a tensor of shape {list(shape)} has no rows and columns; only 2 or more dimensions can be packed"
        )
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def pack_bits(positive_RK: torch.Tensor) -> torch.Tensor:
    """Pack booleans `[R, K]` to uint8 `[R, ceil(K/8)]`, lowest bit first, padding bits 0."""
    if positive_RK.device.type == "cpu":
        return torch.from_numpy(np.packbits(positive_RK.numpy(), axis=-1, bitorder="little"))
    rows, columns = positive_RK.shape
    padded = torch.nn.functional.pad(positive_RK.to(torch.uint8), (0, -columns % 8))
    weights = 1 << torch.arange(8, device=padded.device, dtype=torch.uint8)
    return (padded.view(rows, packed_width(columns), 8) * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(sign_RB: torch.Tensor, columns: int) -> torch.Tensor:
    """Undo `pack_bits`: uint8 `[R, B]` to 0/1 uint8 `[R, columns]`. Padding bits are not looked at."""
    if sign_RB.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(sign_RB.numpy(), axis=-1, bitorder="little", count=columns))
    shifts = torch.arange(8, device=sign_RB.device, dtype=torch.uint8)
    return ((sign_RB.unsqueeze(-1) >> shifts) & 1).flatten(-2)[:, :columns]


def padding_is_zero(sign: torch.Tensor, columns: int) -> bool:
    """True when the unused high bits of every row's last byte are 0."""
    if columns % 8 == 0 or sign.numel() == 0:
        return True
    return not bool((sign[..., -1] >> (columns % 8)).any())


def sign_pack_rows(base_RK: torch.Tensor, tuned_RK: torch.Tensor) -> PackedRows:
    """Signs and row sums of `tuned - base`, taken in float32."""
    delta_RK = tuned_RK.to(torch.float32) - base_RK.to(device=tuned_RK.device, dtype=torch.float32)
    abs_sum_R = delta_RK.abs().sum(-1, dtype=torch.float64)
    square_sum_R = torch.linalg.vector_norm(delta_RK, 2, dim=-1, dtype=torch.float64).square()
    if delta_RK.device.type == "cpu":  # numpy compares several times faster than torch here
        values = delta_RK.numpy()
        positive_RK, zero_RK = torch.from_numpy(values >= 0), values == 0
        zeros_R = torch.from_numpy(zero_RK).sum(-1) if np.count_nonzero(zero_RK) else None
    else:
        positive_RK, zeros_R = delta_RK >= 0, (delta_RK == 0).sum(-1)
    return PackedRows(pack_bits(positive_RK), abs_sum_R, square_sum_R, zeros_R)


def encode(
    base: torch.Tensor,
    tuned: torch.Tensor,
    *,
    scale: Scale = "row",
    planes: int = 1,
    transposed: bool = False,
    sign_pack: SignPack = sign_pack_rows,
) -> EncodedTensor:
    """Code `tuned - base` (same shape, two or more dimensions, any floating dtypes).

    Raises DeltaError when shapes differ, when a value is NaN or infinite, or for an unknown scale.
    """
    if scale not in SCALES:
        raise DeltaError(f"scale {scale!r} is unknown; allowed: {', '.join(SCALES)}")
    if planes < 1:
        raise DeltaError(f"planes={planes} is not possible; at least 1 is needed")
    if base.shape != tuned.shape:
        raise DeltaError(
            f"base has shape {list(base.shape)}, tuned has {list(tuned.shape)}; they must be equal"
        )
    shape = matrix_shape(tuple(tuned.shape), transposed)
    stack, (rows, columns) = shape[:-2], shape[-2:]
    row_shape, sign_shape = (*stack, rows), (*stack, rows, packed_width(columns))
    done: list[Plane] = []
    square_sum = error_square = 0.0
    zeros_R = torch.zeros(prod(row_shape), dtype=torch.int64)
    for plane in range(planes):
        sign = torch.empty(sign_shape, dtype=torch.uint8)
        abs_sum_R, square_sum_R = torch.zeros(2, prod(row_shape), dtype=torch.float64)
        sign_rows = sign.view(-1, sign_shape[-1])
        for start, stop, base_RK, tuned_RK in _row_blocks(base, tuned, transposed):
            if plane:
                known_RK = _sum_planes(done, start, stop, columns).to(tuned_RK.device)
                tuned_RK = tuned_RK.float() - base_RK.to(device=tuned_RK.device, dtype=torch.float32)
                base_RK = known_RK
            packed = sign_pack(base_RK, tuned_RK)
            sign_rows[start:stop] = packed.sign_RB
            abs_sum_R[start:stop] = packed.abs_sum_R
            square_sum_R[start:stop] = packed.square_sum_R
            if plane == 0 and packed.zeros_R is not None:
                zeros_R[start:stop] = packed.zeros_R
        group = (*stack, rows) if scale == "row" else (*stack, 1)
        per_alpha = columns if scale == "row" else rows * columns
        sums = abs_sum_R.view(*group, -1).sum(-1)
        squares = square_sum_R.view(*group, -1).sum(-1)
        alpha = (sums / max(per_alpha, 1)).to(torch.float32)
        if not bool(torch.isfinite(alpha).all()):
            _refuse_not_finite(base, tuned)
        left = squares - 2 * alpha.double() * sums + per_alpha * alpha.double().square()
        error_square = float(left.clamp_min(0).sum())
        if plane == 0:
            square_sum = float(squares.sum())
        done.append(Plane(sign, alpha))
    total = max(tuned.numel(), 1)
    noisy_R = zeros_R if scale == "matrix" else zeros_R[done[0].alpha.view(-1) > 0]
    return EncodedTensor(
        planes=tuple(done),
        shape=tuple(tuned.shape),
        transposed=transposed,
        zeros=int(zeros_R.sum()) / total,
        noisy_zeros=int(noisy_R.sum()) / total if square_sum else 0.0,
        delta_square=square_sum,
        error_square=error_square,
    )


def decode(
    planes: tuple[Plane, ...] | list[Plane],
    shape: tuple[int, ...],
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """The float32 delta `D_hat` in the stored shape. Raises DeltaError when planes and shape do not fit."""
    delta = torch.zeros(shape, dtype=torch.float32)
    add_delta(delta, planes, transposed=transposed)
    return delta


def add_delta(
    target: torch.Tensor, planes: tuple[Plane, ...] | list[Plane], *, transposed: bool = False
) -> None:
    """Add `D_hat` to `target` (float32, stored shape) in place, block by block."""
    if target.dtype != torch.float32:
        raise DeltaError(f"the target of a delta must be float32, found {target.dtype}")
    columns = check_planes(planes, tuple(target.shape), transposed=transposed)
    for start, stop, target_RK, _ in _row_blocks(target, target, transposed):
        target_RK += _sum_planes(planes, start, stop, columns)


def check_planes(planes: tuple[Plane, ...] | list[Plane], shape: tuple[int, ...], *, transposed: bool) -> int:
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
                f"sign of plane {number} is {sign.dtype} {list(sign.shape)}; expected uint8 {list(sign_shape)}"
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
                f"sign of plane {number}: padding bits after column {columns} are not zero; the data is damaged"
            )
    return columns


def _sum_planes(planes: tuple[Plane, ...] | list[Plane], start: int, stop: int, columns: int) -> torch.Tensor:
    """Rows `start:stop` (over all matrices of a stack) of `D_hat`, float32 `[R, K]`."""
    total: torch.Tensor | None = None
    for sign, alpha in planes:
        alpha_R1 = alpha.expand(sign.shape[:-1]).reshape(-1, 1)[start:stop]
        bits = unpack_bits(sign.reshape(-1, sign.shape[-1])[start:stop], columns)
        # 2*alpha*bit - alpha is exactly +alpha or -alpha: doubling is exact.
        part = bits.to(torch.float32).mul_(alpha_R1 * 2).sub_(alpha_R1)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _row_blocks(
    first: torch.Tensor, second: torch.Tensor, transposed: bool
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """(start, stop, rows of first, rows of second), rows counted over all matrices; views, never copies."""
    one_piece = not transposed and first.is_contiguous() and second.is_contiguous()
    pairs = zip(
        _matrices(first, transposed, one_piece), _matrices(second, transposed, one_piece), strict=True
    )
    offset = 0
    for a_RK, b_RK in pairs:
        rows, columns = a_RK.shape
        step = max(1, _BLOCK_ELEMENTS // max(columns, 1))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield offset + start, offset + stop, a_RK[start:stop], b_RK[start:stop]
        offset += rows


def _matrices(tensor: torch.Tensor, transposed: bool, one_piece: bool) -> Iterator[torch.Tensor]:
    if tensor.numel() == 0:
        return
    if one_piece:
        yield tensor.view(-1, tensor.shape[-1])
        return
    oriented = tensor.transpose(-1, -2) if transposed else tensor
    for index in np.ndindex(*oriented.shape[:-2]):
        yield oriented[index]


def square_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b||^2 of two tensors of equal shape, differences in float32, summed in float64."""
    total = 0.0
    pieces = (tensor.reshape(-1).split(_BLOCK_ELEMENTS) for tensor in (a, b))
    for a_N, b_N in zip(*pieces, strict=True):
        difference_N = a_N.to(torch.float32) - b_N.to(device=a_N.device, dtype=torch.float32)
        total += float(torch.linalg.vector_norm(difference_N, dtype=torch.float64)) ** 2
    return total


def _refuse_not_finite(base: torch.Tensor, tuned: torch.Tensor) -> None:
    for what, tensor in (("base", base), ("tuned", tuned)):
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            raise DeltaError(f"the {what} tensor holds {bad} NaN or infinite values of {tensor.numel()}")
    raise DeltaError("the difference of tuned and base overflows float32")
