"""Sign planes by matrix for `export.bits_per_weight`: measured on training text, after the last step."""

from __future__ import annotations

import lightning as L
from torch import Tensor

from zen_train.callbacks.probe import logits_function, training_batches
from zen_train.config import ExportSection
from zen_train.delta.allocate import allocate
from zen_train.delta.codec import encode
from zen_train.module import CausalLM, trained_parameters
from zen_train.sensitivity import coding_losses

MOST_PLANES = 4
SAMPLED_ROWS = 512


def planes_by_sensitivity(
    trainer: L.Trainer, module: CausalLM, config: ExportSection
) -> dict[str, int] | None:
    """How many planes each trained matrix gets; None when `export.bits_per_weight` is not set."""
    if config.bits_per_weight is None:
        return None
    source, matrices = module.base.source(), module.coded_parameters()
    originals = {name: source.get(name).to(parameter.device) for name, parameter in matrices.items()}
    trained = dict(trained_parameters(module))
    for name, parameter in trained.items():
        parameter.requires_grad_(name in matrices)
    module.model.eval()  # no dropout: the function that will be served
    with trainer.precision_plugin.forward_context():
        measured = coding_losses(
            matrices,
            originals,
            logits=logits_function(module, module.model),
            batches=training_batches(trainer, module, config.sensitivity_batches),
            scale=config.scale,
        )
    for parameter in trained.values():
        parameter.requires_grad_(True)
    module.model.train()
    losses = {
        name: (
            dropped,
            *(coded * share for share in _left_over(originals[name], matrices[name].detach(), config)),
        )
        for name, (dropped, coded) in measured.items()
    }
    return allocate(
        losses, {name: matrix.numel() for name, matrix in matrices.items()}, bits=config.bits_per_weight
    )


def _left_over(base: Tensor, tuned: Tensor, config: ExportSection) -> list[float]:
    """Squared error with 1, 2, ... planes over that with one, on a sample of rows: the loss goes with the square."""
    every = max(1, base.shape[0] // SAMPLED_ROWS)
    errors = [
        encode(base[::every], tuned[::every], scale=config.scale, planes=planes).error_square
        for planes in range(1, MOST_PLANES + 1)
    ]
    return [error / errors[0] if errors[0] else 0.0 for error in errors]
