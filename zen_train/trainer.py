"""From the configuration to a Lightning Trainer with its callbacks in order."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from rich.console import Console

from zen_train.callbacks.checkpoint import AtomicCheckpointIO, SaveLast
from zen_train.callbacks.curves import Curves
from zen_train.callbacks.distill import DistillCallback
from zen_train.callbacks.evaluate import EvaluateCallback
from zen_train.callbacks.export import ExportCallback
from zen_train.callbacks.graceful_stop import GracefulStop
from zen_train.callbacks.merge import MergeCallback
from zen_train.callbacks.progress import RunProgress
from zen_train.callbacks.validation import BestWeights, Validation
from zen_train.config import RunConfig, TrainerSection
from zen_train.delta import BaseInfo
from zen_train.evaluate import Evaluator
from zen_train.outputs import RunFolder


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """The callbacks of a run, for reading their histories afterwards."""

    curves: Curves
    merge: MergeCallback | None
    validation: Validation
    distill: DistillCallback | None
    export: ExportCallback
    evaluate: EvaluateCallback | None
    save: SaveLast
    progress: RunProgress
    stop: GracefulStop

    def in_order(self, *, progress: bool) -> list[L.Callback]:
        """The order matters: score and merge, keep the best, distill, export, save all that, then stop if asked."""
        measured: list[L.Callback | None] = [
            self.curves,
            self.merge,
            self.validation,
            self.distill,
            self.export,
            self.evaluate,
        ]
        shown = self.progress if progress else None
        return [callback for callback in [*measured, self.save, shown, self.stop] if callback is not None]


def build_callbacks(
    config: RunConfig,
    folder: RunFolder,
    *,
    base_info: BaseInfo,
    evaluator: Evaluator,
    console: Console,
    provenance: Callable[[], dict[str, Any]],
) -> Callbacks:
    """All callbacks of a run, wired to each other."""
    best = BestWeights(folder.checkpoints)
    validation = Validation(evaluator.heldout, every_n_steps=config.validate_every_n_steps, best=best)
    curves = Curves(every_n_steps=config.trainer.log_every_n_steps)
    merging = config.merge.method != "none"
    export = ExportCallback(
        config.export,
        folder=folder.delta,
        variant=config.variant.name,
        base_info=base_info,
        checkpoint_every_n_steps=config.checkpoint_every_n_steps,
        provenance=provenance,
    )
    return Callbacks(
        curves=curves,
        merge=MergeCallback(config.merge, validation=validation, folder=folder.checkpoints)
        if merging
        else None,
        validation=validation,
        distill=DistillCallback(config.export, evaluator=evaluator if config.evaluate.enabled else None)
        if config.export.distill_steps
        else None,
        export=export,
        evaluate=EvaluateCallback(evaluator, export=export) if config.evaluate.enabled else None,
        save=SaveLast(folder.last_checkpoint, every_n_steps=config.checkpoint_every_n_steps, best=best),
        progress=RunProgress(console, curves=curves, validation=validation),
        stop=GracefulStop(folder.last_checkpoint),
    )


def build_trainer(config: RunConfig, callbacks: Callbacks, *, loggers: list[Logger]) -> L.Trainer:
    """A Trainer that leaves validation, checkpoints and progress to our callbacks."""
    settings = config.trainer
    return L.Trainer(
        accelerator=settings.accelerator,
        devices=settings.devices,
        num_nodes=settings.nodes,
        strategy=_strategy(settings),
        precision=settings.precision,
        max_steps=settings.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=config.optim.clip_norm,
        callbacks=callbacks.in_order(progress=settings.progress),
        plugins=[] if settings.strategy == "fsdp2" else [AtomicCheckpointIO()],
        logger=loggers,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=settings.progress,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=settings.log_every_n_steps,
    )


def _strategy(settings: TrainerSection) -> Strategy | str:
    if settings.strategy == "fsdp2":
        return ModelParallelStrategy(data_parallel_size="auto", tensor_parallel_size=1)
    if settings.strategy == "ddp":
        return DDPStrategy()
    return "auto"


def is_leader() -> bool:
    """Whether this process is the one that talks to the user: by the launcher's variables until there is a Trainer."""
    return getattr(rank_zero_only, "rank", None) in (None, 0)


def leave_process_group() -> None:
    """Let go of the other ranks, and of what gloo's threads share with Python, while the interpreter is alive.

    A thread of gloo may be the last to hold a tensor. If it lets go while the interpreter ends, it cannot have the GIL
    any more, and a run that went well aborts (pytorch #190489). Lightning destroys a group at exit for NCCL alone;
    and that is not enough here while tensors of the run lie in cycles of references. Call it when nothing holds the
    run any more.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
