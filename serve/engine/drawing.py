"""Draw one token for each row: temperature, min_p, top_k, top_p and a number of the row's own. S rows, N
words.

Rows that keep all words are drawn together, by the inverse of the running sum in the order of the
vocabulary. Rows that leave words out are drawn one by one among their best words. A word of probability zero
is never drawn. What is drawn depends on the row's scores and its number alone, so the same seed gives the
same tokens in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zen_train.serve.engine.sequence import Sequence
from zen_train.serve.types import Sampling

FLOORS = (-7.0, -14.0)
"""For top_k and top_p: logarithms of a word's probability over the best word's. Nearly all mass is above the
first.
"""
_BLOCK_WORDS = 64


def draw(scores_SN: Tensor, rows: Rows[Sequence]) -> list[int]:
    """One token for each row, by temperature, min_p, top_k, top_p and the row's own number in [0, 1)."""
    sampling = [row.job.sampling for row in rows]
    device = scores_SN.device
    heat_S1 = torch.tensor([s.temperature for s in sampling], device=device).unsqueeze(1)
    # The best score becomes 0 first: then a tiny temperature sends the others to -inf and not the best to +inf.
    scores_SN.sub_(scores_SN.amax(dim=-1, keepdim=True)).div_(heat_S1)
    numbers = [row.draws.random() for row in rows]
    wide = [index for index, s in enumerate(sampling) if not _is_narrow(s)]
    tokens = [0] * len(rows)
    for index, s in enumerate(sampling):
        if _is_narrow(s):
            tokens[index] = _draw_narrow(scores_SN[index].cpu().numpy(), s, numbers[index])
    if wide:
        share_S1 = torch.tensor(
            [numbers[index] for index in wide], dtype=torch.float64, device=device
        ).unsqueeze(1)
        weight_SN = (scores_SN if len(wide) == len(rows) else scores_SN[wide]).exp_()
        for index, token in zip(wide, word_at(weight_SN, share_S1), strict=True):
            tokens[index] = token
    return tokens


def _is_narrow(s: Sampling) -> bool:
    """Whether some words are left out."""
    return s.top_k > 0 or s.top_p < 1 or s.min_p > 0


def word_at(weight_SN: Tensor, share_S1: Tensor) -> list[int]:
    """The first word at which the running sum of weights exceeds that share of the total: never one of
    weight 0.

    Sums of blocks are searched first, then the one block: a running sum over all words cannot be vectorised.
    """
    s, n = weight_SN.shape
    if n % _BLOCK_WORDS:
        weight_SN = torch.nn.functional.pad(weight_SN, (0, -n % _BLOCK_WORDS))
    weight_SBW = weight_SN.view(s, -1, _BLOCK_WORDS)
    until_SB = weight_SBW.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    block_S1, rest_S1 = _first_above(until_SB, share_S1 * until_SB[:, -1:])
    inside_SW = (
        weight_SBW[torch.arange(s, device=weight_SN.device), block_S1.squeeze(1)].double().cumsum(dim=-1)
    )
    word_S1, _ = _first_above(inside_SW, rest_S1)
    return (block_S1 * _BLOCK_WORDS + word_S1).squeeze(1).tolist()


def _first_above(until_SN: Tensor, aim_S1: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of each row where a running sum exceeds `aim` (kept below the total), and what is left
    of it there.
    """
    total_S1 = until_SN[:, -1:]
    aim_S1 = torch.minimum(aim_S1, torch.nextafter(total_S1, torch.zeros_like(total_S1)))
    place_S1 = torch.searchsorted(until_SN, aim_S1.contiguous(), right=True)
    before_S1 = until_SN.gather(1, (place_S1 - 1).clamp(min=0))
    return place_S1, torch.where(place_S1 > 0, aim_S1 - before_S1, aim_S1).clamp(min=0)


def _draw_narrow(scores_N: npt.NDArray[np.float32], s: Sampling, number: float) -> int:
    """Draw by min_p, top_k and top_p. The best score is 0.

    Sorting all words would take longer than a row's share of the forward, so only those above a floor are
    sorted; the floor falls until the words above it are surely enough.
    """
    lowest = math.log(s.min_p) if s.min_p > 0 else -math.inf
    total = (
        float(np.exp(scores_N[scores_N >= lowest] if s.min_p > 0 else scores_N).sum()) if s.top_p < 1 else 0.0
    )
    for floor in (*FLOORS, lowest):
        index = np.flatnonzero(scores_N >= max(floor, lowest))
        weight = np.exp(scores_N[index].astype(np.float64))
        if floor <= lowest or (
            len(index) >= s.top_k if s.top_k else s.top_p < 1 and weight.sum() >= s.top_p * total
        ):
            break
    order = np.argsort(-weight, kind="stable")[: s.top_k or None]
    until = weight[order].cumsum()
    if s.top_p < 1:
        held = until[-1] if s.top_k else total
        until = until[: 1 + int((until[:-1] < s.top_p * held).sum())]
    place = int(np.searchsorted(until, min(number * until[-1], np.nextafter(until[-1], 0)), side="right"))
    return int(index[order[place]])
