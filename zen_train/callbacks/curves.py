"""The training curve: loss per labelled token, learning rate and tokens per second, by optimizer step."""

from __future__ import annotations

import time
from typing import Any

import lightning as L

from zen_train.callbacks.cadence import Cadence
from zen_train.module import CausalLM


class Curves(L.Callback):
    """Logs every N optimizer steps; the value is the mean over those steps. State: what has been drawn so far.

    The loss is over labelled tokens; the speed counts all of them, as prompts and padding cost as much.
    """

    def __init__(self, *, every_n_steps: int) -> None:
        self.cadence = Cadence(every_n_steps)
        self.points: list[dict[str, float]] = []
        self.tokens_total = 0
        self._steps = Cadence(1)
        self._tokens = 0  # with a label, in the steps since the last point
        self._seen = 0  # all of them, in the same steps
        self._nll = 0.0
        self._started = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps.last_step = trainer.global_step
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, CausalLM)
        self._seen += batch["input_ids"].numel() * trainer.world_size
        if not self._steps.due(trainer.global_step):
            return
        # A rank sees its own share of the window's tokens; times the world size it estimates the whole window.
        self._nll += pl_module.window_nll * trainer.world_size
        self._tokens += int(batch["window_tokens"])
        self.tokens_total += int(batch["window_tokens"])
        pl_module.window_nll = 0.0
        if self.cadence.due(trainer.global_step):
            self._log(trainer, pl_module)

    def _log(self, trainer: L.Trainer, pl_module: CausalLM) -> None:
        now = time.perf_counter()
        values = {
            "train/loss": self._nll / max(self._tokens, 1),
            "train/learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "train/gradient_norm": pl_module.gradient_norm,
            "train/tokens_per_second": self._seen / max(now - self._started, 1e-9),
        }
        self.points.append({"step": trainer.global_step, **values})
        trainer.callback_metrics.update({"train/loss": values["train/loss"]})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self._nll, self._tokens, self._seen, self._started = 0.0, 0, 0, now

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_step": self.cadence.last_step,
            "points": self.points,
            "tokens_total": self.tokens_total,
            "window": [self._nll, self._tokens],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cadence.last_step = state_dict["last_step"]
        self.points = list(state_dict["points"])
        self.tokens_total = state_dict["tokens_total"]
        self._nll, self._tokens = state_dict["window"]
