"""One-bit-aware fine-tuning: the model holds the one-bit code of its weights while it trains.

    W = W0 + alpha * sign(L - W0),   alpha = c * mean|L - W0| by row or by matrix   (c: kernels/common/along.py)

From the end of step `start` on, `L` (the latent) is what AdamW moves and `W` is what the forward pass sees; the
gradient at `W` is applied to `L` as it is (straight-through; BinaryConnect, arXiv 1511.00363). The code is the
artifact's own, so the export of `W` loses nothing: the exported delta is the trained model.

The latents live in the optimizer's state, and the parameters of the model hold `W`. So accumulation, clipping, DDP,
`torch.compile`, validation and checkpoints need to know nothing of it. Merging does: it averages latents, since the
average of two one-bit codes is not one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zen_train.kernels.common.along import along_scale, change_sums
from zen_train.kernels.one_bit_code import one_bit_code_

Scale = Literal["row", "matrix"]
LATENT = "latent"
_BLOCK_ELEMENTS = 1 << 17  # rows at a time, so that what one operator wrote is in the cache for the next


class OneBitAdamW(torch.optim.AdamW):
    """AdamW that moves latents from the end of step `start` on, and writes their one-bit code into the parameters.

    Args:
        groups: as for AdamW.
        base: gives W0 of every parameter to be coded, `[..., out, in]`; the others are trained as usual.
        transposed: those of them that are stored `[..., in, out]`.
        start: optimizer steps of plain training before.
        scale: one alpha for each output row, or for each matrix.
        along_weight: how many times an error along the delta counts; 1 is least squares.
        latent_rate: learning rate of the latents over that of the rest.
        dither: round the code to the bf16 grid as the serving kernels do, for a forward pass in bf16, where rounding to
            nearest would take most of it back (`kernels/common/dither.py`).
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        base: Mapping[nn.Parameter, Tensor],
        transposed: Collection[nn.Parameter] = (),
        start: int,
        scale: Scale,
        along_weight: float,
        latent_rate: float,
        dither: bool,
        **adamw: Any,
    ) -> None:
        assert start >= 1, "before the first step there is nothing to code: all differences are zero"
        parts = [part for group in groups for part in _split(group, base)]
        super().__init__(parts, **adamw)
        for group in self.param_groups:
            group["steps"] = (
                0  # of our own, in the checkpoint; AdamW's counter restarts when a merge resets its moments
            )
        self.base, self.transposed = base, set(transposed)
        self.start, self.scale, self.along_weight = start, scale, along_weight
        self.latent_rate, self.dither = latent_rate, dither

    @property
    def coding(self) -> bool:
        """Whether the parameters hold their code by now."""
        return any(LATENT in state for state in self.state.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the latents (of the parameters, before `start`), and the new code."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["steps"] += 1
        if not self.coding:
            super().step()
            if self.param_groups[0]["steps"] >= self.start:
                for parameter in self.base:
                    self.state[parameter][LATENT] = parameter.detach().clone()
                self.encode()
            return loss
        held = {parameter: parameter.data for parameter in self.base}
        rates = [group["lr"] for group in self.param_groups]
        for parameter in held:
            parameter.data = self.latent(parameter)
        for group in self.param_groups:
            group["lr"] *= self.latent_rate if group["coded"] else 1.0
        try:
            super().step()
        finally:
            for parameter, data in held.items():
                parameter.data = data
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        self.encode()
        return loss

    def latent(self, parameter: nn.Parameter) -> Tensor:
        """What AdamW moves for this parameter: its latent, or itself where nothing is coded (yet)."""
        return (
            self.state[parameter].get(LATENT, parameter.data) if parameter in self.state else parameter.data
        )

    @torch.no_grad()
    def encode(self, *, exact: bool = False) -> None:
        """Write the code of every latent into its parameter; `exact`: in float32, for export."""
        for parameter, base in self.base.items():
            latent = self.state[parameter].get(LATENT) if parameter in self.state else None
            if latent is None:
                continue
            target = parameter.data
            if parameter in self.transposed:
                target, latent, base = target.mT, latent.mT, base.mT
            encode_(
                target,
                latent,
                base,
                scale=self.scale,
                along_weight=self.along_weight,
                dither=self.dither and not exact,
            )

    def reset_moments(self) -> None:
        """AdamW as at its first step; latents stay."""
        for state in self.state.values():
            for value in (value for key, value in state.items() if key != LATENT):
                value.zero_()


@torch.no_grad()
def encode_(
    target: Tensor, latent: Tensor, base: Tensor, *, scale: Scale, along_weight: float, dither: bool
) -> None:
    """`target = base + alpha * sign(latent - base)`, all `[..., out, in]`; a difference of zero counts as +1."""
    stacks = (tensor.flatten(0, -3) if tensor.ndim > 2 else [tensor] for tensor in (target, latent, base))
    for target_NK, latent_NK, base_NK in zip(*stacks, strict=True):
        one_bit_code_(
            target_NK, latent_NK, base_NK, per_row=scale == "row", along_weight=along_weight, dither=dither
        )


@torch.no_grad()
def code_scale(tuned: Tensor, base: Tensor, *, scale: Scale, along_weight: float) -> Tensor:
    """Alpha of the one-bit code of `tuned - base` `[out, in]`: `[out, 1]` or `[1, 1]`, float32, summed in float64."""
    size, square = torch.empty(2, tuned.shape[0], dtype=torch.float64, device=tuned.device)
    for rows in row_blocks(tuned):
        size[rows], square[rows] = change_sums(tuned[rows] - base[rows].float())
    return along_scale(size, square, tuned.shape[1], along_weight, per_row=scale == "row")


def row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Slices of whole rows, each small enough for the temporaries of one to stay in the cache."""
    rows = max(1, _BLOCK_ELEMENTS // max(matrix.shape[1], 1))
    for start in range(0, matrix.shape[0], rows):
        yield slice(start, start + rows)


def _split(group: Mapping[str, Any], base: Mapping[nn.Parameter, Tensor]) -> Iterator[dict[str, Any]]:
    """A group as its coded and its other parameters, so that each can have its own learning rate."""
    for coded in (True, False):
        chosen = [parameter for parameter in group["params"] if (parameter in base) == coded]
        if chosen:
            yield {**group, "params": chosen, "coded": coded}
