"""The model under training as a function from text to logits, and training text for it, after the last step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import lightning as L
from torch import nn

from zen_train.data.packing import model_inputs
from zen_train.delta.roles import is_transposed
from zen_train.distill import Logits, logits_of
from zen_train.errors import ConfigError
from zen_train.module import Batch, CausalLM, trained_parameters


def training_batches(trainer: L.Trainer, module: CausalLM, count: int) -> list[Batch]:
    """The first micro-batches of an epoch, on the module's device."""
    loader = trainer.datamodule.train_dataloader()  # type: ignore[attr-defined]
    return [module.transfer_batch_to_device(batch, module.device, 0) for batch in islice(iter(loader), count)]


def logits_function(module: CausalLM, model: Any) -> Logits:
    """Logits at the real tokens of a batch, by `model`: the module's own or a copy of it."""
    return logits_of(model, model_inputs, head_is_linear=module.head_is_linear)


@contextmanager
def only_moving(trainer: L.Trainer, module: CausalLM, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gradients for these parameters alone, no dropout, and the run's precision; as before afterwards."""
    moving, trained = set(parameters), [parameter for _, parameter in trained_parameters(module)]
    for parameter in trained:
        parameter.requires_grad_(parameter in moving)
    module.model.eval()
    with trainer.precision_plugin.forward_context():
        yield
    for parameter in trained:
        parameter.requires_grad_(True)
    module.model.train()


def refuse_other_forms(module: CausalLM, asked: str, instead: str) -> None:
    """Raise ConfigError for matrices that are not stored `[out, in]`, before the first step."""
    model_type = module.model.config.model_type
    for name, parameter in module.coded_parameters().items():
        if parameter.ndim != 2 or is_transposed(name, model_type):
            raise ConfigError(
                f"{asked} works on matrices stored [out, in], and {name} of this {model_type} model is "
                f"{list(parameter.shape)}, stored another way. Use {instead}."
            )
