"""Which kernels an engine runs: the same tokens by all of them, and names that do not fit are refused."""

from __future__ import annotations

import pytest

from tests.interpreted import interpreted
from tests.serve.engine.models import assert_equals_dense, job, load, prompt, run
from zen_train.errors import ConfigError


def test_mixed_batches_say_the_same_by_triton_as_by_the_cpu_kernels(tmp_path):
    pytest.importorskip("triton")
    said = interpreted("tests.serve.engine.triton_engine", str(tmp_path), timeout_s=300)
    for batch, kernels in (
        ("one plane", "triton_embedding"),
        ("two planes", "triton_add_"),
        ("directions", "triton_rows"),
    ):
        ours, theirs = said["auto"][batch], said["triton"][batch]
        assert ours["kernels"] == []
        assert {kernels, "triton_linear"} <= set(theirs["kernels"])
        assert len({str(events) for events in ours["said"].values()}) == len(ours["said"]) > 1
        for name, events in ours["said"].items():
            assert len(events) == 5
            for (token, logprob, top), other in zip(events, theirs["said"][name], strict=True):
                assert other == [token, pytest.approx(logprob, abs=1e-4), top]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_every_kernel_serves_what_the_dense_model_says(family, start, kernels):
    engine = start(kernels=kernels)
    load(engine, family, ["a", "two", "coded"])
    works = [
        job(name or "base", name and family.hash(name), prompt(9)) for name in (None, "a", "two", "coded")
    ]
    running = run(engine, *works)
    for work, name in zip(works, (None, "a", "two", "coded"), strict=True):
        assert_equals_dense(family.dense(name), work, running.events[work.id])


def test_kernels_that_do_not_run_here_are_refused_before_anything_is_served(start, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"engine\.kernels=triton: .*needs a CUDA device"):
        start(kernels="triton")
    with pytest.raises(ValueError, match="kernels"):
        start(kernels="cuda")
