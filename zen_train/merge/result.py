"""What merging one tensor produces: the new values, and the figures a training log wants."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from zen_train.merge.norms import norm


@dataclass(frozen=True, kw_only=True)
class TensorMerge:
    """One merged parameter.

    weight: new float32 tensor, the shape of the inputs; shares no memory with an input.
    relative_change: `||weight - newest|| / ||newest - base||`; 0 when nothing moved, `inf` when the newest
        checkpoint equals the base and the merge moved it.
    energy_kept: share of the squared Frobenius norm of the task vectors inside the kept rank (`svd_average`)
        or above the cut (`monosoup`), over all checkpoints and a whole stack; None where no cut was made.
    rank: the cut, the largest one of a stack; None where no cut was made.
    method: how the factors were computed: "gram", "randomised", "full", or "none" when none were needed.
    skipped: why the newest checkpoint was kept unchanged, or None.
    """

    weight: Tensor
    relative_change: float
    energy_kept: float | None = None
    rank: int | None = None
    method: str = "none"
    skipped: str | None = None


def skip(newest: Tensor, reason: str) -> TensorMerge:
    """The result that keeps the newest checkpoint."""
    return TensorMerge(weight=newest.clone(), relative_change=0.0, skipped=reason)


def finished(
    weight: Tensor,
    base: Tensor,
    newest: Tensor,
    *,
    energy_kept: float | None = None,
    rank: int | None = None,
    method: str = "none",
) -> TensorMerge:
    """The result for a merged `weight`; a sum that left the float32 range is skipped."""
    moved = norm(weight - newest)
    if not math.isfinite(moved):
        return skip(newest, "not finite: the merged values")
    trained = norm(newest - base)
    change = 0.0 if moved == 0.0 else moved / trained if trained > 0.0 else math.inf
    return TensorMerge(
        weight=weight, relative_change=change, energy_kept=energy_kept, rank=rank, method=method
    )
