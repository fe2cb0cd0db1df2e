"""`last.ckpt`: everything a resume needs, saved every N optimizer steps, appearing whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from zen_train.callbacks.cadence import Cadence
from zen_train.callbacks.disk import whole_file
from zen_train.callbacks.validation import BestWeights


class AtomicCheckpointIO(TorchCheckpointIO):
    """Streams to a temporary sibling, then renames. Lightning's own builds the whole file in memory first (#21823)."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        with whole_file(Path(path)) as temporary:
            torch.save(checkpoint, temporary)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: Any = None
    ) -> dict[str, Any]:
        """Tensors and plain values only (#21757, torchtune #1142): a checkpoint cannot run code."""
        return torch.load(path, map_location=map_location or "cpu", weights_only=True, mmap=True)


class SaveLast(L.Callback):
    """Every N optimizer steps, and at the last one. Put it after the callbacks whose state it saves."""

    def __init__(self, path: Path, *, every_n_steps: int, best: BestWeights) -> None:
        self.path = path
        self.cadence = Cadence(every_n_steps)
        self.best = best

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        at_the_end = step >= trainer.max_steps and self.cadence.last_step != step
        if self.cadence.due(step) or at_the_end:
            self.cadence.last_step = step
            trainer.save_checkpoint(self.path)
            if trainer.is_global_zero:
                self.best.prune()

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.cadence.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cadence.last_step = state_dict["last_step"]
