"""Coded singular directions as they are stored: stacked sign planes of both vectors, and one scale for each direction.

    D_hat = sum over i of scales_i l_i r_i,   l_i and r_i: sum over p of 2^-p S_p,  S_p in {-1, +1}

A vector of b bits is so a uniform quantiser: odd multiples of 2^-(b-1). Directions come most bits first, and plane p
exists for the first `counts[p]` of them. Planes are stacked, plane 0 of all its directions first: under one another on
the right, beside one another on the left, R of them in all. Packing runs along the input, as for signs: `right` along
the columns of the matrix, `left` along the stacked vectors, which are the columns of the left factor.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zen_train.delta.rows import pack_bits, packed_width, padding_is_zero, unpack_bits
from zen_train.errors import DeltaError


class Directions(NamedTuple):
    """N rows, K columns, R stacked vectors; a stack in front of each."""

    right: torch.Tensor  # uint8 [..., R, ceil(K/8)]
    left: torch.Tensor  # uint8 [..., N, ceil(R/8)]
    scales: torch.Tensor  # float32 [..., counts[0]]
    counts: tuple[int, ...]  # directions with more than 0, 1, ... bits; R in all

    @property
    def size_bytes(self) -> int:
        """Of all parts."""
        return self.right.numel() + self.left.numel() + 4 * self.scales.numel()


def pack_directions(
    left_RN: torch.Tensor, right_RK: torch.Tensor, scales: torch.Tensor, counts: Sequence[int]
) -> Directions:
    """From values that lie on the levels: `[..., r_0, N]` and `[..., r_0, K]`, float32."""
    return Directions(
        pack_bits(_stacked(right_RK, counts)),
        pack_bits(_stacked(left_RN, counts).mT.contiguous()),
        scales.to(torch.float32).contiguous(),
        tuple(counts),
    )


def _stacked(values_RL: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The signs of all planes under one another: successive halves, each of what the planes before leave."""
    rest, planes = values_RL.clone(), []
    for plane, count in enumerate(counts):
        positive = rest[..., :count, :] >= 0
        rest[..., :count, :] -= torch.where(positive, 2.0**-plane, -(2.0**-plane))
        planes.append(positive)
    return torch.cat(planes, -2)


def directions_product(parts: Directions, columns: int) -> torch.Tensor:
    """`D_hat` `[..., N, K]`: `(left * scales) right` in float32."""
    left = _values(_signs(parts.left, sum(parts.counts)).mT, parts.counts)
    right = _values(_signs(parts.right, columns), parts.counts)
    return (left.mT * parts.scales[..., None, :]) @ right


def _values(signs: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Vectors `[..., r_0, L]` from their stacked signs `[..., R, L]`."""
    values, at = signs[..., : counts[0], :].clone(), 0
    for plane, count in enumerate(counts):
        if plane:
            values[..., :count, :] += signs[..., at : at + count, :] * 2.0**-plane
        at += count
    return values


def _signs(sign: torch.Tensor, columns: int) -> torch.Tensor:
    flat = unpack_bits(sign.reshape(-1, sign.shape[-1]), columns)
    return flat.view(*sign.shape[:-1], columns).to(torch.float32).mul_(2.0).sub_(1.0)


def check_directions(parts: Directions, columns: int) -> None:
    """Refuse values that no writer makes; shapes and dtypes are those of the entry already."""
    _check_padding(parts.right, columns, "right")
    _check_padding(parts.left, sum(parts.counts), "left")
    if not bool(torch.isfinite(parts.scales).all()) or bool((parts.scales < 0).any()):
        raise DeltaError("scales of directions hold NaN, infinity or a negative value; the data is damaged")


def _check_padding(sign: torch.Tensor, columns: int, what: str) -> None:
    if sign.shape[-1] != packed_width(columns) or not padding_is_zero(sign, columns):
        raise DeltaError(f"{what}: padding bits past column {columns} are not zero; it is damaged")
