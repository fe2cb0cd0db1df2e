"""Coded singular directions: within their budget, unbiased, on their levels, and fitted to each other."""

import sys
from pathlib import Path

import pytest
import torch

from zen_train.delta.direction_bits import GROUP, direction_losses, most_directions, spread_bits
from zen_train.delta.directions import encode_directions, fitted, quantised, unbiased_scales
from zen_train.delta.directions_parts import check_directions, directions_product, pack_directions
from zen_train.errors import DeltaError

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


def decaying(rows, columns, *, power=1.0, seed=0, stack=()):
    """A matrix with the singular values 1/i^power."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    u = torch.linalg.qr(torch.randn(*stack, rows, rank, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(*stack, columns, rank, generator=generator)).Q
    return u * torch.arange(1, rank + 1) ** -power @ v.mT


def coded(delta, bits=1.0, *, transposed=False):
    found = encode_directions(torch.zeros_like(delta), delta, bits=bits, transposed=transposed)
    assert found is not None
    return found


def alignment(made, delta):
    return float((made.double() * delta).sum() / delta.double().square().sum())


def bits_used(found, rows, columns):
    return sum(found.parts.counts) * (rows + columns) + 32 * found.parts.counts[0]


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (33, 47)], ids=str)
@pytest.mark.parametrize("bits", [0.4, 1.0, 3.0])
def test_the_budget_is_kept_and_nearly_used(shape, bits):
    found = coded(decaying(*shape), bits)
    budget, used = bits * shape[0] * shape[1], bits_used(found, *shape)
    assert budget - 2 * GROUP * (sum(shape) + 32) < used <= budget
    if most_directions(*shape, bits) >= GROUP:
        assert not any(count % GROUP for count in found.parts.counts)
    assert found.parts.scales.shape == (found.parts.counts[0],)
    assert list(found.parts.counts) == sorted(found.parts.counts, reverse=True)


def test_bits_are_spread_as_no_exchange_of_one_step_can_better():
    """Among the spreads of this budget that end on whole steps, found by trying them all."""
    square, rows, columns, losses = [9.0, 3.0, 1.0, 0.2], 10, 22, direction_losses()
    found = spread_bits(square, rows=rows, columns=columns, bits=8 * 32 / (rows * columns))

    def loss(bits):
        return sum(s * losses[b] for s, b in zip(square, bits, strict=True))

    every = torch.cartesian_prod(*[torch.arange(7)] * 4).tolist()
    used = sum(found) * 32 + 32 * sum(b > 0 for b in found)
    assert used <= 8 * 32
    within = [bits for bits in every if sum(bits) * 32 + 32 * sum(b > 0 for b in bits) <= used]
    assert loss(found) == min(map(loss, within))


def test_levels_are_odd_multiples_and_survive_packing():
    """Plane p is worth 2^-p: what is packed comes back value by value."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.tensor([4, 3, 3, 1, 1])
    left, right = (quantised(torch.randn(5, length, generator=generator), bits) for length in (13, 21))
    for row, count in zip(right, bits.tolist(), strict=True):
        odd = row * 2 ** (count - 1)
        assert bool((odd % 2 == 1).all())
        assert bool((odd.abs() < 2**count).all())
    scales = torch.tensor([3.0, 2.0, 0.0, 1.0, 0.5])
    parts = pack_directions(left, right, scales, [5, 3, 3, 1])
    assert parts.right.shape == (5 + 3 + 3 + 1, 3)
    assert parts.left.shape == (13, 2)
    expected = (left.double().T * scales) @ right.double()
    torch.testing.assert_close(directions_product(parts, 21).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("bits", "left"), list(enumerate((0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104), 1))
)
def test_a_gaussian_vector_is_quantised_as_well_as_max_1960_says(bits, left):
    """Over 400,000 values, of which few are in the tails that 6 bits leave."""
    vector = torch.randn(1, 400_000, generator=torch.Generator().manual_seed(0))
    value = quantised(vector, torch.tensor([bits])).double()
    lost = 1 - float((value * vector).sum() ** 2 / (value.square().sum() * vector.double().square().sum()))
    assert lost == pytest.approx(left, rel=0.02)


def test_every_direction_keeps_all_of_itself():
    """c <u sigma v, l r> = sigma^2, by an SVD of the test's own; the singular values are distinct, so it is theirs."""
    delta = decaying(192, 256)
    found = coded(delta)
    u, sigma, v = torch.linalg.svd(delta.double(), full_matrices=False)
    count = found.parts.counts[0]
    for index in range(count):
        only = found.parts._replace(scales=torch.zeros_like(found.parts.scales))
        only.scales[index] = found.parts.scales[index]
        kept = u[:, index] @ directions_product(only, 256).double() @ v[index]
        assert float(kept / sigma[index]) == pytest.approx(1.0, abs=1e-4)  # singular vectors held in float32


def test_it_is_unbiased_where_delta_come_and_least_squares_shrink():
    """<D_hat, D> / ||D||^2: kept directions in full, plus what the vectors' noise catches of all others.

    The noise of direction i is nearly orthogonal to its own and has at most e/(1-e), e = 0.595, of its square; it
    falls on (N-1)(K-1) other directions at random, of which D fills a line: three standard deviations.
    """
    from fidelity_codes import delta_come

    rows, columns = 192, 256
    delta = decaying(rows, columns)
    found = coded(delta)
    made = directions_product(found.parts, columns)
    sigma_square = torch.arange(1, rows + 1, dtype=torch.float64) ** -2
    kept = float(sigma_square[: found.parts.counts[0]].sum() / sigma_square.sum())
    noise = (0.595 / 0.405 / ((rows - 1) * (columns - 1))) ** 0.5
    ours = alignment(made, delta)
    assert kept - 3 * noise < ours < 1 + 3 * noise
    assert bits_used(found, rows, columns) <= delta.numel()
    least = alignment(made * (1 - found.least_square / found.delta_square) / ours, delta)
    assert ours > least
    assert ours > alignment(delta_come(delta)[0], delta)


def test_stated_squares_are_those_of_what_is_stored():
    delta = decaying(40, 70)
    found = coded(delta)
    made = directions_product(found.parts, 70).double()
    assert found.error_square == pytest.approx(float((delta - made).square().sum()), rel=1e-5)
    assert found.delta_square == pytest.approx(float(delta.double().square().sum()), rel=1e-9)
    best = float((made * delta).sum() / made.square().sum())
    assert found.least_square == pytest.approx(float((delta - best * made).square().sum()), rel=1e-4)
    assert found.zeros == 0.0


def test_a_stack_shares_its_spread_and_an_expert_that_did_not_move_stays():
    delta = decaying(40, 50, stack=(3,))
    delta[1] = 0
    found = coded(delta)
    assert found.parts.right.shape == (3, sum(found.parts.counts), 7)
    made = directions_product(found.parts, 50)
    assert float(made[1].abs().max()) == 0.0
    assert min(alignment(made[e], delta[e]) for e in (0, 2)) > 0.9
    assert found.zeros == pytest.approx(1 / 3)


def test_transposed_is_the_transpose_and_the_same_delta_gives_the_same_bytes():
    delta = decaying(40, 50)
    state = torch.get_rng_state()
    first, second = coded(delta), coded(delta.T.contiguous(), transposed=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.parts.counts == second.parts.counts
    for a, b in zip(first.parts[:3], second.parts[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_what_cannot_be_decomposed_is_left_to_the_signs(bad):
    delta = torch.full((20, 30), bad)
    assert encode_directions(torch.zeros(20, 30), delta, bits=1.0, transposed=False) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda parts: parts.right[4, -1].bitwise_or_(128),
            "right: padding bits past column 21",
        ),
        (lambda parts: parts.left[2, -1].bitwise_or_(128), "left: padding bits past column 5"),
        (lambda parts: parts.scales[1].neg_(), "negative"),
        (lambda parts: parts.scales[1].fill_(float("nan")), "NaN"),
        (lambda parts: parts.scales[1].fill_(float("inf")), "infinity"),
    ],
    ids=["right", "left", "negative", "nan", "infinity"],
)
def test_values_that_no_writer_makes_are_refused(change, message):
    left, right = (quantised(decaying(3, length), torch.tensor([2, 2, 1])) for length in (13, 21))
    parts = pack_directions(left, right, torch.ones(3), [3, 2])
    check_directions(parts, 21)
    change(parts)
    with pytest.raises(DeltaError, match=message):
        check_directions(parts, 21)


def test_the_bench_counts_what_is_stored():
    from fidelity_codes import CODES

    delta = decaying(64, 96)
    for name, bits in {"directions": 1.0, "directions_0.5": 0.5}.items():
        made, stored = CODES[name](delta)
        found = coded(delta, bits)
        assert torch.equal(made, directions_product(found.parts, 96))
        padding = 8 * len(found.parts.counts) * (64 + found.parts.counts[0])
        assert bits_used(found, 64, 96) <= stored <= bits_used(found, 64, 96) + padding


def test_vectors_are_fitted_to_each_other_once():
    """Each half of the round leaves less: both as they are, right fitted to left, then left fitted to right."""
    delta = decaying(96, 128)
    bits = torch.tensor([4] * 2 + [3] * 4 + [2] * 6 + [1] * 10)
    u, _, v = torch.linalg.svd(delta, full_matrices=False)
    plain_left, plain_right = quantised(u.T[:22].contiguous(), bits), quantised(v[:22], bits)
    left, right = fitted(u.T[:22].contiguous(), delta, bits)

    def left_over(left, right):
        """With the scales of least squares."""
        terms = torch.einsum("rn,rk->nkr", left, right).reshape(-1, 22)
        scales = torch.linalg.lstsq(terms, delta.reshape(-1, 1)).solution
        return float((terms @ scales - delta.reshape(-1, 1)).square().sum())

    assert left_over(left, right) < 0.98 * left_over(plain_left, right)
    assert left_over(plain_left, right) < 0.98 * left_over(plain_left, plain_right)


@pytest.mark.parametrize("rows", [70, 500])
def test_a_matrix_whose_vectors_are_spikes_is_not_blown_up(rows):
    """One bit holds a spike with a cosine near 0, and vectors catch each other: no more than all of D is kept."""
    delta = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 65) ** -0.5
    found = coded(delta, 2.0)
    assert alignment(directions_product(found.parts, 64), delta) == pytest.approx(1.0, abs=1e-4)
    assert found.error_square < 3 * found.delta_square  # 63 without the floor and the cap


def test_a_direction_that_its_vectors_do_not_hold_gets_nothing():
    square, own = torch.full((4,), 4.0, dtype=torch.float64), torch.full((4,), 9.0, dtype=torch.float64)
    share = 6 * torch.tensor([0.9, 0.021**0.5, 0.019**0.5, -0.5], dtype=torch.float64)
    expected = torch.tensor([4 / 5.4, 4 / float(share[1]), 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(unbiased_scales(square, share, own), expected)
