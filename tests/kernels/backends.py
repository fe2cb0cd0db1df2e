"""The backends that a test of the kernels goes through: the reference, and C++ on one instruction set after another."""

import pytest
import torch

from zen_train.kernels.cpu import PATHS, load

EVERYWHERE = ["reference", *PATHS] if load() else ["reference"]
"""What an operator without a second composition runs on here."""


def forced(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend of this name; an instruction set is forced by the environment, and skipped where the processor or a
    compiler lacks.
    """
    if name not in PATHS:
        return name
    if not load():
        pytest.skip("no C++ compiler here")
    if PATHS.index(name) > torch.ops.zen_train.cpu_best_path():
        pytest.skip(f"this processor does not run {name}")
    monkeypatch.setenv("ZEN_TRAIN_CPU_PATH", name)
    return "cpu"
