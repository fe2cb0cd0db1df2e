"""From scores to tokens, against formulas written down here. N words in the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from tests.serve.engine.models import job
from zen_train.serve.engine import drawing, sampler
from zen_train.serve.engine.sampler import sample
from zen_train.serve.engine.sequence import Sequence
from zen_train.serve.engine.slots import BASE_PLACE
from zen_train.serve.types import Sampling

WORDS = 40


def row(tokens=(1, 2), generated=(), **sampling):
    """A sequence that has generated some tokens already."""
    options = {key: sampling.pop(key) for key in ("min_tokens", "stop_tokens") if key in sampling}
    work = job("j", tokens=tokens, max_tokens=100, sampling=Sampling(**sampling), **options)
    sequence = Sequence.of(work, lambda event: None, BASE_PLACE, 0)
    for token in generated:
        sequence.tokens.append(token)
        sequence.generated[token] += 1
    return sequence


def scores(seed=0, rows=1, words=WORDS):
    return torch.randn(rows, words, generator=torch.Generator().manual_seed(seed)) * 3


def chosen(logits_SN, *rows):
    return [got.token for got in sample(logits_SN.clone(), rows)]


def often(logits_1N, times=4000, **sampling):
    """How often each word is drawn, as shares, float64 `[N]`."""
    counts = torch.zeros(logits_1N.shape[1], dtype=torch.float64)
    sequence = row(seed=1, **sampling)
    rows = [sequence] * 100
    for _ in range(times // 100):
        for token in chosen(logits_1N.expand(100, -1), *rows):
            counts[token] += 1
    return counts / times


def assert_shares(shares, expected):
    """Within five standard deviations of each expected share, and never where that is zero."""
    deviation = (expected * (1 - expected) / 4000).sqrt()
    assert bool(((shares - expected).abs() <= 5 * deviation + 1e-12).all())


def test_greedy_takes_the_best_word_with_and_without_other_rows():
    logits = scores(rows=3)
    best = logits.argmax(-1).tolist()
    assert chosen(logits, *[row(temperature=0)] * 3) == best
    assert chosen(logits, row(temperature=0), row(temperature=1), row(temperature=1e-30))[::2] == best[::2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_words_are_drawn_by_their_probability(temperature):
    logits = scores(1)
    assert_shares(often(logits, temperature=temperature), (logits[0].double() / temperature).softmax(-1))


def test_top_k_keeps_the_best_words():
    logits = scores(2)
    kept = logits[0].topk(4).indices
    expected = torch.zeros(WORDS, dtype=torch.float64)
    expected[kept] = logits[0, kept].double().softmax(-1)
    assert_shares(often(logits, top_k=4), expected)
    assert chosen(logits, row(top_k=1)) == [int(logits.argmax())]
    assert len(chosen(logits, row(top_k=10**6))) == 1


def nucleus(probability_N, top_p):
    """The fewest best words that hold `top_p`, renormalised."""
    best, index = probability_N.sort(descending=True)
    kept = 1 + int((best.cumsum(0)[:-1] < top_p).sum())
    expected = torch.zeros_like(probability_N)
    expected[index[:kept]] = best[:kept] / best[:kept].sum()
    return expected


@pytest.mark.parametrize("floors", [(-7.0, -14.0), (-0.5, -1.0), (-0.1,)])
def test_top_p_keeps_the_fewest_words_that_hold_the_mass(monkeypatch, floors):
    """With high floors the words above them do not hold the mass, and all words are sorted."""
    monkeypatch.setattr(drawing, "FLOORS", floors)
    logits = scores(3)
    assert_shares(often(logits, top_p=0.8), nucleus(logits[0].double().softmax(-1), 0.8))
    assert chosen(logits, row(top_p=1e-9)) == [int(logits.argmax())]


def test_top_p_counts_within_top_k():
    logits = scores(4)
    kept = logits[0].topk(5).indices
    within = torch.zeros(WORDS, dtype=torch.float64)
    within[kept] = logits[0, kept].double().softmax(-1)
    assert_shares(often(logits, top_k=5, top_p=0.7), nucleus(within, 0.7))


def test_top_k_looks_further_down_where_few_words_are_near_the_best():
    logits = torch.arange(WORDS).float().flip(0).unsqueeze(0) * 2
    assert set(chosen(logits.expand(200, -1), *[row(top_k=5, temperature=5.0, seed=seed) for seed in range(200)])) == {
        0, 1, 2, 3, 4
    }  # fmt: skip


def test_min_p_drops_words_far_below_the_best():
    logits = scores(5)
    probability = logits[0].double().softmax(-1)
    expected = torch.where(probability >= 0.2 * probability.max(), probability, 0.0)
    assert_shares(often(logits, min_p=0.2), expected / expected.sum())


def test_top_k_among_equal_words_keeps_exactly_k():
    logits = torch.zeros(1, WORDS)
    drawn = {chosen(logits, sequence)[0] for sequence in [row(top_k=3, seed=seed) for seed in range(60)]}
    assert len(drawn) == 3


@pytest.mark.parametrize("words", [1, 63, 64, 65, 1000])
def test_the_running_sum_in_blocks_finds_the_word_of_the_plain_one(words):
    weights = torch.rand(7, words, generator=torch.Generator().manual_seed(1))
    weights *= torch.rand(7, words, generator=torch.Generator().manual_seed(2)) > 0.5
    weights[:, words // 2] += 1e-3
    share = torch.linspace(0, 1, 7).unsqueeze(1)
    plain = weights.double().cumsum(-1)
    expected = [int((row <= part * row[-1]).sum()) for row, part in zip(plain[:-1], share[:-1], strict=True)]
    found = drawing.word_at(weights, share)
    assert found[:-1] == expected
    assert weights[-1, found[-1]] > 0


def test_a_word_of_probability_zero_is_never_drawn_even_at_the_ends(monkeypatch):
    logits = torch.full((1, WORDS), -torch.inf)
    logits[0, 7] = logits[0, 9] = 1.0
    for number in (0.0, 0.49, 0.51, 1 - 2**-53):
        sequence = row()
        monkeypatch.setattr(sequence, "draws", type("Fixed", (), {"random": lambda self, n=number: n})())
        assert chosen(logits, sequence) == [7 if number < 0.5 else 9]


def test_penalties_follow_their_formulas():
    logits = scores(6)
    sequence = row(
        tokens=(3, 4), generated=(5, 5, 6), temperature=0, repetition_penalty=1.5, presence_penalty=0.4,
        frequency_penalty=0.3,
    )  # fmt: skip
    expected = logits[0].clone()
    for token in (3, 4, 5, 6):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[5] -= 0.4 + 2 * 0.3
    expected[6] -= 0.4 + 0.3
    shifted = logits.clone()
    sampler._penalise(shifted, [sequence])
    assert torch.allclose(shifted[0], expected)
    assert chosen(logits, sequence) == [int(expected.argmax())]


def test_penalties_of_one_row_leave_the_others_alone():
    logits = scores(7, rows=2)
    best = int(logits[1].argmax())
    rows = row(
        generated=(int(logits[0].argmax()),), temperature=0, presence_penalty=2.0, frequency_penalty=50.0
    )
    assert chosen(logits, rows, row(temperature=0, generated=(best,)))[1] == best
    assert chosen(logits, rows, row(temperature=0))[0] != int(logits[0].argmax())


def test_logit_bias_forces_and_forbids():
    logits = scores(8)
    best = int(logits.argmax())
    assert chosen(logits, row(temperature=0, logit_bias={3: 100.0})) == [3]
    assert chosen(logits, row(temperature=0, logit_bias={best: -100.0})) == [
        int(logits[0].topk(2).indices[1])
    ]


def test_min_tokens_forbid_the_stop_tokens_until_then():
    logits = scores(9)
    best = int(logits.argmax())
    stop = frozenset({best, WORDS + 5})
    assert chosen(logits, row(temperature=0, min_tokens=2, stop_tokens=stop, generated=(1,))) != [best]
    assert chosen(logits, row(temperature=0, min_tokens=2, stop_tokens=stop, generated=(1, 1))) == [best]


def test_log_probabilities_are_those_before_temperature_penalties_and_bias():
    logits = scores(10, rows=2)
    plain = row(temperature=0, logprobs=None)
    asked = row(
        temperature=0.1, seed=3, logprobs=3, logit_bias={4: 50.0}, generated=(4,), presence_penalty=1.0
    )
    got = sample(logits.clone(), [plain, asked])
    expected = logits[1].double().log_softmax(-1)
    assert (got[0].logprob, got[0].top) == (None, ())
    assert got[1].token == 4
    assert math.isclose(got[1].logprob, float(expected[4]), abs_tol=1e-5)
    assert [other.token for other in got[1].top] == logits[1].topk(3).indices.tolist()
    for other in got[1].top:
        assert math.isclose(other.logprob, float(expected[other.token]), abs_tol=1e-5)
    assert sample(logits.clone(), [plain, row(logprobs=0)])[1].top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_no_token_and_spoils_no_other(bad):
    logits = scores(11, rows=3)
    best = int(logits[2].argmax())
    logits[1, 5] = bad
    for temperature in (0.0, 0.5):
        got = sample(logits.clone(), [row(temperature=temperature, seed=1)] * 2 + [row(temperature=0)])
        assert got[1].token is None
        assert got[0].token is not None
        assert got[2].token == best
    assert sample(torch.full((1, 4), -torch.inf), [row(temperature=0)])[0].token is None


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch():
    logits = scores(12, rows=5)
    alone = [chosen(logits[2:3], row(seed=9))[0] for _ in range(3)]
    crowd = chosen(logits, row(seed=1), row(temperature=0), row(seed=9), row(top_k=3), row(min_p=0.1))
    assert alone == [crowd[2]] * 3
