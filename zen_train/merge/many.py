"""Merging many tensors on several cores: one tensor per thread, one core per tensor.

An eigenproblem of a few hundred rows gains little from a second core (24 ms on two, 32 ms on one), so two
tensors side by side are faster than one after the other, most of all on a machine that others use too (see
`README.md`). On an accelerator one worker is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from zen_train.errors import MergeError
from zen_train.merge.result import TensorMerge
from zen_train.merge.rules import merge_tensor


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
    if count == 1:
        for name, base, checkpoints in tensors:
            yield name, merge_tensor(rule, base, checkpoints, rank=rank, seed=seed, energy=energy)
        return
    pending: deque[tuple[str, Future[TensorMerge]]] = deque()
    # The setting is per thread, but torch also keeps it as the default of threads started later.
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(max(1, threads // count),))
    try:
        for name, base, checkpoints in tensors:
            pending.append(
                (
                    name,
                    pool.submit(merge_tensor, rule, base, checkpoints, rank=rank, seed=seed, energy=energy),
                )
            )
            if len(pending) > count:
                done_name, future = pending.popleft()
                yield done_name, future.result()
        while pending:
            done_name, future = pending.popleft()
            yield done_name, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
