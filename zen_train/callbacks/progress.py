"""The progress bar: step, loss, validation loss, tokens per second, time left. Plain lines without a terminal."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_SECONDS = 15.0


class RunProgress(ProgressBar):
    """One Rich bar over optimizer steps, or a line every 15 seconds into a file."""

    def __init__(self, console: Console, *, curves: Any, validation: Any) -> None:
        super().__init__()
        self.console = console
        self.curves, self.validation = curves, validation
        self._bar: Progress | None = None
        self._task: Any = None
        self._last_line = time.monotonic()
        self._enabled = True

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        """Lightning calls this on every rank but 0."""
        self._enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._enabled and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]train[/]"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task(
                "train", total=trainer.max_steps, completed=trainer.global_step, numbers=""
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled or not self.curves.points:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step, numbers=self._numbers())
        elif time.monotonic() - self._last_line >= _LINE_SECONDS:
            self._last_line = time.monotonic()
            self.console.print(f"step {trainer.global_step}/{trainer.max_steps}  {self._numbers()}")

    def _numbers(self) -> str:
        point = self.curves.points[-1]
        validation = f"  val {self.validation.points[-1]['loss']:.3f}" if self.validation.points else ""
        return f"loss {point['train/loss']:.3f}{validation}  {point['train/tokens_per_second']:.0f} tok/s"

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's own messages go above the bar."""
        self.console.print(*args)
