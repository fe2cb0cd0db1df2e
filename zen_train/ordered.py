"""One item a thread, results in the order of the items, and no more items read ahead than there are threads.

An eigenproblem of a few hundred rows gains little from a second core (24 ms on two, 32 ms on one), so two matrices side
by side are faster than one after the other, most of all on a machine that others use too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(work: Callable[[Item], Result], items: Iterable[Item], *, workers: int) -> Iterator[Result]:
    """`work` of each item, in order; torch's threads are shared out among the workers.

    At most `workers` + 1 items are taken ahead of the consumer, so memory stays near that many. An error of `work` or
    of `items` is raised where its result would come; what has not begun by then never does.
    """
    if workers == 1:
        yield from map(work, items)
        return
    threads = torch.get_num_threads()
    pending: deque[Future[Result]] = deque()
    # The setting is per thread, but torch also keeps it as the default of threads started later.
    pool = ThreadPoolExecutor(
        workers, initializer=torch.set_num_threads, initargs=(max(1, threads // workers),)
    )
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
