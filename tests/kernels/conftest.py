"""Kernel tests: nothing uninitialised. Memory from `torch.empty` holds NaN (or the largest integer) in every test."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
