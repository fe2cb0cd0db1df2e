"""One stored tensor of an artifact and its place in the engine, and the error of what has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

from zen_train.delta import DeltaArtifact
from zen_train.serve.engine.tensor_files import FilePlace
from zen_train.serve.errors import VariantUnusableError

PartKind = Literal["sign", "alpha", "vector", "right", "left", "scales"]
DIRECTION_KINDS: tuple[PartKind, ...] = ("right", "left", "scales")


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor and where it goes."""

    label: str
    """For errors."""
    kind: PartKind
    file: FilePlace
    digest: str
    target: str
    """Fused matrix, or vector table (vector)."""
    plane: int
    first: int
    """First row of the matrix, first entry of the vector, or first stacked vector of the directions."""
    size: int
    """Rows, entries or directions."""
    columns: int
    """Of the packed bits; 0 for a vector."""
    number: int = 0
    """Which part of the fused matrix; for left vectors."""


def refuse(artifact: DeltaArtifact, name: str, found: str, remedy: str) -> NoReturn:
    """Raise VariantUnusableError."""
    raise VariantUnusableError(
        f"{artifact.folder}: {name} {found}; this engine does not serve that. {remedy}"
    )
