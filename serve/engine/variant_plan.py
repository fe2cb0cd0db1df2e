"""What a delta artifact means for the engine: which bytes of which file go where. Every mismatch is an error
here.

Contract: the plan covers every parameter of the base, and every parameter that the artifact describes is one
of the base's; a delta that matches no module, or misses one, is refused, and never served as the base
(TGI#2505, vllm#34186). What this engine cannot serve (a matrix stored whole, a grown vocabulary) is refused
with the remedy. It reads the artifact's descriptions and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zen_train.delta import DeltaArtifact, DeltaConfig, TensorEntry
from zen_train.delta.dtypes import ARITHMETIC_DTYPES
from zen_train.delta.manifest import part_name
from zen_train.errors import DeltaError
from zen_train.serve.engine.direction_plan import check_directions, direction_parts
from zen_train.serve.engine.parameters import UNUSED_BUFFERS, Layout, MatrixPlace, VectorPlace
from zen_train.serve.engine.parts import Part, refuse
from zen_train.serve.engine.tensor_files import FilePlace, places_in
from zen_train.serve.errors import VariantUnusableError

_EXPORT_AGAIN = "Export the variant again with embedding=sign and no matrix_max_relative_error"


@dataclass(frozen=True, slots=True)
class VariantPlan:
    """All of one variant."""

    content_hash: str
    folder: Path
    planes: int
    """Slots that it takes: 1 or more."""
    parts: tuple[Part, ...]
    """In the order of their bytes in the files."""
    unchanged_vectors: tuple[str, ...]
    """Vector tables of which the variant keeps the base's entries, some or all."""
    directions: Mapping[tuple[str, int], tuple[int, ...]]
    """(fused matrix, part of it) -> how many directions have more than 0, 1, ... bits; empty: none is held so."""

    def files(self) -> set[Path]:
        """What is read."""
        return {part.file.path for part in self.parts}


def planes_of(config: DeltaConfig) -> int:
    """Slots that a variant takes: its deepest parameter's planes, and one where nothing is packed."""
    return max((entry.planes for entry in config.tensors.values()), default=0) or 1


def plan_variant(
    artifact: DeltaArtifact, layout: Layout, *, base_root: str, base_label: str, max_planes: int
) -> VariantPlan:
    """Match an artifact with the base.

    Raises:
        VariantUnusableError: another base, a parameter too many, too few or of another shape, or a form that
        is not
            served; names the tensor and the remedy.
        DeltaError: a file that is not sound.
    """
    config = artifact.config
    if config.base.fingerprint.root != base_root:
        raise VariantUnusableError(
            f"{artifact.folder} is a delta of another base: it expects {config.base.label}, and {base_label} "
            f"(fingerprint {base_root[:16]}) is served. Serve that base, or export the variant from this one."
        )
    planes = planes_of(config)
    if planes > max_planes:
        raise VariantUnusableError(
            f"{artifact.folder} has {planes} sign planes; allowed: {max_planes}. Raise max_planes, or export with "
            "fewer."
        )
    _check_coverage(artifact, layout)
    directed = check_directions(artifact, layout)
    places = places_in(artifact.shards)
    parts: list[Part] = []
    for name, entry in config.tensors.items():
        if name.endswith(UNUSED_BUFFERS):
            continue
        if name in layout.tied or entry.kind == "tied":
            _check_second_name(artifact, name, entry, layout)
        elif entry.kind == "same":
            _check_same_name(artifact, name)
        elif name in layout.matrices:
            place = layout.matrices[name]
            _check_matrix(artifact, name, entry, place)
            if entry.directions:
                parts += direction_parts(name, entry, place, places, layout)
            else:
                parts += _matrix_parts(name, entry, place, places)
        else:
            parts.append(_vector_part(artifact, name, entry, layout.vectors[name], places))
    return VariantPlan(
        content_hash=artifact.content_hash,
        folder=artifact.folder,
        planes=planes,
        parts=tuple(sorted(parts, key=lambda part: (part.file.path, part.file.offset))),
        unchanged_vectors=tuple(
            dict.fromkeys(
                place.target for name, place in layout.vectors.items() if config.tensors[name].kind == "same"
            )
        ),
        directions=directed,
    )


def _check_coverage(artifact: DeltaArtifact, layout: Layout) -> None:
    described = set(artifact.config.tensors)
    if missing := sorted(layout.names() - described):
        raise VariantUnusableError(
            f"{artifact.folder}: the delta says nothing of {missing[0]} ({len(missing)} in all), which the base has. "
            "An unchanged tensor is recorded as kind same; export the variant again."
        )
    unused = {name for name in described if name.endswith(UNUSED_BUFFERS)}
    if extra := sorted(described - unused - layout.names() - set(layout.tied)):
        raise VariantUnusableError(
            f"{artifact.folder}: {extra[0]} ({len(extra)} in all) matches no tensor of the base. "
            "Serve the base that the variant was made from, or export it again."
        )


def _check_second_name(artifact: DeltaArtifact, name: str, entry: TensorEntry, layout: Layout) -> None:
    if name not in layout.tied:
        refuse(
            artifact,
            name,
            f"is tied to {entry.target}, and in the base it is not",
            "Untie it and export again.",
        )
    if entry.kind != "tied" or entry.target != layout.tied[name]:
        refuse(
            artifact,
            name,
            f"is no longer tied to {layout.tied[name]}",
            "Tie it as the base does, export again.",
        )


def _check_same_name(artifact: DeltaArtifact, name: str) -> None:
    if artifact.base_name(name) != name:
        refuse(artifact, name, f"is the base's {artifact.base_name(name)}", "Export the variant again.")


def _check_matrix(artifact: DeltaArtifact, name: str, entry: TensorEntry, place: MatrixPlace) -> None:
    if entry.kind == "dense":
        refuse(artifact, name, "is stored whole (dense)", f"{_EXPORT_AGAIN}.")
    if entry.kind == "rows":
        grown = f"has {entry.shape[0]} rows where the base has {place.rows} (a grown vocabulary)"
        refuse(
            artifact,
            name,
            grown,
            "Train without new tokens, or serve it with: python -m zen_train.delta apply.",
        )
    if entry.rank:
        remedy = "Export it with low_rank=0, or serve what python -m zen_train.delta apply writes."
        refuse(artifact, name, f"has a low-rank part of rank {entry.rank} beside its signs", remedy)
    if entry.transposed:
        refuse(artifact, name, "is stored transposed (Conv1D)", "No served architecture has that form.")
    if artifact.base_name(name) != name:
        refuse(
            artifact, name, f"is a delta of the base's {artifact.base_name(name)}", "Tie it as the base does."
        )
    if entry.shape != (place.rows, place.columns):
        refuse(
            artifact, name, f"has shape {list(entry.shape)}", f"The base's is {[place.rows, place.columns]}."
        )


def _matrix_parts(
    name: str, entry: TensorEntry, place: MatrixPlace, files: dict[str, FilePlace]
) -> Iterator[Part]:
    kinds: tuple[Literal["sign", "alpha"], ...] = ("sign", "alpha")
    for plane in range(entry.planes):
        for kind in kinds:
            suffix = part_name(kind, plane)
            yield Part(
                label=f"{name}.{suffix}",
                kind=kind,
                file=files[f"{name}.{suffix}"],
                digest=entry.parts[suffix],
                target=place.target,
                plane=plane,
                first=place.first_row,
                size=place.rows,
                columns=place.columns,
            )


def _vector_part(
    artifact: DeltaArtifact, name: str, entry: TensorEntry, place: VectorPlace, files: dict[str, FilePlace]
) -> Part:
    if entry.kind != "dense" or entry.shape != (place.size,):
        found = f"is of kind {entry.kind} and shape {list(entry.shape)}"
        refuse(artifact, name, found, f"Needed: dense, shape {[place.size]}; export the variant again.")
    stored = files[f"{name}.dense"]
    if stored.spec.dtype not in ARITHMETIC_DTYPES:
        refuse(artifact, name, f"is {stored.spec.dtype}", "Needed: float32, float16 or bfloat16.")
    return Part(
        label=f"{name}.dense",
        kind="vector",
        file=stored,
        digest=entry.parts["dense"],
        target=place.target,
        plane=0,
        first=place.first,
        size=place.size,
        columns=0,
    )


def open_artifact(folder: Path) -> DeltaArtifact:
    """Open, with the errors of serving.

    Raises:
        VariantUnusableError: the folder vanished, or is damaged.
    """
    try:
        return DeltaArtifact.open(folder)
    except DeltaError as error:
        raise VariantUnusableError(f"the variant in {folder} cannot be served: {error}") from error
    except OSError as error:
        raise VariantUnusableError(
            f"the variant in {folder} cannot be read: {error.strerror or error}"
        ) from error
