"""Operator 2: signs, sums and errors in one pass."""

import pytest
import torch

from tests.kernels.backends import EVERYWHERE, forced
from zen_train.kernels.sign_pack import PackedSigns, sign_pack, unpack_signs


@pytest.fixture(params=EVERYWHERE)
def backend(request, monkeypatch):
    return forced(request.param, monkeypatch)


def pair(n, k, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    w0 = torch.randn(n, k, generator=g)
    w1 = w0 + 0.1 * torch.randn(n, k, generator=g)
    w1[torch.rand(n, k, generator=g) < 0.1] = 0
    w0[w1 == 0] = 0
    return w1.to(dtype), w0.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [1, 7, 8, 16, 71, 96, 1500])
def test_signs_and_sums_are_those_of_the_difference(backend, dtype, k):
    w1, w0 = pair(5, k, dtype)
    d = w1.float() - w0.float()
    packed = sign_pack(w1, w0, backend=backend)
    assert torch.equal(unpack_signs(packed.sign_NB, k), torch.where(d >= 0, 1.0, -1.0))
    assert torch.equal(packed.zeros_N, (d == 0).sum(1))
    torch.testing.assert_close(packed.abs_sum_N, d.double().abs().sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(packed.square_sum_N, d.double().square().sum(1), rtol=1e-5, atol=0)


def test_padding_bits_are_zero(backend):
    packed = sign_pack(torch.ones(3, 11), None, backend=backend)
    assert packed.sign_NB.tolist() == [[255, 0b111]] * 3


def test_rows_can_be_streamed(backend):
    w1, w0 = pair(9, 40, torch.bfloat16)
    whole = sign_pack(w1, w0, backend=backend)
    parts = PackedSigns.concatenate(
        [sign_pack(w1[i : i + 4], w0[i : i + 4], backend=backend) for i in (0, 4, 8)]
    )
    assert torch.equal(whole.sign_NB, parts.sign_NB)
    assert torch.equal(whole.abs_sum_N, parts.abs_sum_N)


def test_the_error_norm_is_that_of_the_unpacked_delta(backend):
    w1, w0 = pair(6, 50, torch.float32)
    packed = sign_pack(w1, w0, backend=backend)
    d = (w1 - w0).double()
    for scale in (packed.row_scale(), packed.matrix_scale()):
        left = d - scale.double().reshape(-1, 1) * unpack_signs(packed.sign_NB, 50)
        expected = float(left.square().sum() / d.square().sum())
        assert packed.relative_error(scale) == pytest.approx(expected, rel=1e-4)


def test_gaussian_deltas_lose_the_known_share():
    g = torch.Generator().manual_seed(1)
    packed = sign_pack(torch.randn(64, 4096, generator=g))
    assert packed.relative_error(packed.row_scale()) == pytest.approx(1 - 2 / torch.pi, abs=0.005)


def test_strided_weights_give_the_same_bits(backend):
    w1, w0 = pair(6, 50, torch.float32)
    across = sign_pack(w1.T.contiguous().T, w0, backend=backend)
    assert torch.equal(across.sign_NB, sign_pack(w1, w0, backend=backend).sign_NB)


def test_no_rows_is_allowed(backend):
    packed = sign_pack(torch.zeros(0, 9), backend=backend)
    assert packed.sign_NB.shape == (0, 2)
