"""From scores to tokens, for all rows of a step at once. S rows, N words.

Order, as in vLLM: log probabilities are taken from the scores as they come; then logit_bias and min_tokens,
penalties, temperature, min_p, top_k and top_p. One uniform number per row and step, from the job's own
generator, picks the token by the inverse of the cumulative distribution in the order of the vocabulary: so a
job's tokens depend on its seed, prompt and weights, and not on what else is in the batch. A batch of greedy
jobs takes one argmax and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from zen_train.kernels.decoder import top_scores
from zen_train.serve.engine.drawing import draw
from zen_train.serve.engine.sequence import Sequence
from zen_train.serve.types import TokenLogprob

GREEDY_BELOW = 1e-5
"""A temperature below it is greedy: dividing by it would leave the range of float32."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one row gave; `token` is None where the scores were not finite."""

    token: int | None
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def sample(logits_SN: Tensor, rows: Rows[Sequence]) -> list[Sampled]:
    """Choose a token for each row. `logits_SN` is float32 and may be overwritten.

    A row with NaN, or whose best score is infinite, yields no token; the others are not touched by it.
    """
    if all(_is_plain_greedy(row) for row in rows):
        return [Sampled(token if math.isfinite(best) else None) for token, best in _best_words(logits_SN)]
    finite: list[bool] = torch.isfinite(logits_SN.amax(dim=-1)).tolist()
    if not all(finite):
        logits_SN.nan_to_num_(0.0, 0.0, 0.0)  # these rows' tokens are dropped below
    logprobs = _Logprobs(logits_SN, rows)
    _shift(logits_SN, rows)
    _penalise(logits_SN, rows)
    drawn = [index for index, row in enumerate(rows) if row.job.sampling.temperature >= GREEDY_BELOW]
    tokens = [0] * len(rows)
    if len(drawn) < len(rows):
        tokens = [token for token, _ in _best_words(logits_SN)]
    if drawn:
        scores = logits_SN if len(drawn) == len(rows) else logits_SN[drawn]
        for index, token in zip(drawn, draw(scores, [rows[index] for index in drawn]), strict=True):
            tokens[index] = token
    chosen = logprobs.of(tokens)
    return [
        Sampled(token, *chosen.get(index, (None, ()))) if ok else Sampled(None)
        for index, (token, ok) in enumerate(zip(tokens, finite, strict=True))
    ]


def _best_words(logits_SN: Tensor) -> list[tuple[int, float]]:
    """Place and value of each row's best score (of the first NaN, where there is one)."""
    value_S, place_S = top_scores(logits_SN)
    return list(zip(place_S.tolist(), value_S.tolist(), strict=True))


def _is_plain_greedy(row: Sequence) -> bool:
    s = row.job.sampling
    return (
        s.temperature < GREEDY_BELOW
        and s.logprobs is None
        and not s.logit_bias
        and not has_penalties(row)
        and row.generated_tokens >= row.job.min_tokens
    )


def has_penalties(row: Sequence) -> bool:
    """Whether the job's scores depend on the tokens so far."""
    s = row.job.sampling
    return s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1


class _Logprobs:
    """Log probabilities of the raw scores, for the rows that want them; taken before the scores are changed."""

    def __init__(self, logits_SN: Tensor, rows: Rows[Sequence]) -> None:
        wanted = {index: row.job.sampling.logprobs for index, row in enumerate(rows)}
        self._counts = {index: count for index, count in wanted.items() if count is not None}
        if not self._counts:
            return
        index = list(self._counts)
        self._logprob_RN = torch.log_softmax(logits_SN[index], dim=-1)
        most = min(max(self._counts.values()), logits_SN.shape[1])
        values_RC, tokens_RC = self._logprob_RN.topk(most, dim=-1)
        self._values, self._tokens = values_RC.tolist(), tokens_RC.tolist()

    def of(self, tokens: list[int]) -> dict[int, tuple[float, tuple[TokenLogprob, ...]]]:
        """Row -> log probability of its token, and the best alternatives."""
        if not self._counts:
            return {}
        place = torch.tensor([tokens[index] for index in self._counts], device=self._logprob_RN.device)
        chosen = self._logprob_RN.gather(1, place.unsqueeze(1)).squeeze(1).tolist()
        return {
            index: (
                chosen[at],
                tuple(
                    TokenLogprob(token, value)
                    for token, value in zip(self._tokens[at][:count], self._values[at][:count], strict=True)
                ),
            )
            for at, (index, count) in enumerate(self._counts.items())
        }


def _shift(logits_SN: Tensor, rows: Rows[Sequence]) -> None:
    """Add logit_bias, and forbid the stop tokens of jobs that are too short yet."""
    row_index: list[int] = []
    word_index: list[int] = []
    shifts: list[float] = []
    for index, row in enumerate(rows):
        for token, bias in row.job.sampling.logit_bias.items():
            row_index.append(index)
            word_index.append(token)
            shifts.append(bias)
        if row.generated_tokens < row.job.min_tokens:
            for token in row.job.stop_tokens:
                if token >= logits_SN.shape[1]:
                    continue
                row_index.append(index)
                word_index.append(token)
                shifts.append(-torch.inf)
    if row_index:
        device = logits_SN.device
        at = (torch.tensor(row_index, device=device), torch.tensor(word_index, device=device))
        logits_SN.index_put_(at, torch.tensor(shifts, device=device), accumulate=True)


def _penalise(logits_SN: Tensor, rows: Rows[Sequence]) -> None:
    """repetition (prompt and output): positive scores divided, negative multiplied; then presence and
    frequency (output).
    """
    for index, row in enumerate(rows):
        if not has_penalties(row):
            continue
        s, scores_N = row.job.sampling, logits_SN[index]
        if s.repetition_penalty != 1:
            seen = torch.tensor([*(row.prompt_set | row.generated.keys())], device=scores_N.device)
            old = scores_N[seen]
            scores_N[seen] = torch.where(old > 0, old / s.repetition_penalty, old * s.repetition_penalty)
        if row.generated and (s.presence_penalty or s.frequency_penalty):
            words = torch.tensor([*row.generated], device=scores_N.device)
            counts = torch.tensor([*row.generated.values()], dtype=torch.float32, device=scores_N.device)
            scores_N[words] -= s.presence_penalty + s.frequency_penalty * counts
