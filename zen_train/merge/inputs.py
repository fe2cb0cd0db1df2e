"""What the merge rules accept, and how they see a parameter as matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from zen_train.errors import MergeError
from zen_train.merge.norms import sum_of_squares


def checked(base: Tensor, checkpoints: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The inputs as float32 without gradients.

    Raises MergeError for no checkpoint, shapes that differ, a type that is not floating point.
    """
    if len(checkpoints) == 0:
        raise MergeError("merge: no checkpoint given; it takes at least one, the newest last")
    for number, checkpoint in enumerate(checkpoints, start=1):
        if checkpoint.shape != base.shape:
            raise MergeError(
                f"merge: checkpoint {number} of {len(checkpoints)} has shape {tuple(checkpoint.shape)}, the "
                f"base has {tuple(base.shape)}; all must be the same parameter of one architecture"
            )
    for name, tensor in (
        ("the base", base),
        *((f"checkpoint {i}", w) for i, w in enumerate(checkpoints, start=1)),
    ):
        if not tensor.is_floating_point():
            raise MergeError(f"merge: {name} is {tensor.dtype}; only floating point parameters are merged")
    return base.detach().float(), [checkpoint.detach().float() for checkpoint in checkpoints]


def check_rank(rank: int | float | None) -> None:
    """Raise MergeError unless `rank` is None, a whole number >= 1, or a share in (0, 1)."""
    whole = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
    share = isinstance(rank, float) and 0.0 < rank < 1.0
    if not (rank is None or whole or share):
        raise MergeError(
            f"merge: rank={rank!r} must be a whole number of at least 1, a share of the smaller side "
            "strictly between 0 and 1, or None to cut nothing"
        )


def unusable(base: Tensor, checkpoints: Sequence[Tensor]) -> str | None:
    """Why this tensor cannot be merged at all, or None."""
    if base.numel() == 0:
        return "empty"
    if not math.isfinite(sum_of_squares(base)):
        return "not finite: the base"
    for number, checkpoint in enumerate(checkpoints, start=1):
        if not math.isfinite(sum_of_squares(checkpoint)):
            return f"not finite: checkpoint {number} of {len(checkpoints)}"
    return None


def as_stack(x: Tensor) -> Tensor:
    """The matrices of `x` as a view [stack, rows, columns]; no copy where the layout allows it.

    3-D: a stack of experts as it is. 2-D, and convolutions [out, in, ...] of four and more: one matrix.
    """
    if x.ndim == 3:
        return x
    return x.reshape(1, x.shape[0], -1)
