"""How much a model's output suffers when the delta of one matrix is dropped, or coded with one sign plane.

    loss(E) = 1/2 E^T F E,   F = mean over tokens of g g^T,   g = gradient of log p(y | context), y drawn from the model

F is the Fisher matrix, so that `loss` is the KL divergence, in nats a token, from the model before to the one with E
added to a matrix, to second order. A few backward passes give it for every matrix and both errors at once, where trying
one matrix after the other takes two forward passes each. With the labels of the text in place of drawn ones it would be
the empirical Fisher, which is another thing (Kunstner et al., arXiv 1905.12558).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from zen_train.aware import Scale, code_scale, row_blocks
from zen_train.delta.codec import encode
from zen_train.distill import Batch, Logits

MOST_PLANES = 4
SAMPLED_ROWS = 512


def plane_losses(
    tuned: Mapping[str, nn.Parameter],
    base: Mapping[str, Tensor],
    *,
    logits: Logits,
    batches: Iterable[Batch],
    scale: Scale,
    along_weight: float = 1.0,
) -> dict[str, tuple[float, ...]]:
    """What the output loses with 0, 1, 2, ... sign planes of each matrix, in nats a token.

    Arguments are those of `coding_losses`. The loss of further planes follows from the size of what they leave, since
    it goes with its square.
    """
    measured = coding_losses(
        tuned, base, logits=logits, batches=batches, scale=scale, along_weight=along_weight
    )
    return {
        name: (
            dropped,
            *(coded * share for share in _left_over(base[name], tuned[name].detach(), scale, along_weight)),
        )
        for name, (dropped, coded) in measured.items()
    }


def _left_over(base: Tensor, tuned: Tensor, scale: Scale, along_weight: float) -> list[float]:
    """Squared error with 1, 2, ... planes over that with one, on a sample of rows."""
    every = max(1, base.shape[0] // SAMPLED_ROWS)
    errors = [
        encode(
            base[::every], tuned[::every], scale=scale, planes=planes, along_weight=along_weight
        ).error_square
        for planes in range(1, MOST_PLANES + 1)
    ]
    return [error / errors[0] if errors[0] else 0.0 for error in errors]


def coding_losses(
    tuned: Mapping[str, nn.Parameter],
    base: Mapping[str, Tensor],
    *,
    logits: Logits,
    batches: Iterable[Batch],
    scale: Scale,
    along_weight: float = 1.0,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """(KL with the delta dropped, KL with one sign plane) of each matrix `[out, in]`, in nats a token.

    Args:
        tuned: the trained matrices, part of the model behind `logits`; their gradients are used and left empty.
        base: theirs before training, same shapes.
        along_weight: of the code, as it will be exported (see `kernels/common/along.py`).
        batches: one draw of labels each; the relative standard error of a figure is sqrt(2 / batches) at worst.
    """
    generator = torch.Generator().manual_seed(seed)
    alphas = {
        name: code_scale(parameter.data, base[name], scale=scale, along_weight=along_weight)
        for name, parameter in tuned.items()
    }
    squares = {name: torch.zeros(2, dtype=torch.float64) for name in tuned}
    tokens = 0
    for batch in batches:
        log_p_NV = torch.log_softmax(logits(batch).float(), -1)
        drawn_N1 = torch.multinomial(log_p_NV.detach().exp().cpu(), 1, generator=generator)
        log_p_NV.gather(1, drawn_N1.to(log_p_NV.device)).sum().backward()
        tokens += log_p_NV.shape[0]
        for name, parameter in tuned.items():
            if parameter.grad is not None:
                projected = _projections(parameter.grad, parameter.data, base[name], alphas[name])
                squares[name] += projected.square()
                parameter.grad = None
    losses = {name: (0.5 * square / max(tokens, 1)).tolist() for name, square in squares.items()}
    return {name: (dropped, coded) for name, (dropped, coded) in losses.items()}


@torch.no_grad()
def _projections(gradient: Tensor, tuned: Tensor, base: Tensor, alpha: Tensor) -> Tensor:
    """(<g, D>, <g, D - alpha sign D>), float64, for `D = tuned - base`."""
    along = torch.zeros((), dtype=torch.float64)
    signed_R1 = torch.empty(tuned.shape[0], 1, dtype=torch.float64)
    for rows in row_blocks(tuned):
        delta_RK = tuned[rows].float() - base[rows].float()
        part_RK = gradient[rows]
        along += (part_RK * delta_RK).sum(dtype=torch.float64).cpu()
        signed_RK = torch.where(delta_RK >= 0, part_RK, -part_RK)
        signed_R1[rows] = signed_RK.sum(1, keepdim=True, dtype=torch.float64).cpu()
    return torch.stack([along, along - (alpha.cpu() * signed_R1).sum()])
