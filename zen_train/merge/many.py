"""Merging many tensors on several cores: one tensor per thread, one core per tensor (why: `zen_train.ordered`).

On an accelerator one worker is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zen_train.errors import MergeError
from zen_train.merge.result import TensorMerge
from zen_train.merge.rules import merge_tensor
from zen_train.ordered import in_order


def merge_tensors(
    rule: str,
    tensors: Iterable[tuple[str, Tensor, Sequence[Tensor]]],
    *,
    rank: int | float | None,
    seed: int,
    energy: float | None = None,
    workers: int | None = None,
) -> Iterator[tuple[str, TensorMerge]]:
    """Merge each `(name, base, checkpoints)` and yield `(name, result of merge_tensor)`, in the order given.

    workers: threads; None means as many as torch computes with. At most `workers` + 1 tensors are read ahead
    of the consumer, so memory stays near that many of the largest. The result is the same for any thread
    scheduling; another number of workers may change the last bit. Errors as for `merge_tensor`.
    """
    threads = torch.get_num_threads()
    count = threads if workers is None else workers
    if count < 1:
        raise MergeError(f"merge: workers={workers!r} must be at least 1, or None for torch's thread count")

    def merged(item: tuple[str, Tensor, Sequence[Tensor]]) -> tuple[str, TensorMerge]:
        name, base, checkpoints = item
        return name, merge_tensor(rule, base, checkpoints, rank=rank, seed=seed, energy=energy)

    yield from in_order(merged, tensors, workers=count)
