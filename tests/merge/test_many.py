"""Merging many tensors on several threads: the same values, in order, with bounded read-ahead."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.merge.reference import signal_and_noise
from zen_train.errors import MergeError
from zen_train.merge import merge_tensor, merge_tensors


def _tensors(count):
    for i in range(count):
        base = torch.randn(24 + i, 16, generator=torch.Generator().manual_seed(i))
        yield f"layer.{i}", base, [base + signal_and_noise(24 + i, 16, 100 + i)]


@pytest.mark.parametrize("workers", [None, 1, 2, 3])
def test_results_come_in_order_and_equal_one_by_one(workers):
    got = list(merge_tensors("svd_average", _tensors(9), rank=3, seed=0, workers=workers))
    assert [name for name, _ in got] == [f"layer.{i}" for i in range(9)]
    for (_, result), (_, base, checkpoints) in zip(got, _tensors(9), strict=True):
        want = merge_tensor("svd_average", base, checkpoints, rank=3, seed=0).weight
        assert torch.allclose(result.weight, want, atol=1e-7)


def test_no_more_tensors_are_read_than_the_workers_and_one():
    """mergekit #107, #549: memory stays near the largest tensor."""
    read = []

    def counted():
        for item in _tensors(12):
            read.append(item[0])
            yield item

    merged = merge_tensors("mean", counted(), rank=None, seed=0, workers=2)
    for done in range(1, 8):
        next(merged)
        assert len(read) <= done + 2
    merged.close()


def _thread_count_of_a_new_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_torch_keeps_its_thread_count_also_when_the_consumer_stops_early():
    """The count of a worker is also the default of threads started later: data loading, autograd."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        merged = merge_tensors("mean", _tensors(6), rank=None, seed=0, workers=2)
        next(merged)
        merged.close()
        assert torch.get_num_threads() == 2
        assert _thread_count_of_a_new_thread() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_one_tensor_reaches_the_consumer(workers):
    wrong = [("a", torch.ones(2, 2), [torch.ones(3, 3)])]
    with pytest.raises(MergeError, match="has shape"):
        list(merge_tensors("mean", wrong, rank=None, seed=0, workers=workers))


def test_a_worker_count_below_one_is_refused():
    with pytest.raises(MergeError, match="workers=0"):
        list(merge_tensors("mean", _tensors(1), rank=None, seed=0, workers=0))
