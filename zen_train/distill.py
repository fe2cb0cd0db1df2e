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

from zen_train.aware import Scale, code_scale, row_blocks
from zen_train.kernels.common.dither import dither_

Batch = Mapping[str, Tensor]
Logits = Callable[[Batch], Tensor]
"""A batch to the logits of its real tokens, `[N, V]`."""


class CodedMatrix:
    """One parameter `[out, in]` as base, signs and scales. An optimizer moves `logs`: for each plane `[out, 1]` or
    `[1, 1]`, the logarithm of its scales over `starts`.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        base: Tensor,
        planes: Iterable[tuple[Tensor, Tensor]],
        *,
        dither: bool,
    ) -> None:
        """`planes`: booleans `[out, in]`, true for +1, and scales `[out, 1]` or `[1, 1]`, float32."""
        self.parameter, self.base, self.dither = parameter, base, dither
        self.positives, self.starts = map(list, zip(*planes, strict=True))
        self.logs = [torch.zeros_like(start, requires_grad=True) for start in self.starts]

    @classmethod
    def of(
        cls, parameter: nn.Parameter, base: Tensor, *, scale: Scale, along_weight: float, dither: bool
    ) -> CodedMatrix:
        """The one-bit code of what the parameter holds now."""
        positive = torch.empty(parameter.shape, dtype=torch.bool, device=parameter.device)
        for rows in row_blocks(parameter):
            positive[rows] = parameter.data[rows] - base[rows].float() >= 0
        alpha = code_scale(parameter.data, base, scale=scale, along_weight=along_weight)
        return cls(parameter, base, [(positive, alpha)], dither=dither)

    @property
    def alphas(self) -> list[Tensor]:
        """For each plane `[out, 1]` or `[1, 1]`, float32."""
        return [start * log.detach().exp() for start, log in zip(self.starts, self.logs, strict=True)]

    @torch.no_grad()
    def write(self, *, exact: bool = False) -> None:
        """`W0 + sum of alpha * sign` into the parameter; dithered to the bf16 grid unless `exact`."""
        alphas = [alpha.expand(self.parameter.shape[0], 1) for alpha in self.alphas]
        for rows in row_blocks(self.parameter):
            coded = self.base[rows].float()
            for positive, alpha in zip(self.positives, alphas, strict=True):
                coded = coded + torch.where(positive[rows], alpha[rows], -alpha[rows])
            self.parameter.data[rows] = dither_(coded) if self.dither and not exact else coded

    @torch.no_grad()
    def pull_gradient(self) -> None:
        """From the parameter's gradient to that of `logs`; the parameter's is dropped."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            return
        for positive, alpha, log in zip(self.positives, self.alphas, self.logs, strict=True):
            by_row = torch.empty_like(gradient[:, :1])
            for rows in row_blocks(gradient):
                part = gradient[rows]
                by_row[rows] = torch.where(positive[rows], part, -part).sum(1, keepdim=True)
            total = by_row if log.shape[0] == by_row.shape[0] else by_row.sum(0, keepdim=True)
            log.grad = total * alpha


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
    logs = [log for matrix in matrices for log in matrix.logs]
    optimizer = torch.optim.Adam(logs, lr=learning_rate, betas=(0.9, 0.95))
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


def logits_of(
    model: Any, inputs: Callable[[Batch], dict[str, Any]], *, head_is_linear: bool = True
) -> Logits:
    """Logits of a transformers model at the real tokens of a batch; with a linear head, computed for those alone."""

    def linear(batch: Batch) -> Tensor:
        hidden_BTD = model.get_decoder()(**inputs(batch))[0]
        logits: Tensor = model.get_output_embeddings()(hidden_BTD[real_tokens(batch)])
        return logits

    def whole(batch: Batch) -> Tensor:
        logits: Tensor = model(**inputs(batch)).logits
        return logits[real_tokens(batch)]

    return linear if head_is_linear else whole
