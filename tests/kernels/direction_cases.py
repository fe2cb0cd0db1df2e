"""Random banks of coded directions. No pytest in here: the interpreter tests import it in a process of their own."""

import torch
from torch import Tensor

from zen_train.kernels.common import DeltaBank, DirectionBank
from zen_train.kernels.directions_linear import dense_directions

ROWS = [(90,), (64, 24, 24), (41, 41)]


def build(rows: tuple[int, ...], columns: int, *, variants: int, device: str = "cpu") -> DirectionBank:
    """Random bytes read as directions of one to four bits, each slot with other counts."""
    g = torch.Generator().manual_seed(0)
    bank = DeltaBank.zeros(variants=variants, out_features=sum(rows), in_features=columns)
    bank.sign_VPNB.random_(0, 256, generator=g)
    bank.row_scale_VPN.uniform_(0.5, 1.5, generator=g)
    held = DirectionBank.over(bank, rows)
    for slot in range(variants):
        for part, span in enumerate(held.spans()):
            room = (span.stop - span.start) // 8
            counts = [8 * count for count in (room - slot, slot // 2, slot // 3) if count > 0]
            held.describe(slot, part, counts)
    if device == "cpu":
        return held
    moved = DeltaBank(
        in_features=columns,
        sign_VPNB=bank.sign_VPNB.to(device),
        row_scale_VPN=bank.row_scale_VPN.to(device),
    )
    homes = {"home_VR": held.home_VR.to(device), "plane_VR": held.plane_VR.to(device)}
    return DirectionBank.over(moved, rows, **homes)


def exact_rows(base: Tensor, ids: Tensor, bank: DirectionBank, slot: Tensor) -> Tensor:
    """`direction_rows` in float64."""
    out = base.double().clone()
    for t, (row, v) in enumerate(zip(ids.tolist(), slot.tolist(), strict=True)):
        if v >= 0:
            out[t] += dense_directions(bank, v, torch.float64)[row]
    return out
