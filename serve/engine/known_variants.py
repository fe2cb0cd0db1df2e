"""What is known of each artifact folder: its plan, kept until a file of it is touched."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from zen_train.delta.manifest import CONFIG_NAME
from zen_train.serve.engine.checking import Stamps
from zen_train.serve.engine.direction_plan import variant_homes
from zen_train.serve.engine.slot_memory import Route, SlotMemory
from zen_train.serve.engine.tensor_files import FileReader
from zen_train.serve.engine.variant_plan import VariantPlan, open_artifact, plan_variant
from zen_train.serve.engine.weights import ServedModel

_MOST_KNOWN = 64  # plans kept; one is a few hundred objects


@dataclass(frozen=True, slots=True)
class KnownVariant:
    """A plan, the stamps of the files it was made from, and what every load of it needs."""

    plan: VariantPlan
    stamps: Stamps
    routes: tuple[Route, ...]
    """Of the plan's parts, in their order."""
    homes: tuple[Tensor, Tensor] | None
    """Of its slot, where it holds coded directions."""
    sizes: dict[str, int] = field(init=False)
    """Part -> bytes, in the same order."""

    def __post_init__(self) -> None:
        sizes = {part.label: part.file.size_bytes for part in self.plan.parts}
        object.__setattr__(self, "sizes", sizes)


class KnownVariants:
    """Any thread may look."""

    def __init__(self, model: ServedModel, memory: SlotMemory, *, max_planes: int) -> None:
        self._model = model
        self._memory = memory
        self._max_planes = max_planes
        self._lock = threading.Lock()
        self._known: dict[Path, KnownVariant] = {}
        """By folder, the one used last at the end."""

    def look_at(self, folder: Path, reader: FileReader) -> KnownVariant:
        """What is known of a folder, read anew when a file was touched since.

        A file replaced between the two looks is found by its digest, since nothing is checked yet then.

        Raises:
            VariantUnusableError, DeltaError: as `plan_variant`, and for a folder that vanished.
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
            stamps = {path: reader.stamp(path) for path in {*plan.files(), folder / CONFIG_NAME}}
            homes = variant_homes(self._model.layout, plan.directions) if plan.directions else None
            known = KnownVariant(plan, stamps, self._memory.routes(plan.parts), homes)
        with self._lock:
            self._known[folder] = known
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return known
