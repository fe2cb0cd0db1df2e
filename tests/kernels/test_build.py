"""Building the CPU kernels: what happens without a compiler, and where the file goes."""

import os
import subprocess
import sys

import pytest
import torch

from zen_train.kernels.cpu import cache_folder, load
from zen_train.kernels.cpu.build import source_hash

SCRIPT = """
import warnings
import torch
from zen_train.kernels.bitdelta_linear import DeltaBank, bitdelta_linear
bank = DeltaBank.zeros(variants=1, out_features=3, in_features=8)
x, w, v = torch.ones(2, 8), torch.ones(3, 8), torch.zeros(2, dtype=torch.int64)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert torch.equal(bitdelta_linear(x, w, bank, v), torch.full((2, 3), 8.0))
ours = [str(w.message) for w in caught if str(w.message).startswith("zen_train")]
assert len(ours) == 1, ours
assert "the slow reference is used" in ours[0] and "Install a C++20 compiler" in ours[0]
try:
    bitdelta_linear(x, w, bank, v, backend="cpu")
except ValueError as error:
    assert "needs CPU tensors and a C++ compiler" in str(error)
else:
    raise SystemExit("backend='cpu' was replaced in silence")
"""


def test_without_a_compiler_there_is_one_warning_and_the_reference(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "CXX": str(tmp_path / "no-such-compiler"),
            "ZEN_TRAIN_KERNEL_CACHE": str(tmp_path / "kept"),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert list((tmp_path / "kept").glob("*.so")) == []


def test_a_cache_folder_that_cannot_be_written_is_no_crash(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "ZEN_TRAIN_KERNEL_CACHE": str(blocker / "below")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.skipif(not load(), reason="no C++ compiler here")
def test_the_compiled_file_is_kept_under_the_hash_of_its_sources():
    assert (cache_folder() / f"zen_train_cpu_{source_hash()}.so").exists()
    assert torch.ops.zen_train.cpu_best_path() >= 0


def test_the_hash_depends_on_the_compiler(monkeypatch):
    before = source_hash()
    monkeypatch.setenv("CXX", "another-compiler")
    assert source_hash() != before
