"""Delta-CoMe as published: singular vectors in mixed precision, quantised by GPTQ on what each matrix sees.

GPTQ (arXiv 2210.17323) rounds one input after the other and moves the inputs still to come so that the output changes
least; what "output" means comes from H = X^T X, X being the inputs of the matrix on text of the fine-tune. The right
vectors see X, the left ones what the quantised right ones make of it. Widths, groups and size are those of
`fidelity_codes.delta_come`, which rounds to nearest. A matrix that multiplies nothing (the embedding) is rounded to
nearest here too; the paper leaves it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fidelity_codes import GROUP, delta_come, delta_come_widths, factors, rounded, vectors_bits
from torch import Tensor, nn

DAMPING = 0.01
"""Of the mean diagonal of H, as GPTQ's own code has it."""


def input_squares(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """H `[K, K]` of each linear layer's weight, by its name, in float32."""
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            flat_TK = inputs[0].detach().flatten(0, -2).float()
            found[name] = found.get(name, torch.zeros(())) + flat_TK.mT @ flat_TK

        return hook

    decoder = model.get_decoder()  # type: ignore[operator]
    hooks = [
        module.register_forward_hook(watch(f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.no_grad():
            for batch in batches:
                decoder(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def delta_come_gptq(delta_NK: Tensor, square_KK: Tensor | None, *, bits: float = 1.0) -> tuple[Tensor, float]:
    """(D_hat, bits) as the codes of `fidelity_codes` return them."""
    if square_KK is None:
        return delta_come(delta_NK, bits=bits)
    width_R = torch.tensor(delta_come_widths(delta_NK.shape[0], delta_NK.shape[1], bits))
    left_NR, right_RK = factors(delta_NK, len(width_R))
    right_RK = _right(right_RK, square_KK, width_R)
    left_NR = _left(left_NR, right_RK @ square_KK @ right_RK.T, width_R)
    return left_NR @ right_RK, vectors_bits(width_R) * sum(delta_NK.shape)


def _right(right_RK: Tensor, square_KK: Tensor, width_R: Tensor) -> Tensor:
    """Rows are vectors of their own width, in groups of inputs."""
    rest, out, upper_KK = right_RK.clone(), torch.empty_like(right_RK), _upper(square_KK)
    most_R = 2.0**width_R - 1
    for column in range(rest.shape[1]):
        if column % GROUP == 0:
            group = rest[:, column : column + GROUP]
            low_R = group.amin(1)
            step_R = ((group.amax(1) - low_R) / most_R).clamp_min(1e-30)
        level_R = ((rest[:, column] - low_R) / step_R).round().clamp_min(0).minimum(most_R)
        out[:, column] = level_R * step_R + low_R
        _carry(rest, out, upper_KK, column)
    return out


def _left(left_NR: Tensor, square_RR: Tensor, width_R: Tensor) -> Tensor:
    """Columns are vectors of their own width, in groups of outputs."""
    rest, out, upper_RR = left_NR.clone(), torch.empty_like(left_NR), _upper(square_RR)
    for column in range(rest.shape[1]):
        out[:, column] = rounded(rest[:, column][None], width_R[column : column + 1])[0]
        _carry(rest, out, upper_RR, column)
    return out


def _carry(rest: Tensor, out: Tensor, upper: Tensor, column: int) -> None:
    """The columns still to come make up for what rounding did to this one."""
    error = (rest[:, column] - out[:, column]) / upper[column, column]
    rest[:, column + 1 :] -= error[:, None] * upper[column, column + 1 :]


def _upper(square: Tensor) -> Tensor:
    """Cholesky factor of the damped inverse, upper."""
    damped = square.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp_min(1e-30))
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
