"""The one-bit code of trained weights against its definition, and against what an artifact of it gives back."""

import pytest
import torch

from tests.kernels.backends import EVERYWHERE, forced
from zen_train.delta.codec import add_delta, encode
from zen_train.kernels.one_bit_code import one_bit_code_
from zen_train.kernels.one_bit_code.reference import one_bit_code_reference

LEAST_SQUARES = {"per_row": True, "along_weight": 1.0, "dither": False}
SETTINGS = [
    {"per_row": per_row, "along_weight": along_weight, "dither": dither}
    for per_row in (True, False)
    for along_weight in (1.0, 8.0)
    for dither in (False, True)
]


@pytest.fixture(params=EVERYWHERE)
def backend(request, monkeypatch):
    return forced(request.param, monkeypatch)


def pair(n, k, dtype=torch.bfloat16):
    """A latent and its base, with differences of exactly zero among them, of either sign."""
    g = torch.Generator().manual_seed(n + k)
    base = torch.randn(n, k, generator=g).to(dtype)
    latent = base.float() + 1e-3 * torch.randn(n, k, generator=g)
    latent[:, :: k // 3 + 1] = base[:, :: k // 3 + 1].float()
    base[0, 0], latent[0, 0] = 0.0, -0.0
    return latent, base


def blank(n, k):
    """What nothing has been written into yet; not empty, where the allocator may have left an earlier answer."""
    return torch.full((n, k), torch.nan)


def assert_codes_match(found, truth, base, *, dither):
    """Alpha is a float32 of float32 sums over at most 1,024 columns: 2^-20 of itself, and the code's own rounding."""
    alpha = (truth - base.float()).abs().amax()
    bound = 2.0**-20 * alpha + 2.0**-23 * truth.abs().amax()
    if dither:  # a value next to a step may fall on the other side of it
        assert torch.equal(found, found.bfloat16().float())
        assert (found != truth).float().mean() <= 1e-3
        bound = bound + 2.0**-7 * truth.abs().amax()
    assert (found - truth).abs().max() <= bound


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 7), (3, 16), (2, 33), (9, 1500), (70, 1030), (600, 64)], ids=str
)
def test_it_is_the_definition(backend, shape, settings):
    latent, base = pair(*shape)
    found = one_bit_code_(blank(*shape), latent, base, backend=backend, **settings)
    truth = one_bit_code_reference(latent, base, **settings)
    assert_codes_match(found, truth, base, dither=settings["dither"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("along_weight", [1.0, 8.0])
def test_it_is_what_the_artifact_gives_back(backend, dtype, along_weight):
    latent, base = pair(40, 200, dtype)
    found = one_bit_code_(
        blank(40, 200),
        latent,
        base,
        per_row=True,
        along_weight=along_weight,
        dither=False,
        backend=backend,
    )
    truth = add_delta(base, encode(base, latent, scale="row", along_weight=along_weight).planes)
    assert_codes_match(found, truth, base, dither=False)


def test_a_difference_of_zero_counts_as_plus_one_whatever_its_sign(backend):
    latent, base = torch.tensor([[-0.0, 0.0, 1.0, 3.0]]), torch.tensor([[0.0, -0.0, 1.0, 1.0]])
    found = one_bit_code_(blank(1, 4), latent, base, backend=backend, **LEAST_SQUARES)
    assert found.tolist() == [[0.5, 0.5, 1.5, 1.5]]


def test_nothing_learned_is_the_base_itself(backend):
    _, base = pair(5, 70)
    for settings in SETTINGS:
        found = one_bit_code_(blank(5, 70), base.float(), base, backend=backend, **settings)
        assert torch.equal(found, base.float())


@pytest.mark.parametrize("per_row", [True, False])
def test_it_writes_into_parts_of_a_matrix_and_across_it(backend, per_row):
    latent, base = pair(24, 96)
    settings = {"per_row": per_row, "along_weight": 8.0, "dither": True, "backend": backend}
    truth = one_bit_code_(blank(24, 96), latent, base, **settings)
    whole = torch.zeros(24, 200)
    one_bit_code_(whole[:, 50:146], latent, base, **settings)
    assert torch.equal(whole[:, 50:146], truth)
    assert not whole[:, :50].any()
    assert not whole[:, 146:].any()
    across = blank(96, 24)
    one_bit_code_(across.T, latent.T.contiguous().T, base.T.contiguous().T, **settings)
    assert torch.equal(across.T, truth)
    assert one_bit_code_(torch.empty(0, 9), torch.empty(0, 9), torch.empty(0, 9), **settings).shape == (0, 9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_row_and_in_no_other(backend, bad):
    latent, base = pair(4, 100)
    latent[2, 40] = bad
    found = one_bit_code_(blank(4, 100), latent, base, backend=backend, **LEAST_SQUARES)
    assert (~found.isfinite()).any(dim=1).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"out": torch.empty(2, 9).half()}, "out_NK is torch.float16; allowed: float32"),
        ({"latent": torch.empty(2, 9).bfloat16()}, "latent_NK is torch.bfloat16; allowed: float32"),
        (
            {"base": torch.empty(2, 9).double()},
            "base_NK is torch.float64; allowed: bfloat16, float16, float32",
        ),
        ({"base": torch.empty(3, 9)}, r"base_NK has shape \(3, 9\); needed: .* as out_NK \(2, 9\)"),
        ({"latent": torch.empty(9)}, r"latent_NK has shape \(9,\)"),
        ({"out": torch.empty(2, 0)}, r"out_NK has shape \(2, 0\); needed: \[N, K\] with K >= 1"),
        ({"latent": torch.empty(2, 9, device="meta")}, "latent_NK is on meta; needed: cpu"),
        ({"along_weight": 0.5}, r"along_weight is 0.5; allowed: 1 \(least squares\) or more"),
        ({"along_weight": float("nan")}, "along_weight is nan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused_by_name(change, said):
    parts = {name: torch.empty(2, 9) for name in ("out", "latent", "base")}
    settings = LEAST_SQUARES | {name: value for name, value in change.items() if name not in parts}
    parts |= {name: value for name, value in change.items() if name in parts}
    with pytest.raises(ValueError, match=said):
        one_bit_code_(parts["out"], parts["latent"], parts["base"], **settings)
