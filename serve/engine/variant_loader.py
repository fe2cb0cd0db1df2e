"""Bring a variant from its folder to its slots, checked; and count what it would take.

Contract: a load works beside running steps, since it writes only to slots that no job uses. Nothing counts
as loaded before every byte was read and every value checked; a load that fails leaves its slots empty and
free. Digests and values are checked the first time that a content hash is loaded from its files; a file that
was touched since is checked again. With a host tier the bytes are read to its memory, once while they stay
there, and copied from it. Without room there, they go from the file straight to their slot; for a GPU they
pass through pinned memory, some at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from zen_train.errors import DeltaError
from zen_train.serve.engine.checking import Checked, check_part
from zen_train.serve.engine.known_variants import KnownVariant, KnownVariants
from zen_train.serve.engine.parts import Part
from zen_train.serve.engine.slot_memory import Route, SlotMemory
from zen_train.serve.engine.slots import Place, VariantSlots, own_stream
from zen_train.serve.engine.tensor_files import FileReader, memory_of, reading, tensor_over
from zen_train.serve.engine.weights import ServedModel
from zen_train.serve.errors import VariantUnusableError
from zen_train.serve.store.host import HostTier, Parts

STAGING_BYTES = 256 << 20


@contextmanager
def _errors_of_serving(folder: Path) -> Iterator[None]:
    """Turn errors of the artifact into VariantUnusableError."""
    try:
        yield
    except DeltaError as error:
        raise VariantUnusableError(f"the variant in {folder} cannot be served: {error}") from error


class VariantLoader:
    """Loads side by side from several threads."""

    def __init__(
        self, model: ServedModel, slots: VariantSlots, *, max_planes: int, host: HostTier | None = None
    ) -> None:
        self._model = model
        self._slots = slots
        self._host = host
        self._memory = SlotMemory(model)
        self._known = KnownVariants(model, self._memory, max_planes=max_planes)
        self._checked = Checked()

    def device_bytes(self, folder: Path) -> int:
        """What the variant in `folder` takes in slots. Raises VariantUnusableError when it cannot be served."""
        with _errors_of_serving(folder), reading() as reader:
            return self._known.look_at(folder, reader).plan.planes * self._model.layout.slot_bytes

    def load(self, content_hash: str, folder: Path) -> Place:
        """Read, check and place a variant. Raises VariantUnusableError; the slots are empty and free then."""
        with _errors_of_serving(folder), reading() as reader:
            known = self._known.look_at(folder, reader)
            if known.plan.content_hash != content_hash:
                raise VariantUnusableError(
                    f"{folder} holds variant {known.plan.content_hash[:16]}, expected {content_hash[:16]}; it was "
                    "replaced. Ask for the variant again."
                )
            planes = known.plan.planes
            place = self._slots.take(planes, directions=known.homes is not None)
            if place is None:
                raise VariantUnusableError(
                    f"variant {content_hash[:16]} needs {planes} of {self._slots.total} slots and {self._slots.free} "
                    "are free. Unload another variant, or raise variant_bytes."
                )
            try:
                self._fill(known, place, reader)
            except BaseException:
                self._slots.give_back(place)
                raise
            return place

    def verify(self, folder: Path) -> None:
        """Check every byte and value of an artifact ahead of its first load, which then only copies. Uses no slot.

        Raises VariantUnusableError, as the load would.
        """
        with _errors_of_serving(folder), reading() as reader:
            known = self._known.look_at(folder, reader)
            with self._checked.turn(known.plan.content_hash):
                if self._checked.holds(known.plan.content_hash, known.stamps):
                    return
                for part in known.plan.parts:
                    memory = memory_of(torch.empty(part.file.size_bytes, dtype=torch.uint8))
                    self._read(known, [part], [memory], reader, check=True)
                self._checked.note(known.plan.content_hash, known.stamps)

    def forget(self, content_hash: str) -> None:
        """Nobody asks for it any more: give its host memory back, and check it again should somebody."""
        self._checked.forget(content_hash)
        if self._host is not None:
            self._host.remove(content_hash)

    def _fill(self, known: KnownVariant, place: Place, reader: FileReader) -> None:
        content_hash = known.plan.content_hash
        with own_stream(self._model.blocks.device):
            for target in known.plan.unchanged_vectors:
                table = self._model.tables[target]
                table[place.vector] = table[0]
            for whole, own in zip(self._model.homes, known.homes or (), strict=False):
                whole[place.planes[0]].copy_(own)
        with self._checked.turn(content_hash):
            check = not self._checked.holds(content_hash, known.stamps)
            with self._lease(known, reader, check=check) as parts:
                if parts is not None:
                    self._place(known.routes, [parts[label] for label in known.sizes], place)
                    return
            for routes in _groups(known.routes, self._model.blocks.device):
                self._read_and_place(known, routes, place, reader, check=check)
            self._checked.note(content_hash, known.stamps)

    def _lease(
        self, known: KnownVariant, reader: FileReader, *, check: bool
    ) -> AbstractContextManager[Parts | None]:
        """The parts in host memory, read and checked where they are not there; None: no room for them."""
        if self._host is None:
            return nullcontext()

        def fill(parts: Parts) -> None:
            wanted = known.plan.parts
            self._read(known, wanted, [parts[part.label] for part in wanted], reader, check=check)
            self._checked.note(known.plan.content_hash, known.stamps)

        return self._host.lease(known.plan.content_hash, known.sizes, fill)

    def _place(self, routes: Sequence[Route], stored: Sequence[memoryview], place: Place) -> None:
        """Copy parts from host memory to their slots; done when this returns."""
        with own_stream(self._model.blocks.device):
            for route, target, memory in zip(
                routes, self._memory.bytes_of(routes, place), stored, strict=True
            ):
                if target is not None:
                    target[:] = memory
                else:
                    self._memory.put(route, place, memory)

    def _read_and_place(
        self, known: KnownVariant, routes: Sequence[Route], place: Place, reader: FileReader, *, check: bool
    ) -> None:
        """Read parts from their files to their slots, through a buffer where they must be converted or sent."""
        own = self._memory.bytes_of(routes, place)
        memories = [
            self._buffer(route.part.file.size_bytes) if memory is None else memory
            for route, memory in zip(routes, own, strict=True)
        ]
        self._read(known, [route.part for route in routes], memories, reader, check=check)
        with own_stream(self._model.blocks.device):
            for route, there, memory in zip(routes, own, memories, strict=True):
                if there is None:
                    self._memory.put(route, place, memory)

    def _buffer(self, size_bytes: int) -> memoryview:
        """Pinned where a GPU copies from it; alive as long as the view is."""
        if self._model.blocks.device.type == "cuda":
            return memory_of(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))
        return np.empty(size_bytes, np.uint8).data

    def _read(
        self,
        known: KnownVariant,
        parts: Sequence[Part],
        memories: Sequence[memoryview],
        reader: FileReader,
        *,
        check: bool,
    ) -> None:
        """Fill the memories, and check them. A file that somebody writes to meanwhile is refused."""
        reader.read(zip((part.file for part in parts), memories, strict=True))
        for path, stamp in known.stamps.items():
            if reader.stamp(path) != stamp:
                raise DeltaError(f"{path} changed while it was read; ask for the variant again")
        if check:
            for part, memory in zip(parts, memories, strict=True):
                check_part(part, tensor_over(memory, part.file.spec))


def _groups(routes: tuple[Route, ...], device: torch.device) -> Iterator[Sequence[Route]]:
    """All at once on the CPU; for another device at most STAGING_BYTES, or one part, at a time."""
    if device.type == "cpu":
        yield routes
        return
    group: list[Route] = []
    held_bytes = 0
    for route in routes:
        size_bytes = route.part.file.size_bytes
        if group and held_bytes + size_bytes > STAGING_BYTES:
            yield group
            group, held_bytes = [], 0
        group.append(route)
        held_bytes += size_bytes
    if group:
        yield group
