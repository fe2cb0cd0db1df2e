"""Codes of a fine-tune that look at text: scales fitted to its logits, and bits spread by what its output feels."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from fidelity_judge import Judge
from torch import Tensor, nn

from zen_train.config import ExportSection
from zen_train.data.packing import model_inputs
from zen_train.delta.allocate import allocate
from zen_train.delta.codec import add_delta, encode
from zen_train.distill import CodedMatrix, distill, logits_of
from zen_train.module import load_weights_
from zen_train.sensitivity import plane_losses

DISTILL_STEPS = 24
DEFAULTS = ExportSection()


def distilled(judge: Judge, tuned: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """One bit by row, scales fitted on training text."""
    load_weights_(judge.module, tuned.items())
    teacher = copy.deepcopy(judge.module.model).requires_grad_(False)
    source = judge.base.source()
    coded = [
        CodedMatrix.of(
            parameter, source.get(name), scale="row", along_weight=DEFAULTS.along_weight, dither=True
        )
        for name, parameter in matrices(judge).items()
    ]
    with torch.autocast("cpu", torch.bfloat16):
        distill(
            coded,
            student=logits_of(judge.module.model, model_inputs),
            teacher=logits_of(teacher, model_inputs),
            batches=text(judge, DISTILL_STEPS),
            learning_rate=DEFAULTS.distill_learning_rate,
        )
    return ((name, weight.detach().clone()) for name, weight in judge.module.model.named_parameters())


def losses(judge: Judge, tuned: Mapping[str, Tensor]) -> dict[str, tuple[float, ...]]:
    """By matrix, what the output loses with 0, 1, 2, ... planes, in nats a token."""
    load_weights_(judge.module, tuned.items())
    found, source = matrices(judge), judge.base.source()
    with torch.autocast("cpu", torch.bfloat16):
        return plane_losses(
            found,
            {name: source.get(name) for name in found},
            logits=logits_of(judge.module.model, model_inputs),
            batches=text(judge, DEFAULTS.sensitivity_batches),
            scale="row",
            along_weight=DEFAULTS.along_weight,
        )


def spread(
    judge: Judge, tuned: Mapping[str, Tensor], loss: Mapping[str, tuple[float, ...]], bits: float
) -> Iterator[tuple[str, Tensor]]:
    """So many bits a weight on average."""
    source = judge.base.source()
    numel = {name: tuned[name].numel() for name in loss}
    planes = allocate(loss, numel, bits=bits)
    for name, weight in tuned.items():
        if name in planes:
            origin = source.get(name)
            count = planes[name]
            coded = encode(origin, weight, planes=max(count, 1), along_weight=DEFAULTS.along_weight)
            weight = add_delta(origin, coded.planes) if count else origin.float()
        yield name, weight


def matrices(judge: Judge) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in judge.module.model.named_parameters() if weight.ndim == 2}


def text(judge: Judge, count: int) -> list[Any]:
    """Batches of training text."""
    return list(islice(iter(judge.data.train_dataloader()), count))
