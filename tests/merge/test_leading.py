"""The random-start eigensolver: its error estimate must be honest, or its stopping rule means nothing."""

import pytest
import torch

from tests.merge.reference import with_spectrum
from zen_train.merge import leading as leading_module
from zen_train.merge.leading import NotConverged, leading_directions, missed_energy


def _problem(seed=0, n=160):
    a = with_spectrum(n, n, torch.logspace(0, -2, n), seed).double()
    return a.T @ a


def test_the_estimate_tells_the_true_loss_within_a_factor_of_two():
    """Perturb exact eigenvectors by a known amount; the estimate sees only the residual."""
    gram = _problem()
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    generator = torch.Generator().manual_seed(1)
    rank, width = 10, 30
    for size in (1e-2, 1e-4):
        noise = torch.randn(160, width, generator=generator, dtype=torch.float64)
        x = torch.linalg.qr(vectors[:, :width] + size * noise / 160**0.5).Q
        ritz, rotation = torch.linalg.eigh(x.T @ gram @ x)
        ritz, x = ritz.flip(0), x @ rotation.flip(1)
        residual = (gram @ x - x * ritz).norm(dim=0)
        true_loss = float(values[:rank].sum() - ritz[:rank].sum())
        estimate = missed_energy(ritz[:rank], residual[:rank], float(ritz[-1]))
        assert true_loss / 2 <= estimate <= 2 * true_loss


def test_without_a_gap_the_estimate_falls_back_to_the_residual_itself():
    values, residual = torch.ones(3).double(), torch.tensor([1e-3, 0.0, 2e-3]).double()
    assert missed_energy(values, residual, 1.0) == pytest.approx(3e-3)


def test_too_few_cycles_raise_instead_of_returning_poor_directions(monkeypatch):
    monkeypatch.setattr(leading_module, "_MAX_CYCLES", 1)
    gram = _problem()
    with pytest.raises(NotConverged, match="after 1 cycles"):
        leading_directions(lambda x: gram @ x, size=160, rank=10, seed=0, device=torch.device("cpu"))


def test_the_filter_needs_far_fewer_products_than_plain_iteration():
    """Plain iteration gains (lam_cut / lam_rank)^2 a product: about 80 for this spectrum and tolerance."""
    gram = _problem()
    products = []

    def multiply(x):
        products.append(x.shape)
        return gram @ x

    leading_directions(multiply, size=160, rank=10, seed=0, device=torch.device("cpu"))
    assert len(products) <= 30


@pytest.mark.parametrize("degree", [1, 2, 3, 7])
def test_the_filter_is_the_chebyshev_polynomial(degree):
    """On a diagonal matrix and a vector of ones, entry i is T(2 value_i / cut - 1), up to one scale."""
    values = torch.tensor([0.0, 0.1, 0.35, 0.5, 0.9, 1.7], dtype=torch.float64)
    cut = 0.5
    ones = torch.ones(6, 1, dtype=torch.float64)
    got = leading_module._filtered(lambda x: values[:, None] * x, ones, values[:, None], cut, degree)[:, 0]
    t = 2.0 * values / cut - 1.0
    inside = torch.cos(degree * torch.acos(t.clamp(-1.0, 1.0)))
    outside = torch.cosh(degree * torch.acosh(t.clamp_min(1.0)))
    want = torch.where(t <= 1.0, inside, outside)
    assert torch.allclose(got, want / want.norm(), rtol=1e-12, atol=1e-14)
