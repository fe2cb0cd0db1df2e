"""What the coded directions of an artifact mean for the engine: how they stack in a slot, and what it cannot hold.

All of a variant's changed matrices are directions or none is: its tokens take one way through the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zen_train.delta import DeltaArtifact, TensorEntry
from zen_train.kernels.common import homes
from zen_train.serve.engine.parameters import Layout, MatrixPlace
from zen_train.serve.engine.parts import Part, PartKind, refuse
from zen_train.serve.engine.tensor_files import FilePlace

_MOST_PLANES = 8
_INSTEAD = "Or serve what python -m zen_train.delta apply writes."


def check_directions(artifact: DeltaArtifact, layout: Layout) -> dict[tuple[str, int], tuple[int, ...]]:
    """(fused matrix, part) -> counts by plane, of all matrices held as directions.

    Raises:
        VariantUnusableError: signs beside directions, or more of them than a slot has room for.
    """
    entries = artifact.config.tensors
    found = {name: place for name, place in layout.matrices.items() if entries[name].directions}
    signs = [name for name in layout.matrices if entries[name].planes]
    if found and signs:
        found_both = f"is held as signs and {next(iter(found))} as coded directions"
        remedy = "Export all with code=directions and embedding=sign, which lifts the embedding's bound."
        refuse(artifact, signs[0], found_both, f"{remedy} {_INSTEAD}")
    for name, place in found.items():
        counts = entries[name].directions
        room = layout.stacked[place.target][place.part] if layout.stacked else 0
        if sum(counts) > room or len(counts) > _MOST_PLANES:
            held = f"holds {sum(counts)} vectors of {len(counts)} planes; a slot has room for {room} of {_MOST_PLANES}"
            refuse(artifact, name, held, f"Export it with bits_per_weight=1 or less. {_INSTEAD}")
    return {(place.target, place.part): entries[name].directions for name, place in found.items()}


def direction_parts(
    name: str, entry: TensorEntry, place: MatrixPlace, files: dict[str, FilePlace], layout: Layout
) -> Iterator[Part]:
    """The stored tensors of one matrix."""
    first = sum(layout.stacked[place.target][: place.part])  # vectors of the parts before it
    stacked = sum(entry.directions)
    shapes: tuple[tuple[PartKind, int, int, int], ...] = (
        ("right", first, stacked, place.columns),
        ("left", 0, place.rows, stacked),
        ("scales", first, entry.directions[0], 0),
    )
    for kind, start, size, columns in shapes:
        yield Part(
            label=f"{name}.{kind}",
            kind=kind,
            file=files[f"{name}.{kind}"],
            digest=entry.parts[kind],
            target=place.target,
            plane=0,
            first=start,
            size=size,
            columns=columns,
            number=place.part,
        )


def variant_homes(
    layout: Layout, directions: Mapping[tuple[str, int], tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """`home` and `plane` of a slot, of all fused matrices side by side as `ServedModel.homes` has them."""
    made = []
    for target, rooms in layout.stacked.items():
        first = 0
        for number, room in enumerate(rooms):
            home, plane = homes(directions.get((target, number), ()), room)
            made.append((home + first, plane))
            first += room
    home_parts, plane_parts = zip(*made, strict=True)
    return torch.cat(home_parts), torch.cat(plane_parts)
