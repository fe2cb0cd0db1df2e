"""The merge rules against float64 references, their invariants, and tensors that cannot be merged."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.merge import reference
from tests.merge.reference import matrices, relative_error, signal_and_noise
from zen_train.errors import MergeError
from zen_train.merge import RULES, mean, merge_tensor, monosoup, svd_average
from zen_train.merge import factorise as factorise_module
from zen_train.merge import rules as rules_module
from zen_train.merge import shrinkage as shrinkage_module

# W is float32: rounding it costs 6e-8 of |W|, which the tests measure against |D|, a hundredth of |W|.
TOLERANCE = 2e-5


def _run(m, n, k, seed=0, *, noise=0.05):
    """Base [m, n] of size 0.1 and k checkpoints whose deltas are signal and noise of size 1e-3."""
    generator = torch.Generator().manual_seed(seed)
    base = 0.1 * torch.randn(m, n, generator=generator)
    return base, [base + signal_and_noise(m, n, seed + 1 + i, noise=noise) for i in range(k)]


def _delta_error(result, want, base):
    return relative_error(result.weight.double() - base.double(), want - base.double())


SHAPES = [(60, 40), (40, 60), (48, 48), (1, 30), (30, 1), (2, 3), (200, 160)]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("rank", [1, 4, 16])
def test_svd_average_equals_the_reference(m, n, rank, k):
    base, checkpoints = _run(m, n, k)
    result = svd_average(base, checkpoints, rank=rank)
    assert result.skipped is None
    assert _delta_error(result, reference.svd_average(base, checkpoints, rank), base) < TOLERANCE


@pytest.mark.parametrize("energy", [None, 0.5, 0.8])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_monosoup_equals_the_reference(m, n, k, energy):
    base, checkpoints = _run(m, n, k, seed=20)
    want, rank, _ = reference.monosoup(base, checkpoints, energy)
    result = monosoup(base, checkpoints, energy=energy)
    assert result.rank == rank
    assert _delta_error(result, want, base) < TOLERANCE


@pytest.mark.parametrize("name", [n for n, matrix in matrices() if float(matrix.abs().max()) > 0.0])
def test_rules_equal_their_references_on_difficult_deltas_of_a_zero_base(name):
    """With W0 = 0 the weight is the delta, so nothing hides behind |W|. Equal values have no unique tau."""
    delta = dict(matrices())[name]
    base = torch.zeros_like(delta)
    want, _, _ = reference.monosoup(base, [delta])
    # Near an integer exp(entropy), k is decided by rounding; these spectra decay fast enough not to matter.
    assert relative_error(monosoup(base, [delta]).weight, want) < 5e-6
    if "equal" not in name:
        want = reference.svd_average(base, [delta], 2)
        assert relative_error(svd_average(base, [delta], rank=2).weight, want) < 5e-6


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("monosoup", lambda s, energy=None: _swapped(s)),
        ("monosoup", lambda s, energy=None: _without_rho(s)),
    ],
)
def test_the_reference_test_sees_a_wrong_factor(monkeypatch, rule, wrong):
    """Mutation check: with the factors swapped, or rho forgotten, the comparison above must fail."""
    base, checkpoints = _run(60, 40, 1, seed=20)
    want, _, _ = reference.monosoup(base, checkpoints, 0.5)
    monkeypatch.setattr(rules_module, "monosoup_shrinkage", wrong)
    assert _delta_error(monosoup(base, checkpoints, energy=0.5), want, base) > 10 * TOLERANCE


def _edit(s):
    return shrinkage_module.monosoup_shrinkage(s, energy=0.5)


def _swapped(s):
    edit = _edit(s)
    return shrinkage_module.Shrinkage(
        rank=edit.rank,
        energy_high=edit.energy_high,
        rho=edit.rho,
        lam_high=edit.lam_low,
        lam_low=edit.lam_high,
    )


def _without_rho(s):
    edit = _edit(s)
    cos = math.sqrt(1.0 - edit.energy_high)
    return shrinkage_module.Shrinkage(
        rank=edit.rank, energy_high=edit.energy_high, rho=0.0, lam_high=1.0 - cos, lam_low=cos
    )


def test_mean_is_the_mean_and_one_checkpoint_is_itself():
    base, checkpoints = _run(30, 20, 3)
    assert torch.allclose(mean(base, checkpoints).weight, torch.stack(checkpoints).mean(0), atol=1e-7)
    one = mean(base, checkpoints[:1])
    assert torch.equal(one.weight, checkpoints[0])
    assert one.weight.data_ptr() != checkpoints[0].data_ptr()
    assert one.relative_change == 0.0


@pytest.mark.parametrize("rank", [None, 20, 30, 1000])
def test_svd_average_that_cuts_nothing_is_the_mean_and_factorises_nothing(monkeypatch, rank):
    monkeypatch.setattr(rules_module, "spectrum", None)
    base, checkpoints = _run(30, 20, 2)
    result = svd_average(base, checkpoints, rank=rank)
    assert torch.equal(result.weight, mean(base, checkpoints).weight)
    assert result.method == "none"


def test_one_direction_short_of_full_rank_is_nearly_the_mean():
    base, checkpoints = _run(30, 20, 2)
    almost = svd_average(base, checkpoints, rank=19)
    assert almost.method == "gram"
    missing = [torch.linalg.svdvals(w.double() - base.double())[-1] for w in checkpoints]
    distance = float((almost.weight - mean(base, checkpoints).weight).double().norm())
    assert distance <= float(sum(missing)) / 2 + TOLERANCE * 1e-2


@pytest.mark.parametrize(("share", "rank"), [(0.5, 10), (0.24, 5), (0.001, 1), (0.999, 20)])
def test_a_float_rank_is_a_share_of_the_smaller_side(share, rank):
    base, checkpoints = _run(30, 20, 2)
    assert torch.equal(
        svd_average(base, checkpoints, rank=share).weight, svd_average(base, checkpoints, rank=rank).weight
    )


def test_energy_kept_is_the_share_of_both_deltas_inside_the_rank():
    base, checkpoints = _run(60, 40, 2)
    kept = total = 0.0
    for w in checkpoints:
        squares = torch.linalg.svdvals(w.double() - base.double()).square()
        kept, total = kept + float(squares[:5].sum()), total + float(squares.sum())
    assert svd_average(base, checkpoints, rank=5).energy_kept == pytest.approx(kept / total, rel=1e-5)


def test_relative_change_is_measured_from_the_newest_checkpoint():
    base, checkpoints = _run(30, 20, 2)
    result = mean(base, checkpoints)
    newest = checkpoints[-1].double()
    want = (result.weight.double() - newest).norm() / (newest - base.double()).norm()
    assert result.relative_change == pytest.approx(float(want), rel=1e-5)
    assert mean(base, [checkpoints[0], base]).relative_change == math.inf


@pytest.mark.parametrize("rule", RULES)
def test_permuting_rows_permutes_the_result(rule):
    base, checkpoints = _run(50, 30, 2, seed=40)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    plain = merge_tensor(rule, base, checkpoints, rank=4, seed=0)
    moved = merge_tensor(rule, base[order], [w[order] for w in checkpoints], rank=4, seed=0)
    assert relative_error(moved.weight - base[order], (plain.weight - base)[order]) < TOLERANCE


@pytest.mark.parametrize("rule", RULES)
def test_transposing_transposes_the_result(rule):
    base, checkpoints = _run(50, 30, 2, seed=41)
    plain = merge_tensor(rule, base, checkpoints, rank=4, seed=0)
    turned = merge_tensor(rule, base.T, [w.T for w in checkpoints], rank=4, seed=0)
    assert relative_error(turned.weight.T - base, plain.weight - base) < TOLERANCE


@settings(max_examples=25, deadline=None)
@given(
    rule=st.sampled_from(sorted(RULES)),
    exponent=st.integers(-20, 20),
    m=st.integers(1, 24),
    n=st.integers(1, 24),
    k=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_scaling_everything_by_a_power_of_two_scales_the_result(rule, exponent, m, n, k, seed):
    base, checkpoints = _run(m, n, k, seed=seed)
    scale = 2.0**exponent
    plain = merge_tensor(rule, base, checkpoints, rank=3, seed=0)
    scaled = merge_tensor(rule, scale * base, [scale * w for w in checkpoints], rank=3, seed=0)
    assert relative_error(scaled.weight / scale - base, plain.weight - base) < TOLERANCE
    assert scaled.rank == plain.rank


def test_monosoup_of_a_delta_with_one_direction_changes_nothing():
    """P = 1 gives lam_low = 0 and lam_high = 1: on rank one the edit is the identity, so idempotent."""
    generator = torch.Generator().manual_seed(2)
    delta = torch.randn(40, 1, generator=generator) @ torch.randn(1, 30, generator=generator)
    base = torch.zeros(40, 30)
    once = monosoup(base, [delta])
    assert relative_error(once.weight, delta) < 1e-6
    assert relative_error(monosoup(base, [once.weight]).weight, once.weight) < 1e-6


def test_monosoup_shrinks_every_direction_and_adds_none():
    base, checkpoints = _run(60, 40, 1, seed=50)
    before = torch.linalg.svdvals(checkpoints[0].double() - base.double())
    after = torch.linalg.svdvals(monosoup(base, checkpoints).weight.double() - base.double())
    assert bool((after <= before + 1e-6).all())
    assert float(after.norm()) < float(before.norm())


def test_pairwise_monosoup_edits_the_mean_task_vector():
    base, checkpoints = _run(50, 30, 3, seed=60)
    average = torch.stack([w.double() for w in checkpoints]).mean(0).float()
    pair, single = monosoup(base, checkpoints), monosoup(base, [average])
    assert relative_error(pair.weight - base, single.weight - base) < TOLERANCE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(7,), (), (1,)])
def test_tensors_below_two_dimensions_are_averaged(rule, shape):
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(shape, generator=generator)
    checkpoints = [base + 0.1 * torch.randn(shape, generator=generator) for _ in range(2)]
    result = merge_tensor(rule, base, checkpoints, rank=2, seed=0)
    assert result.weight.shape == shape
    assert torch.allclose(result.weight, (checkpoints[0] + checkpoints[1]) / 2)
    assert torch.equal(merge_tensor(rule, base, checkpoints[1:], rank=2, seed=0).weight, checkpoints[1])


@pytest.mark.parametrize("rule", RULES)
def test_a_stack_of_experts_is_merged_matrix_by_matrix(rule):
    pairs = [_run(20, 12, 2, seed=70 + i) for i in range(3)]
    base = torch.stack([b for b, _ in pairs])
    checkpoints = [torch.stack([c[i] for _, c in pairs]) for i in range(2)]
    result = merge_tensor(rule, base, checkpoints, rank=3, seed=0)
    for i, (b, c) in enumerate(pairs):
        assert torch.equal(result.weight[i], merge_tensor(rule, b, c, rank=3, seed=0).weight)


@pytest.mark.parametrize("rule", RULES)
def test_a_convolution_is_one_matrix_of_its_output_channels(rule):
    base, checkpoints = _run(8, 24, 2, seed=80)
    flat = merge_tensor(rule, base, checkpoints, rank=3, seed=0)
    conv = merge_tensor(
        rule, base.reshape(8, 6, 2, 2), [w.reshape(8, 6, 2, 2) for w in checkpoints], rank=3, seed=0
    )
    assert torch.equal(conv.weight.reshape(8, 24), flat.weight)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("where", ["base", "oldest", "newest"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_keeps_the_newest_checkpoint(rule, where, bad):
    """kohya sd-scripts #517, GaLore #26: skip that tensor, the run goes on."""
    base, checkpoints = _run(20, 12, 2)
    {"base": base, "oldest": checkpoints[0], "newest": checkpoints[1]}[where][1, 2] = bad
    result = merge_tensor(rule, base, checkpoints, rank=3, seed=0)
    assert result.skipped is not None
    assert "not finite" in result.skipped
    assert torch.equal(result.weight.nan_to_num(), checkpoints[1].nan_to_num())
    assert result.weight.data_ptr() != checkpoints[1].data_ptr()
    assert result.relative_change == 0.0


@pytest.mark.parametrize("rule", ["svd_average", "monosoup"])
def test_a_factorisation_that_never_converges_keeps_the_newest_checkpoint(monkeypatch, rule):
    """kohya sd-scripts #517, GaLore #26."""

    def fails(tall, rank, seed):
        raise torch.linalg.LinAlgError("failed to converge")

    for route in ("gram", "randomised", "full"):
        monkeypatch.setitem(factorise_module.ROUTES, route, fails)
    base, checkpoints = _run(20, 12, 2)
    result = merge_tensor(rule, base, checkpoints, rank=3, seed=0)
    assert "no method converged" in result.skipped
    assert torch.equal(result.weight, checkpoints[1])


def test_a_sum_that_overflows_is_skipped():
    base = torch.zeros(4, 3)
    result = mean(base, [torch.full((4, 3), 3e38), torch.full((4, 3), 2e38)])
    assert "not finite" in result.skipped


def test_monosoup_skips_a_delta_below_a_millionth_of_the_base():
    base, checkpoints = _run(20, 12, 1)
    delta = checkpoints[0] - base
    unit = base.norm() / delta.norm()
    # Doubles keep the delta exact; the threshold sits between the two.
    zero_like = base.double()
    below = (zero_like + delta.double() * float(unit) * 0.5e-7).float()
    above = (zero_like + delta.double() * float(unit) * 5e-6).float()
    assert "delta below 1e-06" in monosoup(base, [below]).skipped
    assert torch.equal(monosoup(base, [below]).weight, below)
    assert monosoup(base, [above]).skipped is None


@pytest.mark.parametrize("rule", RULES)
def test_an_unchanged_tensor_comes_back_unchanged(rule):
    base, _ = _run(20, 12, 1)
    result = merge_tensor(rule, base, [base, base], rank=3, seed=0)
    assert torch.equal(result.weight, base)
    assert result.relative_change == 0.0


@pytest.mark.parametrize("rule", RULES)
def test_inputs_are_left_alone_and_an_empty_tensor_is_skipped(rule):
    base, checkpoints = _run(20, 12, 2)
    copies = [base.clone(), *(w.clone() for w in checkpoints)]
    merge_tensor(rule, base.requires_grad_(), checkpoints, rank=3, seed=0)
    for now, before in zip([base, *checkpoints], copies, strict=True):
        assert torch.equal(now, before)
    assert merge_tensor(rule, torch.ones(0, 3), [torch.ones(0, 3)], rank=3, seed=0).skipped == "empty"


@pytest.mark.parametrize("rule", RULES)
def test_bf16_inputs_give_float32_results(rule):
    base, checkpoints = _run(20, 12, 2)
    result = merge_tensor(rule, base.bfloat16(), [w.bfloat16() for w in checkpoints], rank=3, seed=0)
    assert result.weight.dtype == torch.float32
    assert not result.weight.requires_grad


@pytest.mark.parametrize("rule", RULES)
def test_merging_leaves_the_global_random_state_untouched(rule):
    """peft PR#2225, pytorch #77206; the randomised route runs for 200 x 160 at rank 8."""
    base, checkpoints = _run(200, 160, 2)
    before = torch.random.get_rng_state()
    first = merge_tensor(rule, base, checkpoints, rank=8, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(merge_tensor(rule, base, checkpoints, rank=8, seed=1).weight, first.weight)


def test_an_unknown_rule_is_refused_with_the_close_match():
    with pytest.raises(MergeError, match=r"'svd_averge'; allowed: svd_average.*mean 'svd_average'\?"):
        merge_tensor("svd_averge", torch.ones(2, 2), [torch.ones(2, 2)], rank=1, seed=0)


@pytest.mark.parametrize("rank", [0, -1, 1.0, 0.0, 1.5, float("nan"), True, "8"])
def test_a_rank_out_of_range_is_named(rank):
    with pytest.raises(MergeError, match="rank="):
        svd_average(torch.ones(2, 2), [torch.ones(2, 2)], rank=rank)


def test_wrong_checkpoints_are_named():
    with pytest.raises(MergeError, match="no checkpoint"):
        mean(torch.ones(2, 2), [])
    with pytest.raises(MergeError, match=r"checkpoint 2 of 2 has shape \(2, 3\)"):
        mean(torch.ones(2, 2), [torch.ones(2, 2), torch.ones(2, 3)])
    with pytest.raises(MergeError, match="int64"):
        mean(torch.ones(2).long(), [torch.ones(2)])
    with pytest.raises(MergeError, match="energy=2"):
        monosoup(torch.ones(2), [torch.ones(2)], energy=2.0)
