"""Rounding W0 + alpha S to bf16 must not lose the deltas that are smaller than the steps of bf16."""

import pytest
import torch

from tests.kernels.backends import EVERYWHERE, forced
from zen_train.kernels.bitdelta_embedding import bitdelta_embedding
from zen_train.kernels.bitdelta_linear import DeltaBank, bitdelta_linear
from zen_train.kernels.bitdelta_linear.reference import linear_reference
from zen_train.kernels.common.dither import dither_bf16

ROWS, COLUMNS = 48, 1024
STEP = 2.0**-7
"""Between two neighbours of bf16 in [1, 2)."""
SMALL = 0.1 * STEP


def base_in_one_to_two() -> torch.Tensor:
    torch.manual_seed(0)
    return (1 + torch.rand(ROWS, COLUMNS)).to(torch.bfloat16).clamp(max=1.9)


def small_bank() -> DeltaBank:
    bank = DeltaBank.zeros(variants=1, out_features=ROWS, in_features=COLUMNS)
    plus = torch.full((1, ROWS, COLUMNS // 8), 255, dtype=torch.uint8)
    bank.put(0, sign_PNB=plus, row_scale_PN=torch.full((1, ROWS), SMALL))
    return bank


@pytest.fixture(params=EVERYWHERE)
def backend(request, monkeypatch):
    return forced(request.param, monkeypatch)


def test_a_delta_below_half_a_step_is_kept_on_average_where_nearest_loses_it():
    base = base_in_one_to_two().float()
    assert torch.equal((base + SMALL).to(torch.bfloat16).float(), base)
    moved = (dither_bf16(base + SMALL).float() - base).mean(dim=1)
    torch.testing.assert_close(moved, torch.full((ROWS,), SMALL), rtol=0.02, atol=0)


def test_each_value_goes_to_one_of_its_neighbours_and_exact_ones_stay():
    torch.manual_seed(0)
    values = torch.randn(ROWS, COLUMNS)
    rounded = dither_bf16(values).float()
    assert ((rounded - values).abs() < values.abs() * 2.0**-7).all()
    exact = values.to(torch.bfloat16)
    assert torch.equal(dither_bf16(exact.float()), exact)


@pytest.mark.parametrize("planes", [1, 2])
def test_many_tokens_of_one_variant_feel_a_small_delta(backend, planes):
    """From 128 tokens on the kernels form W0 + alpha S in bf16. Signs and tokens alternate alike, so that the base's
    part of the sum cancels and the delta's adds up."""
    base, tokens = base_in_one_to_two(), 160
    bank = DeltaBank.zeros(variants=1, out_features=ROWS, in_features=COLUMNS, planes=planes)
    alternate = torch.full((planes, ROWS, COLUMNS // 8), 0b01010101, dtype=torch.uint8)
    bank.put(0, sign_PNB=alternate, row_scale_PN=torch.full((planes, ROWS), SMALL / planes))
    x = torch.tensor([1.0, -1.0], dtype=torch.bfloat16).repeat(tokens, COLUMNS // 2)
    variant = torch.zeros(tokens, dtype=torch.int64)
    got = bitdelta_linear(x, base, bank, variant, backend=backend).float()
    without = bitdelta_linear(x, base, bank, torch.full_like(variant, -1), backend=backend).float()
    torch.testing.assert_close(
        got - without, torch.full((tokens, ROWS), SMALL * COLUMNS), rtol=0.1, atol=0.05
    )


@pytest.mark.parametrize("path", ["avx512_bf16", "amx"])
def test_the_folding_reference_is_what_the_tiled_paths_compute(path, monkeypatch):
    backend = forced(path, monkeypatch)
    torch.manual_seed(0)
    base, bank = base_in_one_to_two(), small_bank()
    x, variant = torch.randn(160, COLUMNS).to(torch.bfloat16), torch.zeros(160, dtype=torch.int64)
    got = bitdelta_linear(x, base, bank, variant, backend=backend)
    folded = linear_reference(
        x, base, None, bank.sign_VPNB, bank.row_scale_VPN, None, variant, round_weight=True
    )
    torch.testing.assert_close(got.float(), folded.float(), rtol=2**-7, atol=1e-3)


def test_an_embedding_keeps_a_small_delta(backend):
    base, bank, ids = base_in_one_to_two(), small_bank(), torch.arange(ROWS)
    rows = bitdelta_embedding(ids, base, bank, torch.zeros_like(ids), backend=backend).float()
    moved = (rows - base.float()).mean(dim=1)
    torch.testing.assert_close(moved, torch.full((ROWS,), SMALL), rtol=0.02, atol=0)
