"""Bits go where they buy most, and never beyond the budget."""

import itertools

import pytest
import torch

from zen_train.delta.allocate import allocate
from zen_train.errors import DeltaError


def total(loss, planes):
    return sum(loss[name][count] for name, count in planes.items())


def exhaustive(loss, numel, bits):
    """The best of all choices."""
    budget = bits * sum(numel.values())
    choices = (
        dict(zip(loss, counts, strict=True)) for counts in itertools.product(range(4), repeat=len(loss))
    )
    return min(total(loss, p) for p in choices if sum(numel[n] * c for n, c in p.items()) <= budget)


def draw(seed):
    """Five matrices; in two of them a second plane helps more than the first, or none helps."""
    generator = torch.Generator().manual_seed(seed)
    size = (torch.rand(5, generator=generator) * 4).exp()
    loss = {str(i): [float(s) * share for share in (1.0, 0.36, 0.12, 0.04)] for i, s in enumerate(size)}
    loss["0"] = [1.0, 0.9, 0.1, 0.1]
    loss["1"] = [0.5, 0.6, 0.7, 0.8]
    numel = {name: int(torch.randint(1, 20, (), generator=generator)) for name in loss}
    return loss, numel


@pytest.mark.parametrize("bits", [0.5, 1.0, 1.25, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_at_most_one_step_away_from_the_best_of_all_choices(seed, bits):
    loss, numel = draw(seed)
    planes = allocate(loss, numel, bits=bits)
    assert sum(numel[name] * count for name, count in planes.items()) <= bits * sum(numel.values())
    largest_step = max(losses[0] - min(losses) for losses in loss.values())
    assert (
        exhaustive(loss, numel, bits) <= total(loss, planes) <= exhaustive(loss, numel, bits) + largest_step
    )


def test_equal_matrices_of_one_size_get_equal_planes():
    loss = {name: [1.0, 0.36, 0.12] for name in "abcd"}
    assert allocate(loss, dict.fromkeys("abcd", 10), bits=1.0) == dict.fromkeys("abcd", 1)
    assert allocate(loss, dict.fromkeys("abcd", 10), bits=2.0) == dict.fromkeys("abcd", 2)


def test_what_costs_nothing_to_drop_is_dropped_and_pays_for_others():
    loss = {"idle": [0.0, 0.0, 0.0], "busy": [9.0, 3.0, 1.0]}
    assert allocate(loss, {"idle": 10, "busy": 10}, bits=1.0) == {"idle": 0, "busy": 2}


def test_a_plane_that_only_helps_with_the_next_one_is_taken_with_it():
    assert allocate({"a": [1.0, 0.99, 0.1]}, {"a": 8}, bits=2.0) == {"a": 2}
    assert allocate({"a": [1.0, 0.99, 0.1]}, {"a": 8}, bits=1.0) == {"a": 0}


def test_no_bits_are_refused():
    with pytest.raises(DeltaError, match="bits=0 a weight"):
        allocate({"a": [1.0, 0.1]}, {"a": 8}, bits=0)
