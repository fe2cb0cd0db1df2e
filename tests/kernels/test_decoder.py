"""`decoder_stack` on all backends and CPU instruction sets, over the named cases."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.backends import forced
from tests.kernels.cases import at_threads
from tests.kernels.decoder_cases import (
    CASES,
    Case,
    Chunk,
    allowed_error,
    build,
    exact_result,
    own_result,
    rms_error,
)
from tests.kernels.direction_cases import build as build_directions
from zen_train.kernels.bitdelta_linear import bitdelta_linear
from zen_train.kernels.common import DeltaBank
from zen_train.kernels.cpu import PATHS
from zen_train.kernels.decoder import decoder_stack, head_logits, prepare_blocks, rms_norm
from zen_train.kernels.directions_linear import dense_directions

DTYPES = [torch.float32, torch.bfloat16]
BACKENDS = ["reference", "torch", *PATHS]


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return forced(request.param, monkeypatch)


def every_backend(function):
    return pytest.mark.parametrize("backend", BACKENDS, indirect=True)(function)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def run(inputs, backend, pool=None, **changes):
    changed = replace(inputs, **changes)
    return decoder_stack(
        changed.hidden.clone(),
        changed.blocks,
        shape=changed.shape,
        batch=changed.batch,
        kv=pool or changed.pool(),
        rotary=changed.rotary,
        backend=backend,
    )


@pytest.fixture(scope="module")
def known() -> dict:
    """Inputs, exact result and bound of each case and dtype, worked out once for all backends."""
    return {}


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_named_cases_are_as_exact_as_pytorch(backend, dtype, case, known):
    key = (case.name, dtype)
    if key not in known:
        inputs = build(case, dtype)
        truth, truth_pool = exact_result(inputs)
        known[key] = (inputs, truth, truth_pool, allowed_error(inputs, truth))
    inputs, truth, truth_pool, allowed = known[key]
    pool = inputs.pool()
    error = rms_error(run(inputs, backend, pool), truth)
    assert error <= allowed, f"RMS error {error:.3g}"
    # Keys and values lie where the reference put them, and nothing else was touched.
    written = ~torch.isnan(truth_pool)
    assert torch.equal(~torch.isnan(pool.kv), written)
    assert rms_error(pool.kv[written], truth_pool[written]) <= (1e-5 if dtype == torch.float32 else 0.02)


@every_backend
def test_a_prompt_in_chunks_equals_the_prompt_at_once(backend):
    case = Case(name="whole", chunks=(Chunk(start=0, count=29, slots=(2,)),), page_tokens=8)
    whole = build(case, torch.float32)
    at_once = run(whole, backend)
    pool, parts = whole.pool(), []
    for low, high in ((0, 11), (11, 12), (12, 29)):
        batch = replace(
            whole.batch,
            position_T=whole.batch.position_T[low:high],
            sequence_T=whole.batch.sequence_T[low:high],
            vector_T=whole.batch.vector_T[low:high],
            plane_PT=whole.batch.plane_PT[:, low:high].contiguous(),
        )
        parts.append(run(whole, backend, pool, hidden=whole.hidden[low:high], batch=batch))
    assert torch.allclose(torch.cat(parts), at_once, rtol=1e-5, atol=1e-5)


@every_backend
@pytest.mark.parametrize("name", ["mixed-prefill-and-decode", "directions-mixed"])
def test_a_mixed_batch_equals_each_variant_alone(backend, name):
    """Log probabilities to 1e-4 in float32 and the same greedy tokens."""
    inputs = build(case_named(name), torch.float32)
    head = torch.randn(120, 64, generator=torch.Generator().manual_seed(1))
    mixed = torch.log_softmax(run(inputs, backend) @ head.T, dim=1)
    batch = inputs.batch
    for sequence in batch.sequence_T.unique().tolist():
        mine = batch.sequence_T == sequence
        alone = replace(
            batch,
            position_T=batch.position_T[mine],
            sequence_T=batch.sequence_T[mine],
            vector_T=batch.vector_T[mine],
            plane_PT=batch.plane_PT[:, mine].contiguous(),
            direction_T=None if batch.direction_T is None else batch.direction_T[mine],
        )
        scores = torch.log_softmax(
            run(inputs, backend, hidden=inputs.hidden[mine], batch=alone) @ head.T, dim=1
        )
        assert (scores - mixed[mine]).abs().max() <= 1e-4
        assert torch.equal(scores.argmax(dim=1), mixed[mine].argmax(dim=1))


@every_backend
def test_two_threads_give_the_result_of_one(backend):
    two_threads_give_the_result_of_one("T3-real-base-and-two", backend)


@pytest.mark.parametrize("backend", PATHS, indirect=True)
def test_two_threads_give_the_result_of_one_with_directions(backend):
    two_threads_give_the_result_of_one("directions-T14-real", backend)


def two_threads_give_the_result_of_one(name, backend):
    inputs = build(case_named(name), torch.bfloat16)
    two, one = (at_threads(count, lambda: run(inputs, backend)) for count in (2, 1))
    assert torch.equal(two, one)


@every_backend
def test_a_slot_refilled_in_place_is_seen_by_prepared_blocks(backend):
    inputs = build(case_named("T14-distinct"), torch.float32)
    stack = prepare_blocks(inputs.blocks, shape=inputs.shape)
    before = run(inputs, backend, blocks=stack)
    inputs.blocks[0].o_bank.row_scale_VPN[5].mul_(2)
    inputs.blocks[1].mlp_norm_MD[3].mul_(2)
    after = run(inputs, backend, blocks=stack)
    vector, plane = inputs.batch.vector_T, inputs.batch.plane_PT[0]
    touched = (plane == 5) | (vector == 3)
    assert torch.equal((after != before).any(dim=1), touched)
    assert torch.equal(after, run(inputs, backend))


@every_backend
def test_nan_in_one_sequence_stays_in_that_sequence(backend):
    inputs = build(case_named("T14-real-distinct"), torch.bfloat16)
    inputs.hidden[3, 5] = float("nan")
    bad = torch.isnan(run(inputs, backend)).any(dim=1)
    assert bad.nonzero().flatten().tolist() == [3]


@every_backend
@pytest.mark.parametrize("name", ["T14-real-distinct", "directions-T14-real"])
def test_outlier_activations_keep_the_accuracy(backend, name):
    """Tables of look-ups have one unit for a row of activations: a channel 300 times the others must not drown them."""
    inputs = build(case_named(name), torch.bfloat16)
    inputs.hidden[:, 7] *= 300
    truth, _ = exact_result(inputs)
    # The outlier's own channel, which the residual carries through, would hide what happens to the rest.
    rest = torch.arange(truth.shape[1]) != 7
    error = rms_error(run(inputs, backend)[:, rest], truth[:, rest])
    assert error <= 2 * rms_error(own_result(inputs)[:, rest], truth[:, rest]), f"RMS error {error:.3g}"


def wrong_page(inputs):
    table = inputs.batch.page_table_SJ.clone()
    table[3, 0] = table[1, 0]  # another sequence's past; the order of a sequence's own pages would not matter
    return {"batch": replace(inputs.batch, page_table_SJ=table)}


def swap_variants(inputs):
    plane = inputs.batch.plane_PT.clone()
    plane[plane == 0] = 99
    plane[plane == 1] = 0
    plane[plane == 99] = 1
    return {"batch": replace(inputs.batch, plane_PT=plane)}


MUTATIONS = {
    "wrong page": wrong_page,
    "off by one in causality": lambda inputs: {
        "shape": replace(inputs.shape, window_tokens=int(inputs.batch.position_T.max()))
    },
    "swapped variants": swap_variants,
    "forgotten norm row": lambda inputs: {
        "batch": replace(inputs.batch, vector_T=torch.zeros_like(inputs.batch.vector_T))
    },
    "forgotten plane": lambda inputs: {
        "batch": replace(
            inputs.batch, plane_PT=inputs.batch.plane_PT.masked_fill(inputs.batch.plane_PT == 2, -1)
        )
    },
    "sine and cosine swapped": lambda inputs: {
        "rotary": replace(inputs.rotary, cos=inputs.rotary.sin, sin=inputs.rotary.cos)
    },
}


def swap_directions(inputs):
    direction = inputs.batch.direction_T
    swapped = torch.where(direction == 0, 3, torch.where(direction == 3, 0, direction)).to(torch.int32)
    return {"batch": replace(inputs.batch, direction_T=swapped)}


def lose_second_planes(inputs):
    blocks = [
        replace(block, down_directions=replace(held, plane_VR=torch.zeros_like(held.plane_VR)))
        for block in inputs.blocks
        if (held := block.down_directions) is not None
    ]
    return {"blocks": blocks}


DIRECTION_MUTATIONS = {
    "swapped variants": swap_directions,
    "forgotten directions": lambda inputs: {"batch": replace(inputs.batch, direction_T=None)},
    "second planes as strong as first": lose_second_planes,
}


@every_backend
@pytest.mark.parametrize("mutation", DIRECTION_MUTATIONS)
def test_the_checks_above_can_see_a_mutation_of_directions(backend, mutation):
    inputs = build(case_named("directions-mixed"), torch.float32)
    truth, _ = exact_result(inputs)
    error = rms_error(run(inputs, backend, **DIRECTION_MUTATIONS[mutation](inputs)), truth)
    assert not error <= 10 * allowed_error(inputs, truth)


@every_backend
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_checks_above_can_see_a_mutation(backend, mutation):
    inputs = build(case_named("mixed-prefill-and-decode"), torch.float32)
    truth, _ = exact_result(inputs)
    error = rms_error(run(inputs, backend, **MUTATIONS[mutation](inputs)), truth)
    assert not error <= allowed_error(inputs, truth)


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 14, 40])
def test_head_scores_are_exact_and_float32(backend, dtype, tokens):
    case = case_named("two-planes")
    g = torch.Generator().manual_seed(2)
    bank = build(case, dtype).blocks[0].gate_up_bank
    x = torch.randn(tokens, 64, generator=g).to(dtype)
    weight = torch.randn(192, 64, generator=g).to(dtype)
    plane = torch.randint(-1, 15, (2, tokens), generator=g, dtype=torch.int32)
    plane[1] = torch.where(plane[1] == plane[0], -1, plane[1])
    scores = head_logits(x, weight, bank, plane, backend=backend)
    assert scores.dtype == torch.float32
    truth = x.double() @ weight.double().T
    for plane_T in plane:
        term = bitdelta_linear(x.float(), torch.zeros(192, 64), bank, plane_T, backend="reference")
        truth = truth + term.double()
    bound = 1e-5 if dtype == torch.float32 else (0.005 if backend == "torch" else 1e-3)
    assert rms_error(scores, truth) <= bound


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 14, 140])
def test_head_scores_of_directions_are_exact(backend, dtype, tokens):
    directions = build_directions((192,), 72, variants=4)
    bank = DeltaBank.zeros(variants=4, out_features=192, in_features=72)
    g = torch.Generator().manual_seed(2)
    x, weight = torch.randn(tokens, 72, generator=g).to(dtype), torch.randn(192, 72, generator=g).to(dtype)
    slot = torch.randint(-1, 4, (tokens,), generator=g, dtype=torch.int32)
    if tokens > 100:
        slot[:] = 2
    plane = torch.full((1, tokens), -1, dtype=torch.int32)
    scores = head_logits(x, weight, bank, plane, directions=directions, direction_T=slot, backend=backend)
    truth = x.double() @ weight.double().T
    for t, v in enumerate(slot.tolist()):
        if v >= 0:
            truth[t] += dense_directions(directions, v, torch.float64) @ x[t].double()
    bound = 1e-5 if dtype == torch.float32 else 0.01
    assert scores.dtype == torch.float32
    assert rms_error(scores, truth) <= bound


def test_the_final_norm_takes_each_tokens_own_row():
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(5, 24, generator=g), torch.rand(3, 24, generator=g)
    row = torch.tensor([0, 2, 1, 1, 0], dtype=torch.int32)
    out = rms_norm(x, weight, row, 1e-5)
    truth = x / (x.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight[row.long()]
    assert torch.allclose(out, truth, rtol=1e-5, atol=1e-6)
