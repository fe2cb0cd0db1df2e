"""Interrupted and resumed equals uninterrupted: weights, merges, scores, data order."""

import pytest
import torch

from tests.small_run import small_run
from zen_train.config import MergeSection, TuningSection


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("stop_at", [2, 4, 6], ids=lambda n: f"stopped-at-{n}")
@pytest.mark.parametrize("accept", ["always", "if_not_worse"])
def test_a_resumed_run_equals_an_uninterrupted_one(tiny_base, tmp_path, stop_at, accept):
    """Lightning #19764, #11029; nequip PR#590, anemoi-core PR#1373: also around a merge, bit for bit."""
    merge = MergeSection(method="svd_average", every_n_steps=4, rank=8, accept=accept)
    options = {"merge": merge, "accumulate": 2, "records": 12}
    whole = small_run(tiny_base, tmp_path / "whole", max_steps=10, **options).fit()

    first = small_run(tiny_base, tmp_path / "parts", max_steps=10, **options)
    first.trainer.fit_loop.epoch_loop.max_steps = stop_at
    first.fit()
    second = small_run(tiny_base, tmp_path / "parts", max_steps=10, **options).fit(resume=first.checkpoint)

    assert_same(second.weights(), whole.weights())
    assert second.merge.events
    assert [
        (event.step, event.partner_step, event.accepted, event.loss_after) for event in second.merge.events
    ] == [(event.step, event.partner_step, event.accepted, event.loss_after) for event in whole.merge.events]
    assert second.validation.points == whole.validation.points
    assert [p["train/loss"] for p in second.curves.points] == [p["train/loss"] for p in whole.curves.points]


def test_a_checkpoint_loads_without_pickled_objects(tiny_base, tmp_path):
    """Lightning #21757, torchtune #1142: tensors and plain values only."""
    run = small_run(tiny_base, tmp_path, merge=MergeSection(method="mean", every_n_steps=2)).fit()
    checkpoint = torch.load(run.checkpoint, weights_only=True)
    assert checkpoint["global_step"] == 6


def test_a_checkpoint_holds_neither_base_nor_best_nor_frozen_weights(tiny_base, tmp_path):
    """Lightning #21823."""
    frozen = small_run(
        tiny_base, tmp_path, tuning=TuningSection(freeze_layers=1, freeze_embeddings=True)
    ).fit()
    state = torch.load(frozen.checkpoint, weights_only=True)["state_dict"]
    assert state
    assert not any("embed_tokens" in name or "layers.0." in name for name in state)
    trained = sum(p.numel() for p in frozen.module.parameters() if p.requires_grad)
    # Weights and two Adam moments in float32, and a little for the rest.
    assert frozen.checkpoint.stat().st_size < 3 * 4 * trained + 200_000


def test_only_the_best_weights_named_by_the_checkpoint_stay_on_disk(tiny_base, tmp_path):
    run = small_run(tiny_base, tmp_path, max_steps=10).fit()
    files = [path.name for path in (tmp_path / "checkpoints").glob("best-*")]
    assert files == [f"best-{run.validation.best.step:08d}.safetensors"]
