"""How much a model's output suffers when the delta of one matrix is dropped, or coded with one sign plane.

    loss(E) = 1/2 E^T F E,   F = mean over tokens of g g^T,   g = gradient of log p(y | context), y drawn from the model

F is the Fisher matrix, so that `loss` is the KL divergence, in nats a token, from the model before to the one with E
added to a matrix, to second order. A few backward passes give it for every matrix and both errors at once, where trying
one matrix after the other takes two forward passes each. With the labels of the text in place of drawn ones it would be
the empirical Fisher, which is another thing (Kunstner et al., arXiv 1905.12558).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from zen_train.aware import Scale, row_blocks

Batch = Mapping[str, Tensor]
Logits = Callable[[Batch], Tensor]
"""A batch to the logits of its real tokens, `[N, V]`."""


def coding_losses(
    tuned: Mapping[str, nn.Parameter],
    base: Mapping[str, Tensor],
    *,
    logits: Logits,
    batches: Iterable[Batch],
    scale: Scale,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """(KL with the delta dropped, KL with one sign plane) of each matrix `[out, in]`, in nats a token.

    Args:
        tuned: the trained matrices, part of the model behind `logits`; their gradients are used and left empty.
        base: theirs before training, same shapes.
        batches: one draw of labels each; the relative standard error of a figure is sqrt(2 / batches) at worst.
    """
    generator = torch.Generator().manual_seed(seed)
    squares = {name: torch.zeros(2, dtype=torch.float64) for name in tuned}
    tokens = 0
    for batch in batches:
        log_p_NV = torch.log_softmax(logits(batch).float(), -1)
        drawn_N1 = torch.multinomial(log_p_NV.detach().exp().cpu(), 1, generator=generator)
        log_p_NV.gather(1, drawn_N1.to(log_p_NV.device)).sum().backward()
        tokens += log_p_NV.shape[0]
        for name, parameter in tuned.items():
            if parameter.grad is not None:
                squares[name] += _projections(parameter.grad, parameter.data, base[name], scale).square()
                parameter.grad = None
    return {
        name: (float(dropped), float(coded))
        for name, (dropped, coded) in (
            (name, 0.5 * square / max(tokens, 1)) for name, square in squares.items()
        )
    }


@torch.no_grad()
def _projections(gradient: Tensor, tuned: Tensor, base: Tensor, scale: Scale) -> Tensor:
    """(<g, D>, <g, D - alpha sign D>), float64, for `D = tuned - base`."""
    along = torch.zeros((), dtype=torch.float64)
    signed_R, sizes_R = [], []
    for rows in row_blocks(tuned):
        delta_RK = tuned[rows].float() - base[rows].float()
        along += (gradient[rows] * delta_RK).sum(dtype=torch.float64).cpu()
        signed_R.append(torch.copysign(gradient[rows], delta_RK * gradient[rows]).sum(1, dtype=torch.float64))
        sizes_R.append(delta_RK.abs().mean(1, dtype=torch.float64))
    signed, sizes = torch.cat(signed_R).cpu(), torch.cat(sizes_R).cpu()
    alpha = sizes if scale == "row" else sizes.mean()
    return torch.stack([along, along - (alpha * signed).sum()])
