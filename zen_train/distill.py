"""Scale distillation: the scales of a one-bit delta move until its logits come near those of the fine-tune.

    minimise  mean over real tokens of (z_tuned - z)^2 / V,   z = logits of W0 + alpha * sign(W1 - W0),   over alpha

(BitDelta, arXiv 2402.10193, section 3.) Signs, norms, embeddings that are not coded, and everything else stay as they
are; padding is not counted. A scale moves as `alpha0 * exp(s)`, so that its step is relative and its sign stays. Scales
are one for each output row or one for each matrix, as `export.scale` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zen_train.aware import Scale, row_blocks
from zen_train.kernels.common.dither import dither_

Batch = Mapping[str, Tensor]
Logits = Callable[[Batch], Tensor]
"""A batch to the logits of its real tokens, `[N, V]`."""


class CodedMatrix:
    """One parameter `[out, in]` as base, signs and scales; an optimizer moves `log`, `[out, 1]` or `[1, 1]`."""

    def __init__(self, parameter: nn.Parameter, base: Tensor, *, scale: Scale, dither: bool) -> None:
        self.parameter, self.base, self.dither = parameter, base, dither
        self.positive = torch.empty(parameter.shape, dtype=torch.bool, device=parameter.device)
        sums = torch.empty(parameter.shape[0], 1, dtype=torch.float64, device=parameter.device)
        for rows in row_blocks(parameter):
            change = parameter.data[rows] - base[rows].float()
            self.positive[rows] = change >= 0
            sums[rows] = change.abs().sum(1, keepdim=True, dtype=torch.float64)
        if scale == "row":
            self.start = (sums / parameter.shape[1]).float()
        else:
            self.start = (sums.sum() / parameter.numel()).float().view(1, 1)
        self.log = torch.zeros_like(self.start, requires_grad=True)

    @property
    def alpha(self) -> Tensor:
        """`[out, 1]` or `[1, 1]`, float32."""
        return self.start * self.log.detach().exp()

    @torch.no_grad()
    def write(self, *, exact: bool = False) -> None:
        """`W0 + alpha * sign` into the parameter; dithered to the bf16 grid unless `exact`."""
        alpha = self.alpha.expand(self.parameter.shape[0], 1)
        for rows in row_blocks(self.parameter):
            coded = torch.where(self.positive[rows], alpha[rows], -alpha[rows]).add_(self.base[rows])
            self.parameter.data[rows] = dither_(coded) if self.dither and not exact else coded

    @torch.no_grad()
    def pull_gradient(self) -> None:
        """From the parameter's gradient to that of `log`; the parameter's is dropped."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            return
        by_row = torch.empty_like(gradient[:, :1])
        for rows in row_blocks(gradient):
            part = gradient[rows]
            by_row[rows] = torch.where(self.positive[rows], part, -part).sum(1, keepdim=True)
        total = by_row if self.log.shape[0] == by_row.shape[0] else by_row.sum(0, keepdim=True)
        self.log.grad = total * self.alpha


def distill(
    coded: Iterable[CodedMatrix],
    *,
    student: Logits,
    teacher: Logits,
    batches: Iterable[Batch],
    learning_rate: float,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Move the scales over `batches`, one step each; the parameters hold `W0 + alpha * sign`, exact, in the end.

    Returns the loss of every step, before it. `student` must see the parameters of `coded`; `teacher` must not.
    """
    matrices = list(coded)
    optimizer = torch.optim.Adam([matrix.log for matrix in matrices], lr=learning_rate, betas=(0.9, 0.95))
    steps = list(batches)
    losses = []
    for matrix in matrices:
        matrix.write()
    for number, batch in enumerate(steps):
        # Linear to zero: the last steps average the noise of the batches out.
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1.0 - number / len(steps))
        with torch.no_grad():
            target = teacher(batch)
        loss = (student(batch).float() - target.float()).square().mean()
        loss.backward()
        losses.append(loss.item())
        for matrix in matrices:
            matrix.pull_gradient()
        optimizer.step()
        for matrix in matrices:
            matrix.write(exact=number + 1 == len(steps))
        if on_step is not None:
            on_step(number + 1, losses[-1])
    return losses


def real_tokens(batch: Batch) -> Tensor:
    """Which places of a packed block hold text, boolean `[B, T]`: padding is documents of one token each."""
    position_BT = batch["position_ids"]
    goes_on_BT = torch.zeros_like(position_BT, dtype=torch.bool)
    goes_on_BT[:, :-1] = position_BT[:, 1:] > 0
    return (position_BT > 0) | goes_on_BT


def logits_of(model: Any, inputs: Callable[[Batch], dict[str, Any]]) -> Logits:
    """Logits of a transformers model at the real tokens of a batch."""

    def logits(batch: Batch) -> Tensor:
        hidden_BTD = model.get_decoder()(**inputs(batch))[0]
        return model.get_output_embeddings()(hidden_BTD[real_tokens(batch)])

    return logits
