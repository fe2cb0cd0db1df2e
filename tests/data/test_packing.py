"""Packing: how examples fill blocks, and that a packed forward sees each document alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from tests.data.support import VOCABULARY, byte_tokenizer, sums, tiny_model, token_set
from zen_train.data.loaders import to_batch
from zen_train.data.packing import (
    BlockPlan,
    document_mask,
    empty_block,
    fill_block,
    model_inputs,
    pack,
    separates_documents,
)
from zen_train.data.records import Record
from zen_train.data.tokenise import IGNORE

ARCHITECTURES = ["llama", "qwen2", "mistral", "gpt2"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 64), max_size=80))
def test_every_example_is_packed_once_and_no_block_overflows(lengths):
    blocks = pack(lengths, block_tokens=64)
    assert sorted(i for block in blocks for i in block) == list(range(len(lengths)))
    fill = [sum(lengths[i] for i in block) for block in blocks]
    assert all(total <= 64 for total in fill)
    # No two blocks would fit into one: any-fit never leaves that.
    assert all(a + b > 64 for a, b in pairwise(sorted(fill)))


def test_an_epoch_has_each_example_once_and_the_next_one_another_order():
    lengths = np.random.default_rng(1).integers(1, 60, size=5000).tolist()
    plan = BlockPlan(lengths, block_tokens=64, seed=3)
    count = plan.epoch_blocks()
    first = [plan[i] for i in range(count)]
    second = [plan[i] for i in range(count, 2 * count)]
    assert sorted(i for block in first for i in block) == list(range(5000))
    together = {frozenset(block) for block in first if len(block) > 1}
    again = {frozenset(block) for block in second if len(block) > 1}
    assert len(together & again) < 0.05 * len(together), "the next epoch packs other examples together"
    other = BlockPlan(lengths, block_tokens=64, seed=4)
    assert first != [other[i] for i in range(count)]
    assert plan.fill_share() > 0.98


def test_a_block_is_a_function_of_its_index_alone():
    lengths = np.random.default_rng(1).integers(1, 60, size=5000).tolist()
    plan = BlockPlan(lengths, block_tokens=64, seed=3)
    in_order = [plan[i] for i in range(4000)]
    for index in (3999, 0, 1700, 1699, 3998):
        assert BlockPlan(lengths, block_tokens=64, seed=3)[index] == in_order[index]
        assert plan[index] == in_order[index]


def test_positions_restart_and_the_first_label_of_each_document_is_masked():
    tokenizer = byte_tokenizer()
    texts = [Record(document=f"text {i}", text="every token of it carries loss"[i:]) for i in range(2)]
    examples = token_set([*texts, *sums(1)], tokenizer)
    lengths = examples.lengths
    block = fill_block(examples, [2, 0, 1], block_tokens=int(lengths.sum()) + 5, pad_token_id=9)
    starts = np.cumsum([0, lengths[2], lengths[0], lengths[1]])
    assert (block.position_ids[starts] == 0).all()
    assert (block.labels[starts] == IGNORE).all()
    assert (block.input_ids[starts[-1] :] == 9).all()
    assert (block.position_ids[starts[-1] :] == 0).all()
    assert block.names == ("sum 0", "text 0", "text 1")
    assert (block.labels[starts[1] + 1 : starts[2]] != IGNORE).all()


def _separate_nll(model, examples, members) -> torch.Tensor:
    """The summed loss of each example by itself, added up."""
    total = torch.zeros((), dtype=torch.float64)
    for member in members:
        ids, labels = (torch.from_numpy(a.astype(np.int64)) for a in examples[member])
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        total += cross_entropy(logits[:-1].double(), labels[1:], ignore_index=IGNORE, reduction="sum")
    return total


def _packed_nll(model, batch) -> torch.Tensor:
    logits = model(**model_inputs(batch)).logits
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).double(),
        batch["labels"][:, 1:].flatten(),
        ignore_index=IGNORE,
        reduction="sum",
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_loss_is_the_sum_of_separate_losses(architecture, attention):
    """trl #1230, transformers #25452. Two blocks at once, both with padding, in float64."""
    model = tiny_model(architecture, attention)
    examples = token_set(sums(8), byte_tokenizer())
    members = [[0, 3, 5], [1, 2, 4]]
    size = int(max(examples.lengths[m].sum() for m in members)) + 6
    blocks = [fill_block(examples, m, block_tokens=size, pad_token_id=7) for m in members]
    with torch.no_grad():
        packed = _packed_nll(model, to_batch(blocks, window_tokens=1))
        separate = _separate_nll(model, examples, [*members[0], *members[1]])
    assert packed.item() == pytest.approx(separate.item(), rel=1e-10)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_nothing_for_the_documents(architecture):
    model = tiny_model(architecture, "sdpa")
    examples = token_set(sums(4), byte_tokenizer())
    size = int(examples.lengths[[0, 1]].sum()) + 8
    blocks = [fill_block(examples, [0, 1], block_tokens=size, pad_token_id=pad) for pad in (7, 200)]
    with torch.no_grad():
        logits = model(**model_inputs(to_batch(blocks, window_tokens=1))).logits
    assert torch.equal(logits[0, : size - 8], logits[1, : size - 8])
    assert torch.isfinite(logits).all(), "a padding token attends to itself, so its row is not empty"


def test_a_cache_would_join_the_documents():
    """Why `model_inputs` says use_cache=False: with a cache transformers does not look for borders."""
    model = tiny_model("llama", "sdpa")
    examples = token_set(sums(4), byte_tokenizer())
    block = fill_block(examples, [0, 1, 2], block_tokens=int(examples.lengths[:3].sum()), pad_token_id=7)
    batch = to_batch([block], window_tokens=1)
    with torch.no_grad():
        apart = model(**model_inputs(batch)).logits
        joined = model(**{**model_inputs(batch), "use_cache": True}).logits
    assert not torch.allclose(apart, joined, rtol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_separation_is_recognised(architecture):
    model = tiny_model(architecture, "sdpa").train()
    state = torch.get_rng_state()
    assert separates_documents(model, vocabulary=VOCABULARY)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_ignores_positions_is_recognised():
    class Deaf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_model("gpt2", "sdpa")

        def forward(self, input_ids, position_ids, use_cache):
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    assert not separates_documents(Deaf(), vocabulary=VOCABULARY)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_explicit_mask_says_the_same_as_the_positions(attention):
    model = tiny_model("llama", attention)
    examples = token_set(sums(4), byte_tokenizer())
    block = fill_block(examples, [0, 1, 2], block_tokens=int(examples.lengths[:3].sum()) + 4, pad_token_id=7)
    batch = to_batch([block, block], window_tokens=1)
    allowed = document_mask(batch["position_ids"])
    blocked = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(
        ~allowed, torch.finfo(torch.float64).min
    )
    with torch.no_grad():
        by_position = model(**model_inputs(batch)).logits
        by_mask = model(
            **model_inputs(batch), attention_mask=allowed if attention == "sdpa" else blocked
        ).logits
    torch.testing.assert_close(by_mask, by_position, rtol=1e-10, atol=1e-10)


def test_an_empty_block_carries_no_loss():
    block = empty_block(block_tokens=8, pad_token_id=3)
    assert (block.labels == IGNORE).all()
    assert block.names == ()


@pytest.mark.real
@pytest.mark.slow
def test_packed_loss_is_the_sum_of_separate_losses_on_the_real_base(real_base):
    """trl #1230 on SmolLM2 in float32: both sums within the rounding of about a thousand terms."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_base)
    model = AutoModelForCausalLM.from_pretrained(real_base, dtype=torch.float32).eval()
    examples = token_set(sums(8), tokenizer)
    members = [[0, 3, 5], [1, 2, 4]]
    size = int(max(examples.lengths[m].sum() for m in members)) + 6
    blocks = [fill_block(examples, m, block_tokens=size, pad_token_id=2) for m in members]
    with torch.no_grad():
        packed = _packed_nll(model, to_batch(blocks, window_tokens=1))
        separate = _separate_nll(model, examples, [*members[0], *members[1]])
    assert packed.item() == pytest.approx(separate.item(), rel=2e-5)
