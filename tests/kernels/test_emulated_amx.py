"""The AMX kernels on a processor without AMX: its tests once more, with tile registers in software."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zen_train.kernels.cpu import PATHS, load

ROOT = Path(__file__).resolve().parents[2]
FILES = ["test_decoder.py", "test_bitdelta_linear.py", "test_dither.py"]


def test_the_amx_kernels_pass_their_tests_with_emulated_tiles():
    best = torch.ops.zen_train.cpu_best_path() if load() else -1
    if best != PATHS.index("avx512_bf16"):
        pytest.skip("this processor has AMX, or no AVX-512 for bf16")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.emulated_amx"),
            *("-k", "amx and (real or fold or head_scores or integer or tiled)"),
            *(f"tests/kernels/{name}" for name in FILES),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    passed = re.findall(r"(\d+) passed", run.stdout)
    assert "skipped" not in run.stdout
    assert int(passed[-1]) > 50
