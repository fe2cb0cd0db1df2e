"""What the delta keeps: held-out loss and a short sample of the base, the fine-tune and the delta.

All three are scored on the same tokens in float32. Under bf16 autocast they could not be compared: the base's values
lie on the bf16 grid, so a change of a weight below half a step of that grid (0.2 % of its value) would round away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from zen_train.callbacks.validation import Heldout
from zen_train.data.tokenise import prompt_text
from zen_train.loss import IGNORE
from zen_train.module import CausalLM


@dataclass
class Scores:
    """Held-out loss per labelled token (natural log), and a sample each, by the name of the model scored."""

    tokens: int = 0
    loss: dict[str, float] = field(default_factory=dict)
    sample: dict[str, str] = field(default_factory=dict)


class Evaluator:
    """Scores whatever weights the module holds at the moment. All ranks call it."""

    def __init__(
        self,
        module: CausalLM,
        heldout: Heldout,
        *,
        tokenizer: PreTrainedTokenizerBase,
        prompt: str,
        sample_tokens: int,
    ) -> None:
        self.module, self.heldout, self.tokenizer = module, heldout, tokenizer
        self.prompt, self.sample_tokens = prompt, sample_tokens
        self.scores = Scores()

    def score(self, name: str) -> float:
        """Record loss and sample of the module's present weights under `name`."""
        self.module.eval()
        with torch.no_grad():
            self.scores.loss[name], self.scores.tokens = self._heldout_loss()
            self.scores.sample[name] = self._generate()
        self.module.train()
        return self.scores.loss[name]

    def _heldout_loss(self) -> tuple[float, int]:
        device = self.module.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in self.heldout():
            batch = self.module.transfer_batch_to_device(batch, device, 0)
            total[0] += self.module.nll(batch).double()
            total[1] += (batch["labels"] != IGNORE).sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        return (total[0] / total[1]).item(), int(total[1])

    def _generate(self) -> str:
        """Greedy continuation of the sample prompt, without its special tokens; empty for sharded weights."""
        model = self.module.model
        if self.sample_tokens == 0 or any(isinstance(p, DTensor) for p in model.parameters()):
            return ""
        text = prompt_text(self.prompt, self.tokenizer)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(
            self.module.device
        )
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.sample_tokens,
            do_sample=False,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return str(self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()
