"""From what the callbacks remember to `RunResults`, the one record that every report is made from."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zen_train.base import Base
from zen_train.config import RunConfig
from zen_train.delta import ArtifactReport
from zen_train.outputs import RunFolder
from zen_train.report import (
    ArtifactSize,
    BaseModelInfo,
    Curves,
    DataSource,
    KindSize,
    Losses,
    MergePoint,
    MergeSummary,
    PhaseSeconds,
    Places,
    Provenance,
    RunResults,
    Sample,
    TensorRow,
    TrainPoint,
    ValidationPoint,
)
from zen_train.trainer import Callbacks

_PACKAGES = ("zen-train", "torch", "lightning", "transformers", "safetensors")


def collect_results(
    config: RunConfig,
    base: Base,
    folder: RunFolder,
    callbacks: Callbacks,
    *,
    total_seconds: float,
    fit_seconds: float,
) -> RunResults:
    """Everything one finished run measured. Call it on rank 0."""
    report = callbacks.export.report
    assert report is not None
    return RunResults(
        variant=config.variant.name,
        base=_base_info(config, base, report),
        losses=_losses(callbacks),
        size=_size(report),
        provenance=provenance(config),
        places=Places(
            run=_shown(folder.root),
            artifact=_shown(folder.delta),
            report=_shown(folder.report),
            checkpoint=_shown(folder.last_checkpoint),
            base=_shown(base.folder),
        ),
        steps=config.trainer.max_steps,
        tokens=callbacks.curves.tokens_total,
        scale=config.scale,
        seconds=_seconds(callbacks, total=total_seconds, fit=fit_seconds),
        merge=MergeSummary(
            method=config.merge.method,
            rank=config.merge.rank if config.merge.method == "svd_average" else None,
            every_n_steps=config.merge.every_n_steps,
            accept=config.merge.accept,
        ),
        config=config.model_dump(mode="json"),
        data=_data(config),
        tensors=tuple(
            TensorRow(
                name=row.name,
                kind=row.kind,
                shape=tuple(row.shape),
                stored_bytes=row.size_bytes,
                zeros=row.zeros,
                relative_error=row.relative_error,
            )
            for row in report.rows
        ),
        curves=_curves(callbacks),
        samples=_samples(config, callbacks),
        warnings=tuple(report.warnings),
    )


def provenance(config: RunConfig) -> Provenance:
    """What would be needed to run it again."""
    return Provenance(
        device=torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{_processor()}, {_threads()} threads",
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        commit=_commit(),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", "zen_train", *sys.argv[1:]]),
        seed=config.seed,
    )


def _base_info(config: RunConfig, base: Base, report: ArtifactReport) -> BaseModelInfo:
    hub = config.base.kind == "hf" and not Path(config.base.path or "").is_dir()
    return BaseModelInfo(
        name=base.name,
        revision=base.revision,
        licence=base.licence,
        fingerprint=base.fingerprint.root,
        parameters=sum(_weights(row.shape) for row in report.rows if row.kind != "tied"),
        hub_id=base.name if hub else None,
    )


def _losses(callbacks: Callbacks) -> Losses:
    if callbacks.evaluate is None:
        return Losses(base=None, fine_tune=None, delta=None, tokens=0)
    scores = callbacks.evaluate.evaluator.scores
    return Losses(
        base=scores.loss["base"],
        fine_tune=scores.loss["fine_tune"],
        delta=scores.loss["delta"],
        tokens=scores.tokens,
    )


def _samples(config: RunConfig, callbacks: Callbacks) -> tuple[Sample, ...]:
    if callbacks.evaluate is None or not config.evaluate.sample_tokens:
        return ()
    sample = callbacks.evaluate.evaluator.scores.sample
    return (
        Sample(
            prompt=config.variant.sample_prompt,
            base=sample["base"],
            fine_tune=sample["fine_tune"],
            delta=sample["delta"],
        ),
    )


def _size(report: ArtifactReport) -> ArtifactSize:
    tensors, weights, stored = Counter[str](), Counter[str](), defaultdict[str, int](int)
    for row in report.rows:
        tensors[row.kind] += 1
        weights[row.kind] += _weights(row.shape)
        stored[row.kind] += row.size_bytes
    return ArtifactSize(
        stored_bytes=report.bytes_total,
        bf16_model_bytes=report.bf16_model_bytes,
        by_kind=tuple(
            KindSize(kind=kind, tensors=tensors[kind], weights=weights[kind], stored_bytes=stored[kind])
            for kind in tensors
        ),
    )


def _curves(callbacks: Callbacks) -> Curves:
    return Curves(
        train=tuple(
            TrainPoint(
                step=int(point["step"]),
                loss=point["train/loss"],
                lr=point["train/learning_rate"],
                tokens_per_s=point["train/tokens_per_second"],
            )
            for point in callbacks.curves.points
        ),
        validation=tuple(
            ValidationPoint(step=int(point["step"]), loss=point["loss"])
            for point in callbacks.validation.points
        ),
        merges=tuple(
            MergePoint(
                step=event.step,
                accepted=event.accepted,
                seconds=event.seconds,
                relative_change=event.relative_change,
                energy_kept=event.energy_kept,
                loss_before=event.loss_before,
                loss_after=event.loss_after,
            )
            for event in (callbacks.merge.events if callbacks.merge else [])
        ),
    )


def _seconds(callbacks: Callbacks, *, total: float, fit: float) -> PhaseSeconds:
    merge = sum(event.seconds for event in callbacks.merge.events) if callbacks.merge else None
    evaluate = callbacks.evaluate.seconds if callbacks.evaluate else None
    validate, export = callbacks.validation.seconds, callbacks.export.seconds
    return PhaseSeconds(
        train=fit - (merge or 0.0) - (evaluate or 0.0) - validate - export,
        merge=merge,
        validate=validate,
        export=export,
        evaluate=evaluate,
        total=total,
    )


def _data(config: RunConfig) -> tuple[DataSource, ...]:
    if config.data.kind != "corpus":
        return (
            DataSource(name=str(getattr(config.data, "path", config.data.kind)), licence="your own data"),
        )
    return tuple(
        DataSource(name=source.package, version=source.version, licence=source.licence)
        for source in config.variant.sources
    )


def _weights(shape: Any) -> int:
    return int(torch.Size(shape).numel())


def _shown(path: Path) -> str:
    """Relative to where the user stands, when it is below that."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """The commit of this source tree; None for an installed wheel."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    answer = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _threads() -> int:
    return torch.get_num_threads()
