"""Where the parts of a variant go: tensors of the banks and tables, and on a CPU their very bytes.

Bytes go to a slot with no tensor made on the way: a load of hundreds of small parts would spend most of its
time on that. What does not depend on the slot is computed once for a plan (`routes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from zen_train.serve.engine.parts import DIRECTION_KINDS, Part
from zen_train.serve.engine.slots import Place
from zen_train.serve.engine.tensor_files import memory_of, tensor_over
from zen_train.serve.engine.weights import ServedModel

Bytes = NDArray[np.uint8]
_SCALE_BYTES = 4  # scales and vectors are float32 on the device
_SAME_MEMORY = {"right": "sign", "scales": "alpha"}
"""Parts of directions that begin where the slot's signs or scales do. Rows of left vectors lie apart."""


@dataclass(frozen=True, slots=True)
class Route:
    """How one part gets to a slot."""

    part: Part
    memory: memoryview | None
    """The bytes of all slots, where the stored bytes can go as they are; else the part goes as a tensor."""
    which: int
    """Index into `(*planes, vector)` of the place."""
    slot_bytes: int
    first_byte: int
    """Within the slot."""
    rows: Bytes | None
    """`[slots, N, C]` of left vectors on a CPU: their rows lie apart, each as long as the slot has room for."""


class SlotMemory:
    """Of one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._rows: dict[tuple[str, int], Bytes] = {}
        """(target, part) -> left vectors of all slots."""
        self._bytes: dict[tuple[str, str], tuple[memoryview, int]] = {}
        """(kind, target) -> bytes of the whole tensor, bytes of one slot."""
        if model.blocks.device.type != "cpu":
            return
        for target, bank in model.banks.items():
            for kind, whole in (("sign", bank.sign_VPNB), ("alpha", bank.row_scale_VPN)):
                self._bytes[kind, target] = (memory_of(whole), whole[0].nbytes)
        for target, table in model.tables.items():
            self._bytes["vector", target] = (memory_of(table), table[0].nbytes)
        for target, directions in model.directions.items():
            for number, left in enumerate(directions.left):
                self._rows[target, number] = left.numpy()

    def routes(self, parts: Sequence[Part]) -> tuple[Route, ...]:
        """In the order of the parts."""
        return tuple(map(self._route, parts))

    def _route(self, part: Part) -> Route:
        which = -1 if part.kind == "vector" else 0 if part.kind in DIRECTION_KINDS else part.plane
        row_bytes = (part.columns + 7) // 8 if part.kind in ("sign", "right") else _SCALE_BYTES
        memory, slot_bytes = self._bytes.get((_SAME_MEMORY.get(part.kind, part.kind), part.target), (None, 0))
        if part.file.size_bytes != part.size * row_bytes:
            memory = None  # one scale for the matrix, or a vector of another dtype
        rows = self._rows.get((part.target, part.number)) if part.kind == "left" else None
        return Route(part, memory, which, slot_bytes, part.first * row_bytes, rows)

    def bytes_of(self, routes: Sequence[Route], place: Place) -> list[memoryview | None]:
        """Where the stored bytes of each part go as they are, or None."""
        slots = (*place.planes, place.vector)
        return [
            None
            if route.memory is None
            else route.memory[
                (start := slots[route.which] * route.slot_bytes + route.first_byte) : start
                + route.part.file.size_bytes
            ]
            for route in routes
        ]

    def put(self, route: Route, place: Place, stored: memoryview) -> None:
        """Copy a part that `bytes_of` has no place for. On a GPU the copy may still run when this returns."""
        part = route.part
        if route.rows is not None:
            width = (part.columns + 7) // 8
            packed = np.frombuffer(stored, np.uint8).reshape(part.size, width)
            route.rows[place.planes[0], :, :width] = packed
            return
        self._tensor_of(part, place).copy_(tensor_over(stored, part.file.spec), non_blocking=True)

    def _tensor_of(self, part: Part, place: Place) -> Tensor:
        """Where a part goes: signs uint8 `[rows, ceil(columns / 8)]`, scales or a vector float32 `[size]`."""
        stretch = slice(part.first, part.first + part.size)
        if part.kind == "vector":
            return self._model.tables[part.target][place.vector, stretch]
        if part.kind in DIRECTION_KINDS:
            return self._direction(part, place.planes[0], stretch)
        bank = self._model.banks[part.target]
        whole = bank.sign_VPNB if part.kind == "sign" else bank.row_scale_VPN
        return whole[place.planes[part.plane], 0, stretch]

    def _direction(self, part: Part, slot: int, stretch: slice) -> Tensor:
        directions = self._model.directions[part.target]
        if part.kind == "left":
            return directions.left[part.number][slot, :, : (part.columns + 7) // 8]
        return (directions.right_VRB if part.kind == "right" else directions.scale_VR)[slot, stretch]
