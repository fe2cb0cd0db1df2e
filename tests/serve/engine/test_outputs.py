"""A mixed batch gives what each variant gives alone as a dense model."""

from __future__ import annotations

import pytest
import torch

from tests.serve.engine.models import (
    CONFIGS,
    assert_equals_dense,
    job,
    load,
    make_family,
    prompt,
    run,
)
from zen_train.kernels.bitdelta_embedding import bitdelta_embedding
from zen_train.kernels.common import DeltaBank
from zen_train.serve.engine.runner import embed

LENGTHS = (1, 5, 30, 47, 16, 21)
NAMES = (None, "a", "b", "two", "mlp", "coded")


@pytest.fixture(scope="module", params=CONFIGS)
def any_family(request, tmp_path_factory):
    return make_family(tmp_path_factory.mktemp(request.param), request.param)


def mixed_jobs(family, *, max_tokens=12):
    """Each variant and the base, with prompts of all lengths."""
    return {
        name: [
            job(
                f"{name}-{length}",
                family.hash(name) if name else None,
                prompt(length, seed=index + length),
                max_tokens=max_tokens,
            )
            for length in (LENGTHS[index], LENGTHS[index - 1])
        ]
        for index, name in enumerate(NAMES)
    }


def assert_all_equal_dense(family, engine, jobs):
    done = run(engine, *(work for works in jobs.values() for work in works))
    for name, works in jobs.items():
        for work in works:
            assert_equals_dense(family.dense(name), work, done.events[work.id])


def test_a_mixed_batch_with_chunked_prefill_equals_each_variant_alone(any_family, start):
    engine = start(any_family)
    load(engine, any_family, ["a", "b", "two", "mlp", "coded"])
    assert_all_equal_dense(any_family, engine, mixed_jobs(any_family))


def test_preempted_jobs_lose_nothing(any_family, start):
    """vllm#29049: more tokens than the pool holds wait their turn; nothing runs out of memory."""
    page_bytes = 8 * any_family_bytes(any_family)
    engine = start(any_family, kv_bytes=12 * page_bytes)
    load(engine, any_family, ["a", "b", "two", "mlp", "coded"])
    assert_all_equal_dense(any_family, engine, mixed_jobs(any_family, max_tokens=30))
    assert engine.stats().preemptions > 0
    assert engine.stats().kv_tokens_used == 0


def any_family_bytes(family):
    """Bytes of one token's keys and values, by the formula: layers x (keys, values) x heads x size x
    float32.
    """
    return 2 * 2 * 2 * 8 * 4


def test_a_decode_batch_padded_as_for_a_cuda_graph_gives_the_same(family, start):
    engine = start(pad_decode=True, max_jobs=5)
    load(engine, family, ["a", "b", "two", "mlp", "coded"])
    assert_all_equal_dense(family, engine, mixed_jobs(family))


def test_the_same_prompt_over_base_and_variants_shares_no_keys_and_values(family, start):
    """llama.cpp#26207, sglang#24638: equal prompts at the same time, one after another, and again after a
    change.
    """
    engine = start()
    load(engine, family, ["a", "b"])
    same = prompt(24, seed=3)
    works = {name: job(f"{name}", family.hash(name) if name else None, same) for name in (None, "a", "b")}
    together = run(engine, *works.values())
    for name, work in works.items():
        assert_equals_dense(family.dense(name), work, together.events[work.id])
        alone = run(engine, work)
        assert alone.tokens(work.id) == together.tokens(work.id)
    assert len({tuple(together.tokens(work.id)) for work in works.values()}) == 3


def test_bf16_stays_as_close_to_float32_as_transformers_does(family, start):
    import torch
    from transformers import AutoModelForCausalLM

    engine = start(dtype="auto")
    load(engine, family, ["a"])
    work = job("w", family.hash("a"), prompt(20, seed=5), max_tokens=1)
    event = run(engine, work).events["w"][0]
    exact = family.dense("a")
    merged = AutoModelForCausalLM.from_pretrained(exact.name_or_path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        ids = torch.tensor([work.prompt_tokens])
        exact_N, rounded_N = (
            model(input_ids=ids).logits[0, -1].float().log_softmax(-1) for model in (exact, merged)
        )
    theirs = float((exact_N - rounded_N).abs().max())
    ours = max(abs(other.logprob - float(exact_N[other.token])) for other in event.top)
    assert 0 < ours <= 2 * theirs


def test_an_embedding_of_two_planes_in_slots_equals_one_of_two_planes():
    """Planes of one variant lie in slots anywhere; the small delta survives the rounding to bf16 as in the kernel."""
    torch.manual_seed(0)
    words, hidden, small = 12, 64, 1e-3
    table_NK = (1 + torch.rand(words, hidden)).to(torch.bfloat16)
    sign_PNB = torch.randint(0, 256, (2, words, hidden // 8), dtype=torch.uint8)
    scale_PN = torch.full((2, words), small)
    together = DeltaBank.zeros(variants=1, planes=2, out_features=words, in_features=hidden)
    together.put(0, sign_PNB=sign_PNB, row_scale_PN=scale_PN)
    apart = DeltaBank.zeros(variants=3, out_features=words, in_features=hidden)
    for slot, plane in ((2, 0), (0, 1)):
        apart.put(slot, sign_PNB=sign_PNB[plane, None], row_scale_PN=scale_PN[plane, None])
    token_T = torch.arange(words)
    plane_PT = torch.tensor([[2] * words, [0] * words], dtype=torch.int32)
    expected = bitdelta_embedding(token_T, table_NK, together, torch.zeros(words, dtype=torch.int32))
    assert not torch.equal(expected, table_NK)
    assert torch.equal(embed(token_T, table_NK, apart, plane_PT), expected)
