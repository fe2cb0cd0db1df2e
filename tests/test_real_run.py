"""End to end on the real base and real text, as a user would: a short run, then the delta read back by transformers."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from zen_train.delta import DeltaArtifact

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, real_base_model):
    folder = tmp_path_factory.mktemp("run")
    words = ["+variant=coder", "trainer.max_steps=6", "merge=svd_average", "merge.every_n_steps=3",
             "data.eval_tokens=1024", "data.limit_records=400", "evaluate.sample_tokens=8",
             "optim.warmup_steps=2"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "zen_train", *words], cwd=folder, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    return folder / "outputs" / "coder"


def test_the_fine_tune_gains_and_the_delta_keeps_most_of_it(finished):
    headline = json.loads((finished / "metrics.json").read_text())["headline"]
    assert headline["loss_base"] - headline["loss_fine_tune"] > 0.05
    assert headline["share_kept"] > 0.5
    assert headline["size_ratio"] > 10


def test_the_applied_delta_is_the_model_that_was_measured(finished, real_base_model, tmp_path):
    """`apply` on the command line, loaded by transformers, gives `W0 + delta` exactly."""
    command = [
        sys.executable,
        "-m",
        "zen_train.delta",
        "apply",
        str(finished / "delta"),
        str(real_base_model.folder),
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "full"), "--dtype", "float32"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float32)
    artifact, source = DeltaArtifact.open(finished / "delta"), real_base_model.source()
    for name in ("model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        expected = source.get(name).float() + artifact.delta(name)
        assert torch.equal(model.get_parameter(name), expected), name
    assert torch.equal(
        model.get_parameter("model.norm.weight"), artifact.whole("model.norm.weight", "dense").float()
    )


def test_a_delta_is_refused_on_another_base(finished, tiny_base, tmp_path):
    """FastChat #1585, #262."""
    command = [
        sys.executable,
        "-m",
        "zen_train.delta",
        "apply",
        str(finished / "delta"),
        str(tiny_base.folder),
    ]
    done = subprocess.run([*command, str(tmp_path / "full")], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "smollm2" in done.stderr
    assert not os.listdir(tmp_path)
