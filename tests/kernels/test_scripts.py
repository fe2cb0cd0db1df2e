"""The scripts run: `gpu_check.py` dry, and one short case of `bench_kernels.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zen_train.kernels.cpu import load

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"bench", "case", "value", "unit", "bound", "holds", "against", "commit", "versions", "device"}


def lines_of(command: list[str]) -> list[dict]:
    run = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert lines
    assert all(set(line) - {"spread"} == KEYS for line in lines)
    return lines


def test_gpu_check_goes_through_all_its_steps_without_a_gpu(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "lines.jsonl"
    lines = lines_of(["scripts/gpu_check.py", "--dry-run", "--out", str(out)])
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    cases = " ".join(line["case"] for line in lines)
    assert "decode dry M16 V14" in cases
    assert "prefill dry M70 V1" in cases
    assert "one-bit code dry" in cases
    assert next(line for line in lines if line["case"] == "named cases")["value"] == 0
    for case in ("engine fp32 eager", "engine fp32 graphs", "engine bf16 eager", "engine bf16 graphs"):
        found = {line["against"]: line["value"] for line in lines if line["case"] == case}
        assert found["a decode step of 4 sequences"] > 0
        assert found["cold load from host memory"] > 0
        assert found["that read the disk again"] == 0
        if "fp32" in case:
            assert found["dense float32, first load"] < 100
            assert found["dense float32, reload"] < 100
            assert found["that the dense models would not say"] == 0


@pytest.mark.skipif(not load(), reason="no C++ compiler here")
def test_the_benchmark_prints_every_ratio_of_the_issue(monkeypatch):
    lines = lines_of(["scripts/bench_kernels.py", "--seconds", "0.1", "--shapes", "64x32", "--threads", "1"])
    bounds = {(line["case"], line["bound"]) for line in lines if line["bound"]}
    assert {bound for case, bound in bounds if case == "N64-K32-M1"} == {1.15, 0.6}
    assert {bound for case, bound in bounds if case == "N64-K32-M14"} == {1.6}
    assert {bound for case, bound in bounds if case == "N64-K32-M64"} == {1.3}
    assert {bound for case, bound in bounds if case == "N64-K32-M512"} == {1.1}
    assert {bound for case, bound in bounds if case.startswith("sign_pack")} == {0.5}
    assert {bound for case, bound in bounds if case.startswith("one_bit_code")} == {0.5, 1.0}
