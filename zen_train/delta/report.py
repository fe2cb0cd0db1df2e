"""What an export did, tensor by tensor: sizes, errors, zeros, coverage and warnings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zen_train.delta.manifest import KINDS, Kind

NOISY_ZEROS_WARNING = 0.1


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One parameter of the variant. `size_bytes` counts stored tensors; the rest as in `TensorEntry`."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    size_bytes: int
    zeros: float | None
    relative_error: float | None


@dataclass(frozen=True, slots=True)
class ArtifactReport:
    """Sizes of an artifact. `bytes_total` counts every file of the folder, `bytes_weights` leaves out
    tokenizer files and card (so do the ratios: weights are compared with weights), `bytes_by_kind` counts
    tensors only.
    """

    folder: Path
    content_hash: str
    bytes_total: int
    bytes_weights: int
    bytes_by_kind: dict[str, int]
    bf16_model_bytes: int  # the tuned model stored whole in bfloat16
    coverage: float  # share of the tuned model's parameters that an entry accounts for
    relative_error: float  # ||D - D_hat|| / ||D|| over the whole model
    rows: tuple[TensorRow, ...]
    warnings: tuple[str, ...]

    @property
    def ratio_bf16(self) -> float:
        """How many times smaller than the model in bfloat16."""
        return self.bf16_model_bytes / self.bytes_weights

    @property
    def ratio_fp32(self) -> float:
        """How many times smaller than the model in float32."""
        return 2 * self.ratio_bf16


def is_weight_file(name: str) -> bool:
    """True for the files that hold and describe tensors."""
    return name.startswith("delta")


def summarise(
    folder: Path,
    *,
    content_hash: str,
    size_by_file: Mapping[str, int],
    rows: list[TensorRow],
    tuned_numel: int,
    covered_numel: int,
    delta_square: float,
    error_square: float,
    noisy: dict[str, float],
) -> ArtifactReport:
    """Add up the rows. `noisy` is the share of zero elements that get a wrong value, by packed tensor."""
    bytes_by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
    for row in rows:
        bytes_by_kind[row.kind] += row.size_bytes
    return ArtifactReport(
        folder=folder,
        content_hash=content_hash,
        bytes_total=sum(size_by_file.values()),
        bytes_weights=sum(size for name, size in size_by_file.items() if is_weight_file(name)),
        bytes_by_kind=bytes_by_kind,
        bf16_model_bytes=2 * tuned_numel,
        coverage=covered_numel / tuned_numel if tuned_numel else 1.0,
        relative_error=(error_square / delta_square) ** 0.5 if delta_square else 0.0,
        rows=tuple(rows),
        warnings=tuple(_warnings(delta_square, noisy)),
    )


def _warnings(delta_square: float, noisy: dict[str, float]) -> Iterator[str]:
    if delta_square == 0:
        yield "the tuned model equals its base: the delta is empty"
    loud = sorted((share, name) for name, share in noisy.items() if share > NOISY_ZEROS_WARNING)
    if loud:
        share, name = loud[-1]
        yield (
            f"{len(loud)} packed tensors have more than {NOISY_ZEROS_WARNING:.0%} elements that training "
            f"left exactly unchanged ({name}: {share:.0%}); their code gives them a wrong value. Training in "
            "bfloat16 without float32 master weights does this"
        )
