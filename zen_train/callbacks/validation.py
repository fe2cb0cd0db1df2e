"""Held-out loss every N optimizer steps, and the weights that scored best.

`Validation` scores the weights as they are at that optimizer step, so the best step is the one whose own validation
gave the score; a stale metric cannot be paired with newer weights (Lightning #20185, #14431, #20919). It runs its own
pass instead of Lightning's validation loop, whose interval counts micro-batches. A merge at the same step happens
before, and hands over the score of the weights that survive it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from zen_train.callbacks.cadence import Cadence
from zen_train.callbacks.snapshot import Snapshot
from zen_train.loss import IGNORE
from zen_train.module import Batch, CausalLM, trained_values

Heldout = Callable[[], Iterable[Batch]]
"""Gives this rank's share of the held-out batches, the same ones at every call."""


class BestWeights:
    """The best validated weights so far: a step, its score, and a snapshot file named after the step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step: int | None = None
        self.score = math.inf

    def offer(self, module: CausalLM, *, step: int, score: float) -> bool:
        """Keep the current weights when they score better than the best so far. All ranks call it."""
        if not score < self.score:
            return False
        Snapshot.save(self._path(step), trained_values(module), rank=module.global_rank)
        self.step, self.score = step, score
        return True

    def snapshot(self, module: CausalLM) -> Snapshot | None:
        """The best weights, or None while there are none (or their file was deleted by hand)."""
        if self.step is None:
            return None
        return Snapshot.find(self._path(self.step), trained_values(module), rank=module.global_rank)

    def prune(self) -> None:
        """Delete the files of earlier bests. Call it once the newest checkpoint, which names the best, is on disk."""
        for path in self.folder.glob("best-*.safetensors"):
            if self.step is None or not path.name.startswith(f"{self._path(self.step).stem}."):
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"best-{step:08d}.safetensors"

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "score": self.score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.score = state["step"], state["score"]


class Validation(L.Callback):
    """Scores, logs and remembers. State: the cadence and the best; both are in the checkpoint."""

    def __init__(self, heldout: Heldout, *, every_n_steps: int, best: BestWeights) -> None:
        self.heldout = heldout
        self.cadence = Cadence(every_n_steps)
        self.best = best
        self.points: list[dict[str, float]] = []
        self.seconds = 0.0
        self._fresh: tuple[int, float] | None = None

    def score(self, trainer: L.Trainer, module: CausalLM) -> float:
        """Mean held-out loss per token of the current weights, over all ranks."""
        started = time.perf_counter()
        total = torch.zeros(2, dtype=torch.float64, device=module.device)
        module.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            for batch in self.heldout():
                batch = module.transfer_batch_to_device(batch, module.device, 0)
                total[0] += module.nll(batch).double()
                total[1] += (batch["labels"] != IGNORE).sum()
        module.train()
        if dist.is_initialized():
            dist.all_reduce(total)
        self.seconds += time.perf_counter() - started
        return (total[0] / total[1]).item()

    def hand_over(self, *, step: int, score: float) -> None:
        """Take the score of the weights at `step` from whoever measured it last (the merge)."""
        self._fresh = (step, score)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, CausalLM)
        step = trainer.global_step
        if not self.cadence.due(step):
            return
        known = self._fresh is not None and self._fresh[0] == step
        score = self._fresh[1] if known and self._fresh else self.score(trainer, pl_module)
        self.points.append({"step": step, "loss": score})
        trainer.callback_metrics["val/loss"] = torch.tensor(score)
        for logger in trainer.loggers:
            logger.log_metrics({"val/loss": score}, step=step)
        self.best.offer(pl_module, step=step, score=score)

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.cadence.last_step, "best": self.best.state_dict(), "points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cadence.last_step = state_dict["last_step"]
        self.best.load_state_dict(state_dict["best"])
        self.points = list(state_dict["points"])
