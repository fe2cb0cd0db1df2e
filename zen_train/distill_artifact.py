"""Scale distillation of an artifact that exists: base, fine-tune and text in, the same signs with better scales out."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from zen_train.base import quiet_transformers
from zen_train.data.loaders import TrainLoader, tokenised_blocks
from zen_train.data.packing import model_inputs, separates_documents
from zen_train.data.records import Record
from zen_train.data.sources import Fields, read_jsonl, read_text
from zen_train.delta import DeltaArtifact, FolderSource, full_check, unpack_bits
from zen_train.delta.apply import applied_tensor
from zen_train.delta.rescale import rescale_artifact
from zen_train.distill import Batch, CodedMatrix, distill, logits_of
from zen_train.errors import ConfigError, DeltaError

_FIGURE_TOLERANCE = 1e-3
"""Between a recorded relative error and the one found: recomputed from the same bits, it differs by rounding."""


@dataclass(frozen=True)
class Settings:
    """How long and on how much text. `learning_rate` is that of the scales' logarithms."""

    steps: int = 24
    learning_rate: float = 0.002
    context_tokens: int = 512
    batch_size: int = 2
    seed: int = 0


@dataclass(frozen=True)
class DistillReport:
    """`losses`: of every step, mean squared difference of the logits, before it."""

    folder: Path
    losses: tuple[float, ...]
    matrices: int
    seconds: float


def distill_artifact(
    delta: str | Path,
    out: str | Path,
    *,
    base: str | Path,
    tuned: str | Path,
    text: Sequence[str | Path],
    settings: Settings | None = None,
    overwrite: bool = False,
    on_step: Callable[[int, float], None] | None = None,
) -> DistillReport:
    """Fit the scales of `delta` to the logits of `tuned` on `text`, and write the result to `out`.

    Args:
        delta: folder of the artifact; it stays as it is.
        base, tuned: model folders.
        text: JSON lines (messages, prompt and completion, or text) or plain text files.

    Raises:
        DeltaError: another base or fine-tune, a damaged artifact, or one whose matrices are not stored `[out, in]`.
        DataError: text that cannot be read. OutputError: `out` exists.
    """
    started, settings = time.perf_counter(), settings or Settings()
    artifact, base_source, tuned_source = DeltaArtifact.open(delta), FolderSource(base), FolderSource(tuned)
    full_check(base_source, artifact.config.base.fingerprint, expected_label=artifact.config.base.label)
    _check_forms(artifact)
    batches = _batches([Path(path) for path in text], Path(base), settings)
    teacher = _model(tuned)
    student = copy.deepcopy(teacher)
    coded = dict(_coded(artifact, student, base_source, tuned_source))
    losses = distill(
        coded.values(),
        student=logits_of(student, model_inputs, head_is_linear=False),
        teacher=logits_of(teacher, model_inputs, head_is_linear=False),
        batches=batches,
        learning_rate=settings.learning_rate,
        on_step=on_step,
    )
    rescale_artifact(
        artifact,
        out,
        {name: matrix.alphas for name, matrix in coded.items()},
        base=base_source,
        tuned=tuned_source,
        provenance={"distilled": {"steps": len(losses), "learning_rate": settings.learning_rate}},
        overwrite=overwrite,
    )
    return DistillReport(Path(out), tuple(losses), len(coded), time.perf_counter() - started)


def _check_forms(artifact: DeltaArtifact) -> None:
    for name, entry in artifact.config.tensors.items():
        if entry.directions:
            raise DeltaError(
                f"{artifact.folder}: {name} is held as coded directions, and scales are fitted for signs alone. "
                "Export the variant with export.code=signs, or keep the scales that are there."
            )
        if entry.planes and (entry.transposed or len(entry.shape) != 2 or entry.base_rows is not None):
            raise DeltaError(
                f"{artifact.folder}: {name} {list(entry.shape)} is stored transposed, as a stack, or with added rows; "
                "scales are fitted for matrices [out, in]. Distil while training, or keep the scales that are there."
            )


def _coded(
    artifact: DeltaArtifact, student: Any, base: FolderSource, tuned: FolderSource
) -> Iterator[tuple[str, CodedMatrix]]:
    """The student's matrices as base, signs and scales; its other parameters become what the artifact holds."""
    for name, parameter in student.named_parameters():
        entry, origin = artifact.entry(name), base.get(artifact.base_name(name))
        if not entry.planes:
            parameter.data.copy_(applied_tensor(artifact, name, origin))
            continue
        whole, left = artifact.squares(name, origin, tuned.get(name))
        found, stated = (left / whole) ** 0.5 if whole else left**0.5, entry.relative_error or 0.0
        if abs(found - stated) > _FIGURE_TOLERANCE:
            raise DeltaError(
                f"{tuned.label} is not what {artifact.folder} was made of: the delta of {name} has the relative error "
                f"{found:.4g} against it, and {stated:.4g} is recorded. Give the fine-tune that was exported."
            )
        planes = [
            (unpack_bits(plane.sign, parameter.shape[1]), plane.alpha.view(-1, 1))
            for plane in artifact.planes(name, check_digest=True)
        ]
        from_base = artifact.shifted_base(name, origin, check_digest=True)
        yield name, CodedMatrix(parameter.requires_grad_(), from_base, planes, dither=False)


def _batches(paths: Sequence[Path], base: Path, settings: Settings) -> list[Batch]:
    records = [record for path in paths for record in _records(path)]
    if not records:
        raise ConfigError("no text was given; name at least one file with --text")
    blocks = tokenised_blocks(
        records,
        AutoTokenizer.from_pretrained(base),
        what="text",
        block_tokens=settings.context_tokens,
        too_long="split",
        cache=False,
        seed=settings.seed,
    )
    loader: Any = TrainLoader(
        blocks, batch_size=settings.batch_size, accumulate=1, steps=settings.steps, rank=0, world_size=1
    )
    return list(islice(iter(loader), settings.steps))


def _records(path: Path) -> list[Record]:
    return list(read_jsonl(path, Fields()) if path.suffix == ".jsonl" else read_text(path, pattern="**/*"))


def _model(folder: str | Path) -> Any:
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
    if not separates_documents(model, vocabulary=model.config.vocab_size):
        raise DeltaError(
            f"{folder}: {type(model).__name__} ignores position_ids, so that documents packed into one block would see "
            "each other. Distil while training, or keep the scales that are there."
        )
    return model.eval().requires_grad_(False)
