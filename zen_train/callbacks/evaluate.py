"""When base, fine-tune and delta are scored: before the first step, and after the export at the end.

It lives in the fit so that every strategy has the model in place. After `on_train_end` the module holds the delta's
weights (`W0 + delta` as read back from disk), so what was scored is what a server would load.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch.distributed as dist

from zen_train.callbacks.export import ExportCallback
from zen_train.delta import DeltaArtifact, iter_applied
from zen_train.evaluate import Evaluator
from zen_train.module import CausalLM, load_weights_


class EvaluateCallback(L.Callback):
    """Put it after the export. State: the base's score, which a resumed run cannot measure any more."""

    def __init__(self, evaluator: Evaluator, *, export: ExportCallback) -> None:
        self.evaluator = evaluator
        self.export = export
        self.seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if "base" not in self.evaluator.scores.loss:
            self._score("base")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, CausalLM)
        if (
            "fine_tune" not in self.evaluator.scores.loss
        ):  # distillation has scored it before it took it apart
            self._score("fine_tune")
        if dist.is_initialized():
            dist.barrier()
        artifact = DeltaArtifact.open(self.export.folder)
        load_weights_(pl_module, iter_applied(artifact, pl_module.base.source()))
        self._score("delta")

    def _score(self, name: str) -> None:
        started = time.perf_counter()
        self.evaluator.score(name)
        self.seconds += time.perf_counter() - started

    def state_dict(self) -> dict[str, Any]:
        scores = self.evaluator.scores
        return {"tokens": scores.tokens, "loss": dict(scores.loss), "sample": dict(scores.sample)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scores = self.evaluator.scores
        scores.tokens = state_dict["tokens"]
        scores.loss, scores.sample = dict(state_dict["loss"]), dict(state_dict["sample"])
