"""Operator 1 on the reference and on every CPU instruction set, over the named cases."""

import pytest
import torch

from tests.kernels.backends import forced
from tests.kernels.cases import CASES, LONG_CASES, RUNNERS, Case, at_threads, build, judge, run_linear
from zen_train.kernels.bitdelta_linear import DeltaBank, bitdelta_add_, bitdelta_linear
from zen_train.kernels.cpu import PATHS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BACKENDS = ["reference", *PATHS]


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return forced(request.param, monkeypatch)


def every_backend(function):
    return pytest.mark.parametrize("backend", BACKENDS, indirect=True)(function)


@every_backend
@pytest.mark.parametrize("entry", RUNNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_named_cases_are_as_exact_as_pytorch(backend, dtype, entry):
    failed = []
    for case in CASES + LONG_CASES:
        inputs = build(case, dtype)
        outcome = judge(RUNNERS[entry](inputs, backend), inputs)
        if not outcome.passed:
            failed.append((case.name, outcome))
    assert not failed


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integer_inputs_match_bit_for_bit(backend, dtype):
    failed = []
    for case in CASES:
        inputs = build(case, dtype, integers=True)
        if case.rank == 0 and not judge(run_linear(inputs, backend), inputs).bitwise:
            failed.append(case.name)
    assert not failed


@every_backend
def test_two_threads_give_the_result_of_one(backend):
    inputs = build(Case(m=14, n=640, k=320, mix="distinct", variants=14), torch.bfloat16)
    two, one = (at_threads(count, lambda: run_linear(inputs, backend)) for count in (2, 1))
    assert torch.equal(two, one)


@every_backend
def test_base_tokens_do_not_see_any_delta(backend):
    inputs = build(Case(m=5, n=40, k=72, mix="base", bias=False), torch.float32)
    zero = DeltaBank.zeros(variants=1, out_features=40, in_features=72)
    assert torch.equal(run_linear(inputs, backend), run_linear(inputs, backend, zero))


@every_backend
def test_nan_in_one_token_stays_in_that_token(backend):
    inputs = build(Case(m=14, n=40, k=72, mix="distinct", variants=14, bias=False), torch.bfloat16)
    inputs.x[3, 5] = float("nan")
    for run in RUNNERS.values():
        bad = torch.isnan(run(inputs, backend)).any(dim=1)
        assert bad.nonzero().flatten().tolist() == [3]


@every_backend
def test_outlier_activations_keep_the_accuracy(backend):
    inputs = build(Case(m=8, n=64, k=512, mix="uniform", bias=False), torch.bfloat16)
    inputs.x[:, 7] *= 1000
    assert judge(run_linear(inputs, backend), inputs).passed


@every_backend
def test_leading_dimensions_are_kept(backend):
    inputs = build(Case(m=6, n=20, k=24, mix="uniform"), torch.float32)
    flat = run_linear(inputs, backend)
    shaped = bitdelta_linear(
        inputs.x.view(2, 3, 24),
        inputs.weight,
        inputs.bank,
        inputs.variant.view(2, 3),
        bias_N=inputs.bias,
        backend=backend,
    )
    assert torch.equal(shaped, flat.view(2, 3, 20))


@every_backend
def test_add_onto_a_transposed_output(backend):
    inputs = build(Case(m=6, n=20, k=24, mix="uniform"), torch.float32)
    y = torch.zeros(6, 20)
    across = torch.zeros(20, 6).T
    bitdelta_add_(y, inputs.x, inputs.bank, inputs.variant, backend=backend)
    bitdelta_add_(across, inputs.x, inputs.bank, inputs.variant, backend=backend)
    assert torch.equal(y, across)


MUTATIONS = {
    "one flipped bit": lambda bank: bank.sign_VPNB[1, 0, 3, 2].bitwise_xor_(1),
    "two variants swapped": lambda bank: bank.sign_VPNB.copy_(bank.sign_VPNB.flip(0)),
    "last column dropped": lambda bank: bank.sign_VPNB[..., -1].bitwise_and_(0b011),
    "tail of the last byte forgotten": lambda bank: bank.sign_VPNB[..., -1].zero_(),
    "one scale doubled": lambda bank: bank.row_scale_VPN[2, 0, 5].mul_(2),
}


@every_backend
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_checks_above_can_see_a_mutation(backend, mutation):
    inputs = build(Case(m=14, n=40, k=67, mix="uniform"), torch.bfloat16, integers=True)
    assert judge(run_linear(inputs, backend), inputs).bitwise
    broken = DeltaBank(
        in_features=67,
        sign_VPNB=inputs.bank.sign_VPNB.clone(),
        row_scale_VPN=inputs.bank.row_scale_VPN.clone(),
    )
    MUTATIONS[mutation](broken)
    assert not judge(run_linear(inputs, backend, broken), inputs).bitwise


@every_backend
def test_padding_bits_do_not_matter(backend):
    inputs = build(Case(m=14, n=40, k=67, mix="uniform"), torch.bfloat16, integers=True)
    inputs.bank.sign_VPNB[..., -1].bitwise_or_(0b11111000)
    assert judge(run_linear(inputs, backend), inputs).bitwise
