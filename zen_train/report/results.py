"""What one finished run measured: the single input of the terminal table, the HTML report, the picture,
the model card and `metrics.json`.

Contract: frozen, keyword-only dataclasses that hold plain values only, so that `RunResults.to_dict` is valid
JSON and `RunResults.from_dict` gives an equal object back. A value that is not finite is stored as None
(JSON has no NaN). Losses are mean natural-log losses per token, sizes are bytes, times are seconds.

Does not measure anything, and knows no torch, Lightning, Hydra or W&B.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from zen_train.errors import OutputError

ONE_BIT_KIND = "sign"
"""Artifact kind of a tensor stored as sign bits and scales."""
CODED_KINDS = (ONE_BIT_KIND, "directions")
"""Kinds that hold a coded delta; the others store values or nothing."""

ZEROS_WARNING_SHARE = 0.5
"""Warn when more than this share of the one-bit weights had an exactly zero delta: one bit has no zero."""


class _Plain:
    """Base of every record here: refuses unknown keys on reading and stores None for NaN and infinity."""

    __pydantic_config__ = ConfigDict(extra="forbid", frozen=True)

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, item.name, None)


@dataclass(frozen=True, kw_only=True)
class BaseModelInfo(_Plain):
    """The base model that the delta belongs to."""

    name: str
    """Hub id where there is one, else the folder or package it came from."""
    revision: str | None = None
    licence: str | None = None
    """SPDX identifier, for instance `Apache-2.0`."""
    fingerprint: str | None = None
    """Root sha256 of the base, as in the delta's config."""
    parameters: int | None = None
    hub_id: str | None = None
    """Hub id for the model card's `base_model`; None when the base is a local folder only."""


@dataclass(frozen=True, kw_only=True)
class DataSource(_Plain):
    """One source of training text."""

    name: str
    licence: str
    version: str | None = None
    url: str | None = None
    train_documents: int | None = None
    held_out_documents: int | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseSeconds(_Plain):
    """Wall-clock seconds of each phase, None for one that did not run. `total` is the whole run."""

    train: float | None = None
    merge: float | None = None
    validate: float | None = None
    export: float | None = None
    evaluate: float | None = None
    total: float | None = None

    def named(self) -> list[tuple[str, float]]:
        """The phases that ran, in order, without the total."""
        phases = (
            ("train", self.train),
            ("merge", self.merge),
            ("validate", self.validate),
            ("export", self.export),
            ("evaluate", self.evaluate),
        )
        return [(name, seconds) for name, seconds in phases if seconds is not None]


@dataclass(frozen=True, kw_only=True)
class Losses(_Plain):
    """Held-out mean loss per token (natural log) of the three models, over the same tokens."""

    base: float | None
    fine_tune: float | None
    delta: float | None
    tokens: int
    """Held-out tokens inside the loss: prompt and padding tokens are not counted."""

    @property
    def share_kept(self) -> float | None:
        """`(base - delta) / (base - fine_tune)`: 1 keeps the whole gain; None with `share_kept_reason`."""
        if self.share_kept_reason is not None:
            return None
        assert self.base is not None
        assert self.fine_tune is not None
        assert self.delta is not None
        return (self.base - self.delta) / (self.base - self.fine_tune)

    @property
    def share_kept_reason(self) -> str | None:
        """Why there is no share kept; None when there is one."""
        for name in ("base", "fine_tune", "delta"):
            if getattr(self, name) is None:
                return f"the held-out loss of the {name.replace('_', '-')} is missing or not finite"
        assert self.base is not None
        assert self.fine_tune is not None
        if self.fine_tune >= self.base:
            return f"the fine-tune did not gain on the base ({self.fine_tune:.4f} against {self.base:.4f})"
        return None

    def perplexity(self, model: str) -> float | None:
        """`exp(loss)` of `base`, `fine_tune` or `delta`; None when it is missing or overflows."""
        loss = getattr(self, model)
        return math.exp(loss) if loss is not None and loss < 700.0 else None


@dataclass(frozen=True, kw_only=True)
class KindSize(_Plain):
    """All tensors of one artifact kind (`sign`, `directions`, `dense`, `same`, `rows`, `tied`)."""

    kind: str
    tensors: int
    weights: int
    stored_bytes: int


@dataclass(frozen=True, kw_only=True)
class ArtifactSize(_Plain):
    """Size of the delta on disk against the bf16 fine-tune it stands for."""

    stored_bytes: int
    """Bytes of the tensor files of the artifact."""
    bf16_model_bytes: int
    """Bytes of the whole fine-tuned model at two bytes a weight, tied weights once."""
    by_kind: tuple[KindSize, ...] = ()

    @property
    def held_as(self) -> str:
        """How the matrices are coded, in words."""
        kinds = {kind.kind for kind in self.by_kind}
        return "coded singular directions" if "directions" in kinds else "signs and scales"

    @property
    def ratio(self) -> float | None:
        """How many times smaller the delta is than the bf16 model; None for an empty delta."""
        return self.bf16_model_bytes / self.stored_bytes if self.stored_bytes > 0 else None

    @property
    def bits_per_compressed_weight(self) -> float | None:
        """Stored bits, scales included, for each weight that a code holds; None when nothing was compressed."""
        coded = [kind for kind in self.by_kind if kind.kind in CODED_KINDS]
        weights = sum(kind.weights for kind in coded)
        return 8 * sum(kind.stored_bytes for kind in coded) / weights if weights > 0 else None


@dataclass(frozen=True, kw_only=True)
class TensorRow(_Plain):
    """One tensor of the artifact."""

    name: str
    kind: str
    shape: tuple[int, ...]
    stored_bytes: int
    zeros: float | None = None
    """Share of elements whose delta is exactly zero, 0 to 1."""
    relative_error: float | None = None
    """`||D - D_hat||_F / ||D||_F` of the delta D; None where nothing was approximated."""


@dataclass(frozen=True, kw_only=True)
class TrainPoint(_Plain):
    """Training figures after an optimizer step."""

    step: int
    loss: float | None
    lr: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationPoint(_Plain):
    """Held-out loss of the weights after an optimizer step."""

    step: int
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class MergePoint(_Plain):
    """One checkpoint merge. Losses are held-out losses just before and just after it."""

    step: int
    accepted: bool
    seconds: float | None = None
    relative_change: float | None = None
    """Norm of what the merge changed over the norm of the weights."""
    energy_kept: float | None = None
    """Share of the squared singular values that the truncation kept, 0 to 1."""
    loss_before: float | None = None
    loss_after: float | None = None


@dataclass(frozen=True, kw_only=True)
class Curves(_Plain):
    """Everything that is drawn against optimizer steps, each in ascending order of steps."""

    train: tuple[TrainPoint, ...] = ()
    validation: tuple[ValidationPoint, ...] = ()
    merges: tuple[MergePoint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample(_Plain):
    """One held-out prompt and what each model wrote. Untrusted text: every renderer must escape it."""

    prompt: str
    base: str
    fine_tune: str
    delta: str


@dataclass(frozen=True, kw_only=True)
class MergeSummary(_Plain):
    """How the run merged checkpoints."""

    method: str
    rank: int | float | None = None
    """A number of directions, or a share of the smaller side below 1."""
    every_n_steps: int | None = None
    accept: str | None = None


@dataclass(frozen=True, kw_only=True)
class Provenance(_Plain):
    """What would be needed to run it again."""

    device: str
    versions: dict[str, str]
    commit: str | None = None
    command: str | None = None
    started_at: str | None = None
    """ISO 8601 with a time zone."""
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Places(_Plain):
    """Where things are on disk, as the user should type them; None for what was not written."""

    run: str
    artifact: str | None = None
    base: str | None = None
    """Folder of the base model, for the command that applies the delta."""
    report: str | None = None
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunResults(_Plain):
    """Everything one run measured. See the module docstring for units."""

    variant: str
    base: BaseModelInfo
    losses: Losses
    size: ArtifactSize
    provenance: Provenance
    places: Places
    steps: int
    """Optimizer steps done, over all resumes."""
    tokens: int
    """Training tokens inside the loss."""
    scale: str | None = None
    """`quick` or `full`."""
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)
    merge: MergeSummary | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration, plain JSON values, nested as in the YAML."""
    data: tuple[DataSource, ...] = ()
    language: tuple[str, ...] = ()
    """ISO 639-1 codes of the training text, where known."""
    tensors: tuple[TensorRow, ...] = ()
    curves: Curves = field(default_factory=Curves)
    samples: tuple[Sample, ...] = ()
    warnings: tuple[str, ...] = ()
    """Sentences the reader must not miss; `zeros_warning` is added by the renderers."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of `from_dict`."""
        return without_non_finite(_ADAPTER.dump_python(self, mode="json"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunResults":
        """Read `to_dict` back. Raises OutputError naming keys that are unknown, missing or of wrong type."""
        try:
            return _ADAPTER.validate_python(values)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()[:5]
            )
            raise OutputError(
                f"these are not the results of a zen_train run: {problems}. "
                "Expected the fields of zen_train.report.RunResults; write the file again with this version"
            ) from error

    def zeros_share(self) -> float | None:
        """Share of exact zeros among all one-bit weights, weighted by tensor size; None when not measured."""
        measured = [
            (row.zeros, math.prod(row.shape))
            for row in self.tensors
            if row.kind == ONE_BIT_KIND and row.zeros is not None
        ]
        weights = sum(count for _, count in measured)
        return sum(zeros * count for zeros, count in measured) / weights if weights else None

    def all_warnings(self) -> list[str]:
        """`warnings`, and one more when most of the one-bit deltas are exactly zero."""
        found = list(self.warnings)
        share = self.zeros_share()
        if share is not None and share > ZEROS_WARNING_SHARE:
            found.append(
                f"{share:.0%} of the one-bit weights did not change at all in training, and one bit has no "
                "zero. Train with float32 master weights, longer, or with a higher learning rate."
            )
        return found


def without_non_finite(value: Any) -> Any:
    """A copy of plain nested values in which NaN and infinity are None, so that it is valid JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_non_finite(item) for item in value]
    return value


_ADAPTER: TypeAdapter[RunResults] = TypeAdapter(RunResults)
