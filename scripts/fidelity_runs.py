"""Training runs of the fidelity bench: commands that a user would type, finished ones kept and not repeated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from zen_train.delta.sources import uncompiled

WEIGHTS = "weights.safetensors"
"""The trained weights of a plain run, float32: what its checkpoint holds without the optimizer's moments."""


@dataclass(frozen=True)
class Run:
    """A finished run. `seconds`: of its training steps alone."""

    folder: Path
    seconds: float

    @property
    def delta(self) -> Path:
        return self.folder / "delta"

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name inside the model, float32) of a plain run."""
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            names = file.keys()
            for name in names:
                yield name, file.get_tensor(name)


def train(folder: Path, variant: str, words: list[str], *, threads: int | None = None) -> None:
    """The command that a user would type, into `folder`, without its evaluation: the benches measure by themselves.

    `threads`: of the run, where several run beside each other; None: as many as torch takes.
    """
    fixed = [f"+variant={variant}", "scale=quick", f"output_dir={folder}", "overwrite=true"]
    quiet = ["evaluate.enabled=false", "logger.wandb.mode=disabled"]
    environment = os.environ if threads is None else os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run(
        [sys.executable, "-m", "zen_train", *fixed, *quiet, *words],
        check=True,
        stdout=sys.stderr,
        env=environment,
    )


def trained(folder: Path, variant: str, *, steps: int, learning_rate: float, words: list[str]) -> Run:
    """A run without merging, trained now when it is not in `folder`."""
    done = folder / "run.json"
    if not done.is_file():
        train(folder, variant, [*_words(steps, learning_rate), *words])
        if not any("export.aware=true" in word for word in words):
            _keep_weights(folder)
        shutil.rmtree(folder / "checkpoints")
        seconds = json.loads((folder / "metrics.json").read_text())["results"]["seconds"]["train"]
        done.write_text(json.dumps({"seconds": seconds}))
    return Run(folder, json.loads(done.read_text())["seconds"])


def _words(steps: int, learning_rate: float) -> list[str]:
    # The bench scores by itself and takes the last weights: the run validates once, at its end.
    return [
        "merge=none",
        "data.eval_tokens=1024",
        f"trainer.max_steps={steps}",
        f"trainer.validate_every_n_steps={steps}",
        f"trainer.checkpoint_every_n_steps={steps}",
        f"optim.learning_rate={learning_rate}",
    ]


def _keep_weights(folder: Path) -> None:
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True, mmap=True, map_location="cpu")
    weights = {
        uncompiled(name.removeprefix("model.")): tensor.contiguous()
        for name, tensor in saved["state_dict"].items()
    }
    save_file(weights, folder / WEIGHTS)
