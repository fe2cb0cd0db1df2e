"""Bring a variant from its folder to its slots, checked; and count what it would take.

Contract: a load works beside running steps, since it writes only to slots that no job uses. Nothing counts
as loaded before every byte was read and every value checked; a load that fails leaves its slots empty and
free. Digests and values are checked the first time that a content hash is loaded from its files; a file that
was touched since is checked again. On the CPU the bytes go from the file straight to their slot; for a GPU
they pass through pinned memory, some at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zen_train.delta import tensor_digest
from zen_train.delta.manifest import CONFIG_NAME
from zen_train.delta.rows import padding_is_zero
from zen_train.errors import DeltaError
from zen_train.serve.engine.slots import Place, VariantSlots, own_stream
from zen_train.serve.engine.tensor_files import FileReader, FileStamp, memory_of, reading
from zen_train.serve.engine.variant_plan import Part, VariantPlan, open_artifact, plan_variant
from zen_train.serve.engine.weights import ServedModel
from zen_train.serve.errors import VariantUnusableError

STAGING_BYTES = 256 << 20
_MOST_KNOWN = 64  # plans kept; one is a few hundred objects
_SCALE_BYTES = 4  # scales and vectors are float32 on the device


@dataclass(slots=True)
class _Known:
    """A plan with the stamps of the files it was made from, and whether their bytes were checked."""

    plan: VariantPlan
    stamps: dict[Path, FileStamp]
    verified: bool = False


@contextmanager
def _errors_of_serving(folder: Path) -> Iterator[None]:
    """Turn errors of the artifact into VariantUnusableError."""
    try:
        yield
    except DeltaError as error:
        raise VariantUnusableError(f"the variant in {folder} cannot be served: {error}") from error


class VariantLoader:
    """Loads side by side from several threads."""

    def __init__(self, model: ServedModel, slots: VariantSlots, *, max_planes: int) -> None:
        self._model = model
        self._slots = slots
        self._max_planes = max_planes
        self._memory = _SlotMemory(model)
        self._lock = threading.Lock()
        self._known: dict[Path, _Known] = {}
        """By folder, the one used last at the end."""

    def device_bytes(self, folder: Path) -> int:
        """What the variant in `folder` takes in slots. Raises VariantUnusableError when it cannot be served."""
        with _errors_of_serving(folder), reading() as reader:
            return self._look_at(folder, reader).plan.planes * self._model.layout.slot_bytes

    def load(self, content_hash: str, folder: Path) -> Place:
        """Read, check and place a variant. Raises VariantUnusableError; the slots are empty and free then."""
        with _errors_of_serving(folder), reading() as reader:
            known = self._look_at(folder, reader)
            if known.plan.content_hash != content_hash:
                raise VariantUnusableError(
                    f"{folder} holds variant {known.plan.content_hash[:16]}, expected {content_hash[:16]}; it was "
                    "replaced. Ask for the variant again."
                )
            planes = known.plan.planes
            place = self._slots.take(planes)
            if place is None:
                raise VariantUnusableError(
                    f"variant {content_hash[:16]} needs {planes} of {self._slots.total} slots and {self._slots.free} "
                    "are free. Unload another variant, or raise variant_bytes."
                )
            try:
                self._fill(known.plan, place, reader, check=not known.verified)
            except BaseException:
                self._slots.give_back(place)
                raise
            known.verified = True
            return place

    def verify(self, folder: Path) -> None:
        """Check every byte and value of an artifact ahead of its first load, which then only copies. Uses no slot.

        Raises VariantUnusableError, as the load would.
        """
        with _errors_of_serving(folder), reading() as reader:
            known = self._look_at(folder, reader)
            for part in () if known.verified else known.plan.parts:
                stored = torch.empty(part.file.spec.shape, dtype=part.file.spec.dtype)
                reader.read([(part.file, memory_of(stored))])
                _check(part, stored)
            known.verified = True

    def _look_at(self, folder: Path, reader: FileReader) -> _Known:
        """What is known of a folder, read anew when a file was touched since.

        A file replaced between the two looks is found by its digest, since nothing is verified yet then.
        """
        with self._lock:
            known = self._known.pop(folder, None)
        if known is None or any(reader.stamp(path) != stamp for path, stamp in known.stamps.items()):
            plan = plan_variant(
                open_artifact(folder),
                self._model.layout,
                base_root=self._model.fingerprint.root,
                base_label=str(self._model.folder),
                max_planes=self._max_planes,
            )
            known = _Known(plan, {path: reader.stamp(path) for path in {*plan.files(), folder / CONFIG_NAME}})
        with self._lock:
            self._known[folder] = known
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return known

    def _fill(self, plan: VariantPlan, place: Place, reader: FileReader, *, check: bool) -> None:
        device = self._model.blocks.device
        with own_stream(device):
            for target in plan.unchanged_vectors:
                table = self._model.tables[target]
                table[place.vector] = table[0]
        for group in _groups(plan.parts, device):
            direct = [self._memory.of(part, place) for part in group]
            buffers = {
                part.label: _buffer_for(part, device)
                for part, memory in zip(group, direct, strict=True)
                if memory is None
            }
            reader.read(
                (part.file, memory_of(buffers[part.label]) if memory is None else memory)
                for part, memory in zip(group, direct, strict=True)
            )
            for part in group if check else ():
                _check(part, buffers[part.label] if part.label in buffers else self._slot_of(part, place))
            with own_stream(device):
                for part in group if buffers else ():
                    if part.label in buffers:
                        self._slot_of(part, place).copy_(buffers[part.label], non_blocking=True)

    def _slot_of(self, part: Part, place: Place) -> Tensor:
        """Where this part goes: sign uint8 `[rows, ceil(columns / 8)]`, alpha or vector float32 `[size]`."""
        stretch = slice(part.first, part.first + part.size)
        if part.kind == "vector":
            return self._model.tables[part.target][place.vector, stretch]
        bank = self._model.banks[part.target]
        whole = bank.sign_VPNB if part.kind == "sign" else bank.row_scale_VPN
        return whole[place.planes[part.plane], 0, stretch]


class _SlotMemory:
    """The bytes of all slots, so that a file is read to its slot with no tensor made on the way: a load of
    hundreds of small parts would spend most of its time on that.
    """

    def __init__(self, model: ServedModel) -> None:
        self._bytes: dict[tuple[str, str], tuple[memoryview, int]] = {}
        """(kind, target) -> bytes of the whole tensor, bytes of one slot."""
        if model.blocks.device.type != "cpu":
            return
        for target, bank in model.banks.items():
            for kind, whole in (("sign", bank.sign_VPNB), ("alpha", bank.row_scale_VPN)):
                self._bytes[kind, target] = (memory_of(whole), whole[0].nbytes)
        for target, table in model.tables.items():
            self._bytes["vector", target] = (memory_of(table), table[0].nbytes)

    def of(self, part: Part, place: Place) -> memoryview | None:
        """Where the stored bytes of this part can go as they are, or None."""
        if (part.kind, part.target) not in self._bytes:
            return None
        whole, slot_bytes = self._bytes[part.kind, part.target]
        slot = place.vector if part.kind == "vector" else place.planes[part.plane]
        row_bytes = (part.columns + 7) // 8 if part.kind == "sign" else _SCALE_BYTES
        if (
            part.file.size_bytes != part.size * row_bytes
        ):  # one scale for the matrix, or a vector of another dtype
            return None
        start = slot * slot_bytes + part.first * row_bytes
        return whole[start : start + part.file.size_bytes]


def _buffer_for(part: Part, device: torch.device) -> Tensor:
    """Memory to read a part into before it is copied to its slot."""
    return torch.empty(part.file.spec.shape, dtype=part.file.spec.dtype, pin_memory=device.type == "cuda")


def _groups(parts: tuple[Part, ...], device: torch.device) -> Iterator[list[Part]]:
    """All at once on the CPU; for another device at most STAGING_BYTES, or one part, at a time."""
    group: list[Part] = []
    held_bytes = 0
    for part in parts:
        if group and device.type != "cpu" and held_bytes + part.file.size_bytes > STAGING_BYTES:
            yield group
            group, held_bytes = [], 0
        group.append(part)
        held_bytes += part.file.size_bytes
    if group:
        yield group


def _check(part: Part, stored: Tensor) -> None:
    """The digest, then what FORMAT.md demands of the values."""
    found = tensor_digest(stored)
    if found != part.digest:
        raise DeltaError(
            f"{part.label} has digest {found[:16]}, expected {part.digest[:16]}; the file is damaged, fetch it again"
        )
    if part.kind == "sign":
        if not padding_is_zero(stored, part.columns):
            raise DeltaError(f"{part.label}: padding bits past column {part.columns} are not zero")
        return
    values = (
        stored.float().numpy()
    )  # numpy: torch would start threads for a large one, beside those of the steps
    if not np.isfinite(values).all() or (part.kind == "alpha" and (values < 0).any()):
        raise DeltaError(f"{part.label} holds NaN, infinity or a negative scale")
