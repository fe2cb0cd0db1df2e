"""Coded singular directions as they are stored: sign planes of both vectors of each direction, and one scale for each.

    D_hat = sum over i of scales_i l_i r_i,   l_i and r_i: sum over p of 2^-p S_p,  S_p in {-1, +1}

A vector of b bits is so a uniform quantiser: odd multiples of 2^-(b-1). Directions come most bits first, and plane p
exists for the first `counts[p]` of them. Packing runs along the input, as for signs: `right` along the columns of the
matrix, `left` along the directions, which are the columns of the left factor.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zen_train.delta.rows import pack_bits, packed_width, padding_is_zero, unpack_bits
from zen_train.errors import DeltaError


class Directions(NamedTuple):
    """N rows, K columns, r_p directions with more than p bits; a stack in front of each."""

    right: tuple[torch.Tensor, ...]  # uint8 [..., r_p, ceil(K/8)]
    left: tuple[torch.Tensor, ...]  # uint8 [..., N, ceil(r_p/8)]
    scales: torch.Tensor  # float32 [..., r_0]

    @property
    def size_bytes(self) -> int:
        """Of all parts."""
        return sum(part.numel() for part in (*self.right, *self.left)) + 4 * self.scales.numel()


def pack_directions(
    left_RN: torch.Tensor, right_RK: torch.Tensor, scales: torch.Tensor, counts: Sequence[int]
) -> Directions:
    """From values that lie on the levels: `[..., r_0, N]` and `[..., r_0, K]`, float32."""
    return Directions(
        tuple(pack_bits(plane.contiguous()) for plane in _planes(right_RK, counts)),
        tuple(pack_bits(plane.mT.contiguous()) for plane in _planes(left_RN, counts)),
        scales.to(torch.float32).contiguous(),
    )


def _planes(values_RL: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Successive halves: the sign of what the planes before leave."""
    rest, planes = values_RL.clone(), []
    for plane, count in enumerate(counts):
        positive = rest[..., :count, :] >= 0
        rest[..., :count, :] -= torch.where(positive, 2.0**-plane, -(2.0**-plane))
        planes.append(positive)
    return planes


def directions_product(parts: Directions, columns: int) -> torch.Tensor:
    """`D_hat` `[..., N, K]`: `(left * scales) right` in float32."""
    counts = [right.shape[-2] for right in parts.right]
    first, columns_of = counts[0], list(zip(parts.left, counts, strict=True))
    left = torch.zeros(*parts.left[0].shape[:-1], first)
    for plane, (sign, count) in enumerate(columns_of):
        left[..., :count] += _signs(sign, count) * 2.0**-plane
    right = torch.zeros(*parts.right[0].shape[:-1], columns)
    for plane, (sign, count) in enumerate(zip(parts.right, counts, strict=True)):
        right[..., :count, :] += _signs(sign, columns) * 2.0**-plane
    return (left * parts.scales[..., None, :]) @ right


def _signs(sign: torch.Tensor, columns: int) -> torch.Tensor:
    flat = unpack_bits(sign.reshape(-1, sign.shape[-1]), columns)
    return flat.view(*sign.shape[:-1], columns).to(torch.float32).mul_(2.0).sub_(1.0)


def check_directions(parts: Directions, columns: int) -> None:
    """Refuse values that no writer makes; shapes and dtypes are those of the entry already."""
    for plane, right in enumerate(parts.right):
        _check_padding(right, columns, f"right of plane {plane}")
    for plane, (left, right) in enumerate(zip(parts.left, parts.right, strict=True)):
        _check_padding(left, right.shape[-2], f"left of plane {plane}")
    if not bool(torch.isfinite(parts.scales).all()) or bool((parts.scales < 0).any()):
        raise DeltaError("scales of directions hold NaN, infinity or a negative value; the data is damaged")


def _check_padding(sign: torch.Tensor, columns: int, what: str) -> None:
    if sign.shape[-1] != packed_width(columns) or not padding_is_zero(sign, columns):
        raise DeltaError(f"{what}: padding bits past column {columns} are not zero; it is damaged")
