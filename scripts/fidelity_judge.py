"""Scores of one model on one variant's held-out records, and the share of a gain with its interval."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from configured import configured

from zen_train.base import prepare_base
from zen_train.data.load import data_module
from zen_train.data.packing import model_inputs
from zen_train.loss import IGNORE, shifted
from zen_train.module import CausalLM

RESAMPLES = 2000


@dataclass(frozen=True)
class Score:
    """One model on the held-out records. `nll_R` and `tokens_R` are sums by record."""

    nll_R: Tensor
    tokens_R: Tensor
    divergence: float
    agreement: float

    @property
    def loss(self) -> float:
        return float(self.nll_R.sum() / self.tokens_R.sum())


class Judge:
    """Scores whatever weights its module holds, in float32, always on the same tokens."""

    def __init__(self, variant: str, tokens: int) -> None:
        config = configured("scale=quick", f"data.eval_tokens={tokens}", variant=variant)
        self.base = prepare_base(config.base)
        data = data_module(
            config.data, config.variant, tokenizer=self.base.tokenizer(), accumulate=1, max_steps=60
        )
        data.setup()
        self.data = data
        self.batches: list[dict[str, Any]] = [dict(batch) for batch in data.val_dataloader()]
        self.module = CausalLM(self.base, tuning=config.tuning, optim=config.optim, trainer=config.trainer)
        self.module.configure_model()
        self.module.eval()
        self.reference: list[Tensor] = []
        """Log-probabilities of the full fine-tune, by batch, in half precision."""

    @torch.no_grad()
    def score(self, *, remember: bool = False) -> Score:
        """`remember`: this model is the one that others are compared with from now on."""
        nll, records, divergence, same = [], [], 0.0, 0
        references = [] if remember else self.reference
        head = self.module.model.get_output_embeddings()
        first = 0
        for index, batch in enumerate(self.batches):
            label_BT = shifted(batch["labels"])
            kept_BT = label_BT != IGNORE
            record_BT = first + (batch["position_ids"] == 0).flatten().cumsum(0).view_as(label_BT)
            first = int(record_BT.max())
            hidden_BTD = self.module.model.get_decoder()(**model_inputs(batch))[0]
            logp_NV = torch.log_softmax(head(hidden_BTD[kept_BT]), -1)
            nll.append(-logp_NV.gather(1, label_BT[kept_BT][:, None])[:, 0].double())
            records.append(record_BT[kept_BT])
            if remember:
                references.append(logp_NV.half())
            elif references:
                target_NV = references[index].float()
                divergence += float((target_NV.exp() * (target_NV - logp_NV)).sum())
                same += int((target_NV.argmax(1) == logp_NV.argmax(1)).sum())
        self.reference = references
        names, record_N = torch.cat(records).unique(return_inverse=True)
        nll_N = torch.cat(nll)
        tokens_R = torch.zeros(len(names), dtype=torch.float64).index_add_(
            0, record_N, torch.ones_like(nll_N)
        )
        nll_R = torch.zeros(len(names), dtype=torch.float64).index_add_(0, record_N, nll_N)
        return Score(nll_R, tokens_R, divergence / len(nll_N), same / len(nll_N))


def bootstrap(base: Score, full: Score, found: Score) -> tuple[float, float]:
    """95 % interval of the share kept, in percent: records drawn with replacement, the same ones for all three."""
    records = len(base.tokens_R)
    draw = torch.randint(records, (RESAMPLES, records), generator=torch.Generator().manual_seed(0))
    sums = [score.nll_R[draw].sum(1) for score in (base, full, found)]
    kept = 100 * (sums[0] - sums[2]) / (sums[0] - sums[1])
    low, high = torch.quantile(kept, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
