"""A real run on the tiny base in seconds: the same parts that `zen_train.run` wires, with small numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

from zen_train.base import Base
from zen_train.callbacks.checkpoint import AtomicCheckpointIO, SaveLast
from zen_train.callbacks.curves import Curves
from zen_train.callbacks.merge import MergeCallback
from zen_train.callbacks.validation import BestWeights, Validation
from zen_train.config import ExportSection, MergeSection, OptimSection, TrainerSection, TuningSection
from zen_train.data.module import TextDataModule
from zen_train.data.records import Corpus, ask
from zen_train.module import CausalLM


def corpus(records: int = 60) -> Corpus:
    """Small sums, asked and answered; learnable by a byte model in a few steps."""

    def record(index: int) -> Any:
        return ask(
            f"sum-{index}",
            f"What is {index} plus {index % 7}?",
            f"It is {index + index % 7}.{' Yes.' * (index % 5)}",
        )

    return Corpus(
        name="sums",
        train=[record(index) for index in range(records)],
        heldout=[record(index) for index in range(1000, 1012)],
    )


@dataclass
class SmallRun:
    """The parts of a run, before or after `fit`."""

    trainer: L.Trainer
    module: CausalLM
    data: TextDataModule
    validation: Validation
    merge: MergeCallback | None
    curves: Curves
    checkpoint: Path

    def fit(self, *, resume: Path | None = None) -> SmallRun:
        self.trainer.fit(self.module, self.data, ckpt_path=resume, weights_only=True)
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        assert self.module.model is not None
        return {name: parameter.detach().clone() for name, parameter in self.module.model.named_parameters()}


def small_run(
    base: Base,
    folder: Path,
    *,
    max_steps: int = 6,
    accumulate: int = 1,
    batch_size: int = 2,
    merge: MergeSection | None = None,
    validate_every_n_steps: int = 2,
    save_every_n_steps: int = 2,
    tuning: TuningSection | None = None,
    optim: OptimSection | None = None,
    export: ExportSection | None = None,
    records: int = 60,
    context_tokens: int = 128,
    extra_callbacks: tuple[L.Callback, ...] = (),
    strategy: Any = "auto",
    devices: int = 1,
    **settings: Any,
) -> SmallRun:
    """Wire a run that ends after `max_steps` optimizer steps."""
    L.seed_everything(0, verbose=False)
    trainer_section = TrainerSection(max_steps=max_steps, accumulate=accumulate, **settings)
    data = TextDataModule(
        corpus(records),
        tokenizer=base.tokenizer(),
        context_tokens=context_tokens,
        batch_size=batch_size,
        accumulate=accumulate,
        max_steps=max_steps,
        eval_tokens=512,
        seed=0,
        cache=False,
    )
    module = CausalLM(
        base,
        tuning=tuning or TuningSection(),
        optim=optim or OptimSection(learning_rate=1e-2, warmup_steps=1),
        trainer=trainer_section,
        export=export,
    )
    best = BestWeights(folder / "checkpoints")
    validation = Validation(data.val_dataloader, every_n_steps=validate_every_n_steps, best=best)
    merging = MergeCallback(merge, validation=validation, folder=folder / "checkpoints") if merge else None
    curves = Curves(every_n_steps=1)
    checkpoint = folder / "checkpoints" / "last.ckpt"
    save = SaveLast(checkpoint, every_n_steps=save_every_n_steps, best=best)
    callbacks = [curves, merging, validation, save, *extra_callbacks]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        callbacks=[callback for callback in callbacks if callback is not None],
        plugins=[AtomicCheckpointIO()] if strategy in ("auto", "ddp") else [],
        logger=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    return SmallRun(trainer, module, data, validation, merging, curves, checkpoint)
