"""`DirectionBank`: coded singular directions of several variants, in the memory of a `DeltaBank`'s slots.

Legend: V slots, N outputs in one or more parts of N_j rows (q, k, v of a fused matrix), K inputs, B = ceil(K / 8),
R = sum of R_j stacked vectors. A direction of b bits has b of them, one for each plane.

    D_j = sum over directions i of  c_i l_i r_i,   l_i = sum_p 2^-p L_p[:, i],   r_i = sum_p 2^-p S_p[i, :]

The right planes of all directions lie under one another, as one sign matrix `[R, K]`; the left planes of a part beside
one another, as `[N_j, R_j]`. So `y_j += L_j g_j` with `g = fold(S x)`: two one-bit products, and between them

    H[h] = sum over rows r of direction h of 2^-plane(r) (S x)[r],   g[r] = 2^-plane(r) c[h(r)] H[h(r)]

h(r), the home of row r, is the row of its direction's first plane. An unused row is at home in itself with c = 0.

Room: R_j is the largest multiple of 8 with R_j (N_j + K) <= N_j K: as many bits as the one sign plane of the slot. So a
slot holds either, and the scales c lie where the sign plane has its own; `home` and `plane` are three bytes more a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .bank import DeltaBank

MOST_ROWS = 1 << 15
"""Of a bank: `home` is int16."""
MOST_PARTS = 3


def stacked_rows(rows: int, columns: int) -> int:
    """R_j of a part `[rows, columns]`."""
    return rows * columns // (rows + columns) // 8 * 8


def has_room(rows: Sequence[int], columns: int) -> bool:
    """Whether each part of such a matrix has room for a direction, and all of them for no more than can be numbered."""
    stacked = [stacked_rows(part, columns) for part in rows]
    return min(stacked) >= 8 and sum(stacked) < MOST_ROWS


def homes(counts: Sequence[int], room: int) -> tuple[Tensor, Tensor]:
    """`home` (int16, from 0 on) and `plane` (uint8) of a part, `counts[p]` directions having more than p bits.

    Raises:
        ValueError: counts that grow, or more of them than there is room for.
    """
    if sum(counts) > room or any(low < high for low, high in pairwise(counts)):
        raise ValueError(f"counts is {list(counts)}; allowed: not growing, {room} in all.")
    home, plane = torch.arange(room, dtype=torch.int16), torch.zeros(room, dtype=torch.uint8)
    at = 0
    for number, count in enumerate(counts):
        home[at : at + count] = torch.arange(count)
        plane[at : at + count] = number
        at += count
    return home, plane


@dataclass(frozen=True, kw_only=True, eq=False)
class DirectionBank:
    """Directions of V variants for one `[N, K]` weight. Tensors may be updated in place; slots may lie apart."""

    in_features: int
    """K."""
    rows: tuple[int, ...]
    """N_j."""
    right_VRB: Tensor
    """uint8."""
    left: tuple[Tensor, ...]
    """uint8 `[V, N_j, R_j / 8]` of each part."""
    scale_VR: Tensor
    """float32; c at the home of each direction, 0 elsewhere."""
    home_VR: Tensor
    """int16."""
    plane_VR: Tensor
    """uint8."""
    right_bank: DeltaBank
    """`right_VRB` as the sign matrix `[R, K]` that it is, with scale 1."""
    left_banks: tuple[DeltaBank, ...]
    """`left` as the sign matrices `[N_j, R_j]`."""

    @classmethod
    def over(
        cls,
        bank: DeltaBank,
        rows: Sequence[int],
        *,
        home_VR: Tensor | None = None,
        plane_VR: Tensor | None = None,
    ) -> "DirectionBank":
        """Views of a one-plane bank's slots, for parts of so many rows. Makes `home_VR` and `plane_VR` where not given.

        Raises:
            ValueError: parts that are not the bank's rows, more planes than one, or one scale for a matrix.
        """
        n, k = bank.out_features, bank.in_features
        if sum(rows) != n or min(rows, default=0) < 1 or len(rows) > MOST_PARTS:
            raise ValueError(
                f"rows is {list(rows)}; needed: one to {MOST_PARTS} positive numbers that add up to {n}."
            )
        if bank.planes != 1 or bank.row_scale_VPN.shape[2] != n:
            raise ValueError(
                f"the bank has {bank.planes} planes and {bank.row_scale_VPN.shape[2]} scales a plane; "
                f"needed: one plane with {n} scales."
            )
        stacked = [stacked_rows(part, k) for part in rows]
        total, row_bytes = sum(stacked), (k + 7) // 8
        if not has_room(rows, k):
            raise ValueError(
                f"{stacked} vectors for parts of {list(rows)} x {k}; allowed: 8 or more each, fewer than {MOST_ROWS} "
                "in all. Hold that matrix as signs."
            )
        slots = bank.sign_VPNB.view(bank.variants, n * row_bytes)
        left, at = [], total * row_bytes
        for part, count in zip(rows, stacked, strict=True):
            size = part * (count // 8)
            left.append(slots[:, at : at + size].view(bank.variants, part, count // 8))
            at += size
        device = bank.device
        ones = torch.ones(bank.variants, 1, 1, device=device)
        right = slots[:, : total * row_bytes].view(bank.variants, total, row_bytes)
        if home_VR is None:
            home_VR = torch.arange(total, dtype=torch.int16, device=device).repeat(bank.variants, 1)
        if plane_VR is None:
            plane_VR = torch.zeros(bank.variants, total, dtype=torch.uint8, device=device)
        return cls(
            in_features=k,
            rows=tuple(rows),
            right_VRB=right,
            left=tuple(left),
            scale_VR=bank.row_scale_VPN[:, 0, :total],
            home_VR=home_VR,
            plane_VR=plane_VR,
            right_bank=_unscaled(right, k, ones),
            left_banks=tuple(_unscaled(part, count, ones) for part, count in zip(left, stacked, strict=True)),
        )

    @property
    def variants(self) -> int:
        """V."""
        return self.right_VRB.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return sum(self.rows)

    @property
    def stacked(self) -> int:
        """R."""
        return self.right_VRB.shape[1]

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.right_VRB.device

    def tensors(self) -> list[Tensor | None]:
        """In the order of the C++ operators: right, scales, home, plane, left of up to three parts."""
        left = [*self.left, None, None][:MOST_PARTS]
        return [self.right_VRB, self.scale_VR, self.home_VR, self.plane_VR, *left]

    def spans(self) -> list[slice]:
        """The stacked rows of each part."""
        return _slices([part.shape[2] * 8 for part in self.left])

    def outputs(self) -> list[slice]:
        """The outputs of each part."""
        return _slices(self.rows)

    def describe(self, slot: int, part: int, counts: Sequence[int]) -> None:
        """Write `home` and `plane` of a slot's part, `counts[p]` directions having more than p bits.

        Raises:
            ValueError: as `homes`. Nothing is written then.
        """
        span = self.spans()[part]
        home, plane = homes(counts, span.stop - span.start)
        self.home_VR[slot, span] = (home + span.start).to(self.device)
        self.plane_VR[slot, span] = plane.to(self.device)

    def put(
        self, slot: int, part: int, *, right: Tensor, left: Tensor, scales: Tensor, counts: Sequence[int]
    ) -> None:
        """Fill one part of a slot in place.

        Args:
            slot: of V.
            part: of the fused matrix.
            right: uint8 `[sum of r_p, B]`, plane 0 first.
            left: uint8 `[N_j, ceil(sum of r_p / 8)]`.
            scales: float32 `[r_0]`.
            counts: r_p, how many directions have more than p bits.

        Raises:
            ValueError: as `homes`. Nothing is written then.
        """
        self.describe(slot, part, counts)
        span = self.spans()[part]
        self.scale_VR[slot, span].zero_()
        self.scale_VR[slot, span][: counts[0]].copy_(scales)
        self.right_VRB[slot, span][: right.shape[0]].copy_(right)
        self.left[part][slot][:, : left.shape[1]].copy_(left)


def _unscaled(sign_VNB: Tensor, columns: int, ones: Tensor) -> DeltaBank:
    return DeltaBank(in_features=columns, sign_VPNB=sign_VNB.unsqueeze(1), row_scale_VPN=ones)


def _slices(sizes: Sequence[int]) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]
