"""Sign planes by matrix for `export.bits_per_weight`: measured on training text, after the last step."""

from __future__ import annotations

import lightning as L

from zen_train.callbacks.probe import logits_function, only_moving, training_batches
from zen_train.config import ExportSection
from zen_train.delta.allocate import allocate
from zen_train.module import CausalLM
from zen_train.sensitivity import plane_losses


def planes_by_sensitivity(
    trainer: L.Trainer, module: CausalLM, config: ExportSection
) -> dict[str, int] | None:
    """How many planes each trained matrix gets; None when signs are not to be spread."""
    if config.bits_per_weight is None or config.used_code != "signs":
        return None
    source, matrices = module.base.source(), module.coded_parameters()
    with only_moving(trainer, module, matrices.values()):
        losses = plane_losses(
            matrices,
            {name: source.get(name).to(parameter.device) for name, parameter in matrices.items()},
            logits=logits_function(module, module.model),
            batches=training_batches(trainer, module, config.sensitivity_batches),
            scale=config.scale,
            along_weight=config.along_weight,
        )
    numel = {name: matrix.numel() for name, matrix in matrices.items()}
    return allocate(losses, numel, bits=config.bits_per_weight)
