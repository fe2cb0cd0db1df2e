"""Which slots are free, which variant has which, and how a slot is emptied.

A slot is one sign plane of the whole model, or coded directions in its place: slot v of every bank. A variant
of P planes has P slots, one of directions one; the row
of its vectors is one after its first slot. An empty slot has zero scales everywhere, so it serves the base;
it keeps that promise from the moment its variant is released, not when the next one comes (sglang#7426: what
the next variant does not overwrite must not shine through).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zen_train.serve.engine.weights import ServedModel


@dataclass(frozen=True, slots=True)
class Place:
    """Where a variant lies."""

    planes: tuple[int, ...]
    """Slots, one for each sign plane; empty for the base."""
    vector: int
    """Row of the vector tables; 0 for the base."""
    directions: bool = False
    """The one slot holds coded directions."""


BASE_PLACE = Place(planes=(), vector=0)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Device work of this block is done at its end, and neither waits for the steps nor holds them up."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class VariantSlots:
    """The free-list. `take` and `give_back` may be called from any thread."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self.total = next(iter(model.banks.values())).variants
        self._free = list(range(self.total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that no variant has."""
        return len(self._free)

    def take(self, planes: int, *, directions: bool = False) -> Place | None:
        """Slots for a variant of so many planes (at least one), or None when there are not enough."""
        with self._lock:
            if len(self._free) < planes:
                return None
            taken = tuple(self._free.pop() for _ in range(planes))
            return Place(planes=taken, vector=taken[0] + 1, directions=directions)

    def give_back(self, place: Place) -> None:
        """Empty the slots and free them. No step may use them any more."""
        with own_stream(self._model.blocks.device):
            for bank in self._model.banks.values():
                for slot in place.planes:
                    bank.row_scale_VPN[slot].zero_()
        with self._lock:
            assert not set(place.planes) & set(self._free)
            self._free.extend(place.planes)
