"""The truncated SVD against float64 LAPACK, on matrices chosen to break a Gram matrix."""

import pytest
import torch

from tests.merge.reference import best_error, matrices, signal_and_noise, with_spectrum
from zen_train.errors import MergeError
from zen_train.merge import SVDResult, svd
from zen_train.merge import factorise as factorise_module
from zen_train.merge.leading import ENERGY_TOLERANCE, NotConverged, block_width
from zen_train.merge.routes import cheapest_route

MATRICES = dict(matrices())
# float32 results: a few units of 6e-8, times the square root of the number of directions.
ROUNDING = 2e-6


@pytest.mark.parametrize("method", ["auto", "gram", "full"])
@pytest.mark.parametrize("name", MATRICES)
def test_full_rank_factors_rebuild_the_matrix(name, method):
    matrix = MATRICES[name]
    result = svd(matrix, method=method)
    rebuilt = result.u.double() @ torch.diag(result.s.double()) @ result.vh.double()
    assert float((rebuilt - matrix.double()).norm()) <= ROUNDING * float(matrix.double().norm())
    assert result.energy_kept == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("method", ["auto", "gram", "full"])
@pytest.mark.parametrize("name", MATRICES)
def test_singular_values_are_within_float32_rounding_of_the_largest(name, method):
    """sqrt(float64 eps) is a quarter of float32 eps, so a Gram matrix loses nothing that float32 had."""
    matrix = MATRICES[name]
    want = torch.linalg.svdvals(matrix.double())
    got = svd(matrix, method=method).s.double()
    assert got.shape == want.shape
    assert bool((got >= 0.0).all())
    assert bool((got[:-1] >= got[1:]).all())
    assert float((got - want).abs().max()) <= (ROUNDING if method == "full" else ROUNDING / 8) * float(
        want[0]
    )


@pytest.mark.parametrize("method", ["auto", "gram", "full"])
@pytest.mark.parametrize("name", MATRICES)
def test_both_sides_are_orthonormal_even_for_zero_singular_values(name, method):
    result = svd(MATRICES[name], method=method)
    r = result.s.numel()
    eye = torch.eye(r, dtype=torch.float64)
    assert float((result.u.double().T @ result.u.double() - eye).abs().max()) <= ROUNDING / 2
    assert float((result.vh.double() @ result.vh.double().T - eye).abs().max()) <= ROUNDING / 2


@pytest.mark.parametrize("method", ["auto", "gram", "full", "randomised"])
@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize("name", [n for n, matrix in MATRICES.items() if min(matrix.shape) > 12])
def test_truncation_reaches_the_best_possible_error(name, rank, method):
    matrix = MATRICES[name]
    result = svd(matrix, rank=rank, method=method)
    rebuilt = result.u.double() @ torch.diag(result.s.double()) @ result.vh.double()
    size = float(matrix.double().norm())
    best = best_error(matrix, rank)
    assert result.u.shape == (matrix.shape[0], rank)
    assert result.vh.shape == (rank, matrix.shape[1])
    assert float((rebuilt - matrix.double()).norm()) <= best + ROUNDING * size
    assert result.energy_kept == pytest.approx(1.0 - (best / size) ** 2, abs=1e-5)


@pytest.mark.parametrize(
    "matrix",
    [
        signal_and_noise(300, 200, 5),
        signal_and_noise(200, 300, 6, noise=1e-4),
        torch.randn(200, 200, generator=torch.Generator().manual_seed(7)),
        with_spectrum(220, 200, torch.logspace(0, -8, 200), 8),
        with_spectrum(220, 200, torch.arange(1, 201, dtype=torch.float64) ** -0.5, 9),
        with_spectrum(220, 200, [1.0] * 3 + [0.0] * 197, 10),
    ],
    ids=["signal", "wide-strong-signal", "gaussian", "geometric", "power-law", "rank3"],
)
def test_randomised_directions_miss_no_more_than_their_tolerance(matrix):
    rank = 20
    result = factorise_module.spectrum(matrix, rank=rank, method="randomised", seed=0)
    assert result.method == "randomised"
    values = torch.linalg.svdvals(matrix.double()).square()
    tall = matrix.double() if result.side == "right" else matrix.double().T
    captured = float((tall @ result.basis).square().sum())
    # The estimate is second order, so twice the tolerance is what the test allows.
    assert float(values[:rank].sum()) - captured <= 2.0 * ENERGY_TOLERANCE * float(values.sum())
    assert float(result.s.square().sum()) == pytest.approx(captured, rel=1e-10)


def test_randomised_hands_a_spectrum_without_a_gap_to_the_gram_route():
    matrix = with_spectrum(200, 200, torch.linspace(1.0, 1.0 - 1e-6, 200, dtype=torch.float64), 11)
    result = svd(matrix, rank=10, method="randomised")
    assert result.method == "gram"
    assert result.energy_kept == pytest.approx(10 / 200, rel=1e-4)


def test_randomised_is_refused_by_itself_where_the_rank_is_not_far_below_the_size():
    assert svd(MATRICES["gaussian-80x50"], rank=30, method="randomised").method == "gram"


@pytest.mark.parametrize("method", ["auto", "gram", "randomised", "full"])
def test_equal_seeds_give_equal_bits_and_the_global_random_state_stays(method):
    """peft PR#2225, pytorch #77206: a merge must not move the random state of the run."""
    matrix = signal_and_noise(300, 200, 12)
    before = torch.random.get_rng_state()
    first = svd(matrix, rank=10, method=method, seed=3)
    torch.rand(5)
    after_draw = torch.random.get_rng_state()
    second = svd(matrix, rank=10, method=method, seed=3)
    assert torch.equal(torch.random.get_rng_state(), after_draw)
    assert torch.equal(first.u, second.u)
    assert torch.equal(first.s, second.s)
    assert torch.equal(first.vh, second.vh)
    torch.random.set_rng_state(before)
    svd(matrix, rank=10, method=method, seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("method", ["auto", "gram", "randomised", "full"])
def test_a_matrix_that_is_not_finite_is_refused(method, bad):
    """kohya sd-scripts #517, GaLore #26."""
    matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    matrix[3, 4] = bad
    with pytest.raises(MergeError, match=r"\(40, 30\) holds NaN or inf"):
        svd(matrix, rank=2, method=method)


def _fails(tall, rank, seed):
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


def _returns_nan(tall, rank, seed):
    return torch.full((tall.shape[1], rank), float("nan")).double(), torch.ones(rank).double()


@pytest.mark.parametrize("broken", [_fails, _returns_nan])
def test_a_route_that_fails_hands_over_to_the_next(monkeypatch, broken):
    """kohya sd-scripts #517, GaLore #26: one matrix that does not converge must not end the run."""
    monkeypatch.setitem(factorise_module.ROUTES, "gram", broken)
    result = svd(MATRICES["gaussian-80x50"], method="gram")
    assert result.method == "full"
    assert float(result.s[0]) == pytest.approx(float(torch.linalg.svdvals(MATRICES["gaussian-80x50"])[0]))


def test_when_every_route_fails_the_error_names_the_shape_and_each_reason(monkeypatch):
    monkeypatch.setitem(factorise_module.ROUTES, "gram", _fails)
    monkeypatch.setitem(factorise_module.ROUTES, "full", _returns_nan)
    with pytest.raises(MergeError, match=r"\(80, 50\).*gram: the algorithm.*full: the result is not finite"):
        svd(MATRICES["gaussian-80x50"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 1.5}, "rank=1.5"),
        ({"rank": True}, "rank=True"),
        ({"method": "qr"}, "'qr'; allowed: auto, gram"),
    ],
)
def test_wrong_options_are_named(arguments, message):
    with pytest.raises(MergeError, match=message):
        svd(torch.ones(3, 3), **arguments)


@pytest.mark.parametrize(
    "wrong", [torch.ones(3), torch.ones(2, 3, 4), torch.ones(0, 3), torch.ones(3, 3).int()]
)
def test_only_floating_point_matrices_are_taken(wrong):
    with pytest.raises(MergeError, match="floating point matrix"):
        svd(wrong)


def test_a_strided_view_gives_the_same_factors_as_its_copy():
    wide = torch.randn(60, 80, generator=torch.Generator().manual_seed(1))
    view = wide[::2, ::2]
    assert torch.allclose(svd(view, rank=4).s, svd(view.contiguous(), rank=4).s, rtol=1e-6, atol=0.0)
    assert isinstance(svd(view), SVDResult)


def test_auto_takes_the_gram_route_on_small_matrices_and_the_randomised_one_on_large():
    assert cheapest_route(192, 576, 64) == "gram"
    assert cheapest_route(576, 1536, 200) == "gram"
    assert cheapest_route(576, 576, 16) == "randomised"
    assert cheapest_route(8192, 28672, 256) == "randomised"
    assert cheapest_route(28672, 8192, 256) == "randomised"
    assert cheapest_route(8192, 8192, 8192) == "gram"
    assert block_width(4) == 20


def test_not_converged_is_no_error_that_a_caller_sees():
    assert not issubclass(NotConverged, MergeError)
