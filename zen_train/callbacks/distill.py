"""When scales are distilled: at the end of the fit, before the export, from the fine-tune that is there."""

from __future__ import annotations

import copy
import time

import lightning as L

from zen_train.callbacks.probe import logits_function, only_moving, refuse_other_forms, training_batches
from zen_train.config import ExportSection
from zen_train.distill import CodedMatrix, distill
from zen_train.evaluate import Evaluator
from zen_train.module import CausalLM


class DistillCallback(L.Callback):
    """Put it before the export. The module then holds `W0 + alpha * sign`; the fine-tune was scored before."""

    def __init__(self, config: ExportSection, *, evaluator: Evaluator | None) -> None:
        self.config = config
        self.evaluator = evaluator
        self.losses: list[float] = []
        self.seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse before the first step what could not be fitted after the last one."""
        assert isinstance(pl_module, CausalLM)
        asked = f"export.distill_steps={self.config.distill_steps}"
        refuse_other_forms(pl_module, asked, "export.distill_steps=0, or export.aware=true")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, CausalLM)
        if self.evaluator is not None:
            self.evaluator.score("fine_tune")
        started = time.perf_counter()
        teacher = copy.deepcopy(pl_module.model).eval().requires_grad_(False)
        source = pl_module.base.source()
        coded = [
            CodedMatrix.of(
                parameter,
                source.get(name).to(parameter.device),
                scale=self.config.scale,
                along_weight=self.config.along_weight,
                dither=pl_module.codes_in_bf16,
            )
            for name, parameter in pl_module.coded_parameters().items()
        ]
        with only_moving(trainer, pl_module, pl_module.coded_parameters().values()):
            self.losses = distill(
                coded,
                student=logits_function(pl_module, pl_module.model),
                teacher=logits_function(pl_module, teacher),
                batches=training_batches(trainer, pl_module, self.config.distill_steps),
                learning_rate=self.config.distill_learning_rate,
            )
        self.seconds += time.perf_counter() - started
