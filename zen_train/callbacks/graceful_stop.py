"""Ctrl+C and SIGTERM: finish the optimizer step, save a checkpoint that resumes exactly, stop.

Lightning's own handling stops in the middle of a step and exits the process, so a resume would repeat or lose part of
an accumulation window. A second signal stops at once.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from zen_train.callbacks.cadence import Cadence

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunInterrupted(Exception):
    """The user stopped the run. `checkpoint` is where it can be resumed."""

    def __init__(self, checkpoint: Path, step: int) -> None:
        super().__init__(f"stopped after optimizer step {step}")
        self.checkpoint, self.step = checkpoint, step


class GracefulStop(L.Callback):
    """Put it last, so that a checkpoint saved on a stop holds what the other callbacks did at that step."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.asked = False
        self._previous: dict[int, Any] = {}
        self._steps = Cadence(1)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps.last_step = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps.due(trainer.global_step) and self._anyone_asked(pl_module.device):
            if trainer.global_step >= trainer.max_steps:
                return  # training is over; let the export finish
            trainer.save_checkpoint(self.checkpoint)
            raise RunInterrupted(self.checkpoint, trainer.global_step)

    def _anyone_asked(self, device: torch.device) -> bool:
        """All ranks stop at the same step, whichever of them the signal reached."""
        if not dist.is_initialized():
            return self.asked
        asked = torch.tensor(float(self.asked), device=device)
        dist.all_reduce(asked)
        return bool(asked)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Lightning has put back all handlers by now, its own among those that this callback found.
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._ask:
                signal.signal(number, handler)
        self._previous = {}
