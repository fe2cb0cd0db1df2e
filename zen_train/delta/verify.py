"""Check an artifact completely: every byte that FORMAT.md speaks of, and on demand its base and its figures.

Problems are collected, so that one run names them all; a single problem makes the artifact unusable.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from zen_train.delta.artifact import DeltaArtifact
from zen_train.delta.dtypes import ARITHMETIC_DTYPES
from zen_train.delta.fingerprint import full_check
from zen_train.delta.model_files import read_sidecar
from zen_train.delta.pairing import pair_tensors
from zen_train.delta.rows import square_distance
from zen_train.delta.sources import TensorSource
from zen_train.errors import DeltaError

_SHOWN_PROBLEMS = 5
_FIGURE_TOLERANCE = 1e-4
"""Stated and recomputed errors may differ by this share: six digits are stated, sums run in another order."""
_ROWS_MAX_RELATIVE_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked. It exists only when nothing was wrong."""

    folder: Path
    content_hash: str
    tensors: int
    bytes_checked: int
    coverage: float  # share of the base's parameters that an entry accounts for
    base_checked: bool
    figures_checked: bool
    relative_error: (
        float | None
    )  # ||D - D_hat|| / ||D|| over the model, recomputed; None without the tuned model


def verify_artifact(
    folder: str | Path, *, base: TensorSource | None = None, tuned: TensorSource | None = None
) -> VerifyReport:
    """Check everything: structure, digests, padding bits, values, sidecars, coverage; with `base` every
    byte of the base against the fingerprint; with `tuned` too (needs `base`) the stated errors, recomputed
    from the stored bits.

    Raises DeltaError naming the problems found.
    """
    if tuned is not None and base is None:
        raise DeltaError(
            "the stated errors are checked against base and tuned model together; give the base too"
        )
    artifact = DeltaArtifact.open(folder)
    config = artifact.config
    problems = [str(error) for error in _content_problems(artifact)]
    if base is not None:
        try:
            full_check(base, config.base.fingerprint, expected_label=config.base.label)
        except DeltaError as error:
            problems.append(str(error))
    relative_error = None
    if base is not None and tuned is not None and not problems:
        relative_error = _check_figures(artifact, base, tuned, problems)
    if problems:
        more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise DeltaError(f"{folder} failed verification: {'; '.join(problems[:_SHOWN_PROBLEMS])}{more}")
    rows, base_specs = artifact.tensor_report(), config.base.fingerprint.specs
    covered = sum(spec.numel for name, spec in base_specs.items() if name in config.tensors)
    return VerifyReport(
        folder=Path(folder),
        content_hash=artifact.content_hash,
        tensors=len(rows),
        bytes_checked=sum(row.size_bytes for row in rows),
        coverage=covered / max(sum(spec.numel for spec in base_specs.values()), 1),
        base_checked=base is not None,
        figures_checked=tuned is not None,
        relative_error=relative_error,
    )


def _content_problems(artifact: DeltaArtifact) -> Iterator[DeltaError]:
    for name, entry in artifact.config.tensors.items():
        if entry.target is not None:
            continue
        try:
            artifact.planes(name, check_digest=True)
            if entry.directions:
                artifact.direction_parts(name, check_digest=True)
            for suffix in ("dense", "rows", "u", "v"):
                if suffix in entry.parts:
                    artifact.whole(name, suffix, check_digest=True)
        except DeltaError as error:
            yield error
    for name in artifact.config.files:
        try:
            read_sidecar(artifact, name)
        except DeltaError as error:
            yield error


def _check_figures(
    artifact: DeltaArtifact, base: TensorSource, tuned: TensorSource, problems: list[str]
) -> float | None:
    try:
        pairs, _ = pair_tensors(base, tuned)
    except DeltaError as error:
        problems.append(str(error))
        return None
    total = lost = 0.0
    for pair in pairs:
        entry = artifact.config.tensors.get(pair.name)
        if entry is None or entry.shape != pair.tuned.shape:
            problems.append(
                f"{pair.name}: the delta has no entry of the tuned shape {list(pair.tuned.shape)}"
            )
            continue
        if {pair.base.dtype, pair.tuned.dtype} <= ARITHMETIC_DTYPES:
            original, wanted = base.get(pair.base_name).cpu(), tuned.get(pair.name).cpu()
            squares = _recompute(artifact, pair.name, original, wanted, problems)
            total, lost = total + squares[0], lost + squares[1]
    return (lost / total) ** 0.5 if total else 0.0


def _recompute(
    artifact: DeltaArtifact, name: str, original: torch.Tensor, wanted: torch.Tensor, problems: list[str]
) -> tuple[float, float]:
    """(||D||^2, ||D - D_hat||^2) of one parameter, from the stored bits; the stated error is compared with
    it.
    """
    entry = artifact.config.tensors[name]
    if entry.kind == "tied":  # its values are those of its target, which has an entry of its own
        return 0.0, 0.0
    shared = wanted[: original.shape[0]] if original.shape != wanted.shape else wanted
    if entry.packed:
        delta_square, error_square = artifact.squares(name, original, shared)
    else:
        delta_square = square_distance(shared, original)
        whole = entry.kind == "dense"
        error_square = square_distance(artifact.whole(name, "dense"), wanted) if whole else delta_square
    found, stated = (
        (error_square / delta_square) ** 0.5 if delta_square else error_square**0.5,
        entry.relative_error or 0.0,
    )
    if abs(found - stated) > _FIGURE_TOLERANCE * max(stated, 1e-2):
        problems.append(f"{name}: relative error is stated as {stated:.6g}, recomputed as {found:.6g}")
    if entry.base_rows is not None:
        added = wanted[entry.base_rows :]
        off = square_distance(artifact.whole(name, "rows"), added)
        if off > _ROWS_MAX_RELATIVE_ERROR**2 * square_distance(added, torch.zeros_like(added)):
            problems.append(f"{name}: the added vocabulary rows are not those of the tuned model")
    return delta_square, error_square
