"""MonoSoup's cut and factors: hand-computed cases, bounds, and the formula's own discontinuities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zen_train.errors import MergeError
from zen_train.merge import monosoup_shrinkage


def test_a_spectrum_worked_by_hand():
    """s = 2, 1, 1: p = 1/2, 1/4, 1/4, entropy 1.5 ln 2, exp = 2.83, so k = 3 and nothing is damped."""
    edit = monosoup_shrinkage(torch.tensor([2.0, 1.0, 1.0]))
    assert (edit.rank, edit.rho, edit.lam_low, edit.lam_high) == (3, 0.0, 0.0, 1.0)


def test_a_cut_spectrum_worked_by_hand():
    """s = 8, 1, 1: exp(entropy) = 1.89, k = 2, P = 65/66, rho = 1/64, cos = sqrt(1/66)."""
    edit = monosoup_shrinkage(torch.tensor([8.0, 1.0, 1.0]))
    cos = math.sqrt(1 / 66)
    assert edit.rank == 2
    assert edit.energy_high == pytest.approx(65 / 66)
    assert edit.rho == pytest.approx(1 / 64)
    assert edit.lam_low == pytest.approx(1 / 64 + 63 / 64 * cos)
    assert edit.lam_high == pytest.approx(1 - edit.lam_low)


@pytest.mark.parametrize(("energy", "rank"), [(0.5, 1), (0.8, 2), (0.9, 3), (0.99, 4), (1.0, 4)])
def test_an_energy_share_takes_the_smallest_rank_that_reaches_it(energy, rank):
    """Squares 50, 30, 15, 5 of 100."""
    s = torch.tensor([50.0, 30.0, 15.0, 5.0], dtype=torch.float64).sqrt()
    assert monosoup_shrinkage(s, energy=energy if energy == 1.0 else energy - 1e-9).rank == rank


def test_equal_singular_values_are_counted_exactly():
    """exp(entropy) is r in real numbers; a rounded 7.0000001 must not become 8."""
    for r in range(1, 40):
        s = torch.cat([torch.full((r,), 0.3), torch.zeros(3)])
        edit = monosoup_shrinkage(s)
        assert edit.rank == r
        assert edit.lam_low == pytest.approx(0.0, abs=1e-7)


def test_one_singular_value_keeps_everything():
    edit = monosoup_shrinkage(torch.tensor([0.2]))
    assert (edit.rank, edit.lam_high, edit.lam_low) == (1, 1.0, 0.0)


@settings(max_examples=200, deadline=None)
@given(
    s=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=30).filter(lambda xs: max(xs) > 1e-3),
    energy=st.one_of(st.none(), st.floats(0.01, 1.0)),
    scale=st.sampled_from([2.0**-60, 0.25, 2.0**40]),
)
def test_factors_stay_in_bounds_and_do_not_depend_on_the_scale(s, energy, scale):
    values = torch.tensor(sorted(s, reverse=True), dtype=torch.float64)
    edit = monosoup_shrinkage(values, energy=energy)
    assert 1 <= edit.rank <= len(s)
    assert 0.0 <= edit.lam_low <= 1.0
    assert edit.lam_high == 1.0 - edit.lam_low
    assert edit.rho <= edit.lam_low + 1e-12
    # A power of two scales every product exactly, so the edit must be the same to the bit.
    assert monosoup_shrinkage(values * scale, energy=energy) == edit


@pytest.mark.parametrize("energy", [0.0, -0.1, 1.1, float("nan"), True])
def test_an_energy_outside_its_range_is_named(energy):
    with pytest.raises(MergeError, match=r"energy=.*\(0, 1\]"):
        monosoup_shrinkage(torch.ones(3), energy=energy)


@pytest.mark.parametrize(
    "s", [torch.zeros(3), torch.zeros(0), torch.tensor([float("nan"), 1.0]), torch.ones(2, 2)]
)
def test_a_spectrum_that_means_nothing_is_refused(s):
    with pytest.raises(MergeError, match="singular values"):
        monosoup_shrinkage(s)
