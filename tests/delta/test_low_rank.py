"""A low-rank part beside the signs: near the best of its rank, described by the artifact, and never lost or skipped."""

import json

import pytest
import torch

from tests.delta.models import damaged_copy, export, make_pair
from zen_train.delta import DeltaArtifact, FolderSource, iter_applied, verify_artifact
from zen_train.delta.codec import decode
from zen_train.delta.low_rank import leading_factors
from zen_train.errors import DeltaError


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (3, 20, 50), (7, 7)], ids=str)
@pytest.mark.parametrize("rank", [1, 4])
def test_factors_are_near_the_best_of_their_rank(shape, rank):
    """Eckart and Young: no matrix of this rank is nearer. Noise decays slowly, the hard case for an iteration."""
    generator = torch.Generator().manual_seed(0)
    delta = torch.randn(shape, generator=generator)
    delta += (
        3 * torch.randn(*shape[:-1], 2, generator=generator) @ torch.randn(2, shape[-1], generator=generator)
    )
    u, v = leading_factors(delta, rank)
    assert (u.dtype, v.dtype) == (torch.bfloat16, torch.bfloat16)
    assert u.shape == (*shape[:-1], rank)
    assert v.shape == (*shape[:-2], rank, shape[-1])
    best = torch.linalg.svdvals(delta.double())[..., rank:].square().sum(-1)
    left = (delta - u.float() @ v.float()).double().square().sum((-2, -1))
    # Two factors rounded to 8 bits add at most 2 * 2^-8 of what they hold.
    rounding = delta.double().square().sum((-2, -1)) * (2 * 2**-8) ** 2
    assert bool((left <= 1.03 * best + rounding).all())


def test_the_same_delta_gives_the_same_factors():
    delta = torch.randn(30, 50, generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    first, second = leading_factors(delta, 3), leading_factors(delta, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2", "mixtral"])
def test_an_artifact_with_a_low_rank_part_is_base_plus_product_plus_signs(tmp_path, architecture):
    pair = make_pair(tmp_path, architecture)
    base, tuned = FolderSource(pair.base), FolderSource(pair.tuned)
    plain = export(pair, tmp_path / "plain", embedding="sign")
    report = export(pair, tmp_path / "delta", embedding="sign", low_rank=3)
    assert report.relative_error < plain.relative_error
    verify_artifact(tmp_path / "delta", base=base, tuned=tuned)
    artifact = DeltaArtifact.open(tmp_path / "delta")
    assert artifact.config.format_version == "1.1"
    ranks = 0
    for name, weight in iter_applied(artifact, base):
        entry = artifact.entry(name)
        if not entry.rank:
            continue
        ranks += 1
        origin = base.get(artifact.base_name(name)).float()
        product = artifact.part(name, "u").float() @ artifact.part(name, "v").float()
        signs = decode(artifact.planes(name), tuple(origin.shape), transposed=entry.transposed)
        by_hand = origin + (product.mT if entry.transposed else product) + signs
        torch.testing.assert_close(weight, by_hand, rtol=0, atol=1e-6)
        torch.testing.assert_close(artifact.delta(name), by_hand - origin, rtol=0, atol=1e-6)
        error = (tuned.get(name) - weight).norm() / (tuned.get(name) - origin).norm()
        assert entry.relative_error == pytest.approx(float(error), rel=1e-3)
    assert ranks > 5


def test_without_a_low_rank_part_the_format_stays_1_0(tmp_path):
    export(make_pair(tmp_path), tmp_path / "delta")
    document = json.loads((tmp_path / "delta" / "delta_config.json").read_text())
    assert document["format_version"] == "1.0"
    assert not any("rank" in entry for entry in document["tensors"].values())


def test_a_rank_that_does_not_pay_is_not_used(tmp_path):
    """Two factors of rank 30 are larger than a matrix of 44 by 32: signs alone."""
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta", low_rank=30)
    artifact = DeltaArtifact.open(tmp_path / "delta")
    assert all(entry.rank == 0 for entry in artifact.config.tensors.values())
    verify_artifact(tmp_path / "delta", base=FolderSource(pair.base), tuned=FolderSource(pair.tuned))


def test_a_damaged_factor_is_found(tmp_path):
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta", low_rank=2)
    artifact = DeltaArtifact.open(tmp_path / "delta")
    name = next(name for name, entry in artifact.config.tensors.items() if entry.rank)
    damaged_copy(tmp_path / "delta", tmp_path / "damaged", name, "u")
    damaged = DeltaArtifact.open(tmp_path / "damaged")
    with pytest.raises(DeltaError, match=r"\.u has digest"):
        dict(iter_applied(damaged, FolderSource(pair.base)))
    with pytest.raises(DeltaError, match=r"\.u has digest"):
        verify_artifact(tmp_path / "damaged")


@pytest.mark.parametrize("rank", [0, 1, -1])
def test_another_rank_than_the_parts_is_refused(tmp_path, rank):
    export(make_pair(tmp_path), tmp_path / "delta", low_rank=2)
    path = tmp_path / "delta" / "delta_config.json"
    document = json.loads(path.read_text())
    name = next(name for name, entry in document["tensors"].items() if entry.get("rank"))
    document["tensors"][name]["rank"] = rank
    path.write_text(json.dumps(document))
    with pytest.raises(DeltaError):
        DeltaArtifact.open(tmp_path / "delta")


def test_a_negative_rank_is_refused(tmp_path):
    with pytest.raises(DeltaError, match="low_rank=-1"):
        export(make_pair(tmp_path), tmp_path / "delta", low_rank=-1)
