"""When scales are distilled: at the end of the fit, before the export, from the fine-tune that is there."""

from __future__ import annotations

import copy
import time
from itertools import islice
from typing import Any

import lightning as L
import torch

from zen_train.config import ExportSection
from zen_train.data.packing import model_inputs
from zen_train.delta.roles import is_transposed
from zen_train.distill import CodedMatrix, Logits, distill, logits_of, real_tokens
from zen_train.errors import ConfigError
from zen_train.evaluate import Evaluator
from zen_train.module import Batch, CausalLM, trained_parameters


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
        model_type = pl_module.model.config.model_type
        for name, parameter in pl_module.coded_parameters().items():
            if parameter.ndim != 2 or is_transposed(name, model_type):
                raise ConfigError(
                    f"export.distill_steps={self.config.distill_steps} fits matrices stored [out, in], and {name} of "
                    f"this {model_type} model is {list(parameter.shape)}, stored another way. Use "
                    "export.distill_steps=0, or export.aware=true."
                )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, CausalLM)
        if self.evaluator is not None:
            self.evaluator.score("fine_tune")
        started = time.perf_counter()
        teacher = copy.deepcopy(pl_module.model).eval().requires_grad_(False)
        source, trained = pl_module.base.source(), dict(trained_parameters(pl_module))
        coded = [
            CodedMatrix(
                parameter,
                source.get(name).to(parameter.device),
                scale=self.config.scale,
                dither=pl_module.codes_in_bf16,
            )
            for name, parameter in pl_module.coded_parameters().items()
        ]
        moving = {id(matrix.parameter) for matrix in coded}
        for parameter in trained.values():
            parameter.requires_grad_(id(parameter) in moving)
        pl_module.model.eval()  # no dropout: student and teacher are compared
        batches = [
            pl_module.transfer_batch_to_device(batch, pl_module.device, 0)
            for batch in islice(iter(trainer.datamodule.train_dataloader()), self.config.distill_steps)  # type: ignore[attr-defined]
        ]
        with trainer.precision_plugin.forward_context():
            self.losses = distill(
                coded,
                student=self._logits(pl_module, pl_module.model),
                teacher=self._logits(pl_module, teacher),
                batches=batches,
                learning_rate=self.config.distill_learning_rate,
            )
        for parameter in trained.values():
            parameter.requires_grad_(True)
        pl_module.model.train()
        self.seconds += time.perf_counter() - started

    @staticmethod
    def _logits(module: CausalLM, model: Any) -> Logits:
        if module.head_is_linear:
            return logits_of(model, model_inputs)

        def whole(batch: Batch) -> torch.Tensor:
            logits: torch.Tensor = model(**model_inputs(batch)).logits
            return logits[real_tokens(batch)]

        return whole
