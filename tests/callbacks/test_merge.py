"""When merges happen, with which weights, and what is left behind."""

import math

import lightning as L
import pytest
import torch

from tests.small_run import small_run
from zen_train.callbacks.snapshot import Snapshot
from zen_train.config import MergeSection
from zen_train.merge import merge_tensor
from zen_train.module import trained_parameters


def merging(every_n_steps=2, **settings):
    settings = {"method": "mean", "accept": "always", **settings}
    return MergeSection(every_n_steps=every_n_steps, **settings)


class Watch(L.Callback):
    """Remembers the weights after every micro-batch, before the callbacks behind it act."""

    def __init__(self):
        self.weights = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.weights[trainer.global_step] = {
            name: parameter.detach().clone() for name, parameter in trained_parameters(pl_module)
        }


def test_one_merge_per_n_optimizer_steps_under_accumulation(tiny_base, tmp_path):
    """Lightning #17903, #17207: 67 micro-batches at accumulation 3 are 22 optimizer steps; intervals count those."""
    run = small_run(
        tiny_base,
        tmp_path,
        max_steps=22,
        accumulate=3,
        batch_size=1,
        merge=merging(5),
        validate_every_n_steps=5,
    ).fit()
    assert [event.step for event in run.merge.events] == [10, 15, 20]
    assert [point["step"] for point in run.validation.points] == [5, 10, 15, 20]


def test_an_interval_longer_than_an_epoch_merges_across_epochs(tiny_base, tmp_path):
    """Lightning #11979."""
    run = small_run(
        tiny_base, tmp_path, max_steps=12, records=4, merge=merging(4), validate_every_n_steps=4
    ).fit()
    assert run.data.facts().epochs > 5
    assert [event.step for event in run.merge.events] == [8, 12]


def test_the_partner_is_the_step_whose_own_validation_scored_best(tiny_base, tmp_path):
    """Lightning #20185, #14431, #20919: best weights and best score belong to the same step."""
    run = small_run(
        tiny_base, tmp_path, max_steps=8, merge=merging(2, accept="if_not_worse"), save_every_n_steps=100
    ).fit()
    for event in run.merge.events:
        earlier = [point for point in run.validation.points if point["step"] < event.step]
        assert event.partner_step == min(earlier, key=lambda point: point["loss"])["step"]
    best = run.validation.best
    best.snapshot(run.module).restore_(trained_parameters(run.module))
    assert run.validation.score(run.trainer, run.module) == pytest.approx(best.score, abs=1e-9)


@pytest.mark.parametrize("method", ["svd_average", "monosoup", "mean"])
def test_a_merge_is_the_rule_applied_to_base_best_and_current(tiny_base, tmp_path, method):
    before, after = Watch(), Watch()
    run = small_run(
        tiny_base,
        tmp_path,
        max_steps=4,
        merge=merging(2, method=method, rank=8),
        save_every_n_steps=100,
        extra_callbacks=(after,),
    )
    run.trainer.callbacks.insert(0, before)
    run.fit()
    source = tiny_base.source()
    for name in before.weights[4]:
        checkpoints = [after.weights[2][name], before.weights[4][name]]
        expected = merge_tensor(method, source.get(name).float(), checkpoints, rank=8, seed=0)
        assert torch.equal(after.weights[4][name], expected.weight), name
    assert any(not torch.equal(after.weights[4][name], before.weights[4][name]) for name in before.weights[4])


def test_a_merge_that_made_validation_worse_is_rolled_back_bit_for_bit(tiny_base, tmp_path, monkeypatch):
    before, after = Watch(), Watch()
    run = small_run(
        tiny_base,
        tmp_path,
        max_steps=4,
        merge=merging(2, accept="if_not_worse"),
        save_every_n_steps=100,
        extra_callbacks=(after,),
    )
    run.trainer.callbacks.insert(0, before)
    score, scores = run.validation.score, []

    def worse_each_time(trainer, module):
        scores.append(score(trainer, module) + 10.0 * len(scores))
        return scores[-1]

    monkeypatch.setattr(run.validation, "score", worse_each_time)
    run.fit()
    assert [event.accepted for event in run.merge.events] == [False]
    assert all(torch.equal(after.weights[4][name], before.weights[4][name]) for name in before.weights[4])
    assert run.validation.points[-1]["loss"] == run.merge.events[0].loss_before
    assert not (tmp_path / "checkpoints" / "rollback.safetensors").exists()


def test_the_score_after_an_accepted_merge_is_that_of_the_merged_weights(tiny_base, tmp_path):
    run = small_run(tiny_base, tmp_path, max_steps=4, merge=merging(2)).fit()
    (event,) = run.merge.events
    assert run.validation.points[-1] == {"step": 4, "loss": event.loss_after}
    assert event.loss_after == pytest.approx(run.validation.score(run.trainer, run.module), abs=1e-9)


@pytest.mark.parametrize(("choice", "empty"), [("keep", False), ("reset", True)])
def test_what_a_merge_does_with_the_optimizer_state_is_a_choice(tiny_base, tmp_path, choice, empty):
    class Look(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                self.empty = not trainer.optimizers[0].state

    look = Look()
    small_run(
        tiny_base, tmp_path, max_steps=5, merge=merging(2, optimizer_state=choice), extra_callbacks=(look,)
    ).fit()
    assert look.empty == empty


def test_a_merge_leaves_the_global_random_state_untouched(tiny_base, tmp_path):
    """peft PR#2225, pytorch #77206: `svd_lowrank` would move it."""
    run = small_run(tiny_base, tmp_path, max_steps=2, merge=merging(2, method="svd_average", rank=4)).fit()
    partner = Snapshot.find(
        tmp_path / "checkpoints" / "best-00000002.safetensors", trained_parameters(run.module), rank=0
    )
    torch.manual_seed(5)
    state = torch.get_rng_state()
    run.merge.merge(run.trainer, run.module, partner)
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_stay_the_same_objects_on_the_same_storage(tiny_base, tmp_path):
    class Pointers(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.seen = [(id(p), p.data_ptr()) for _, p in trained_parameters(pl_module)]

    pointers = Pointers()
    run = small_run(tiny_base, tmp_path, max_steps=4, merge=merging(2), extra_callbacks=(pointers,)).fit()
    assert [(id(p), p.data_ptr()) for _, p in trained_parameters(run.module)] == pointers.seen


def test_a_weight_that_is_not_finite_is_skipped_with_a_warning_and_the_run_goes_on(tiny_base, tmp_path):
    """kohya sd-scripts #517, GaLore #26."""

    class Poison(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.global_step == 4:
                path = tmp_path / "checkpoints" / "best-00000002.safetensors"
                named = dict(trained_parameters(pl_module))
                kept = named["model.norm.weight"].detach().clone()
                with torch.no_grad():
                    named["model.norm.weight"][0] = math.nan
                    Snapshot.save(path, named.items(), rank=0)
                    named["model.norm.weight"].copy_(kept)

    run = small_run(tiny_base, tmp_path, max_steps=4, merge=merging(2, method="svd_average"))
    run.trainer.callbacks.insert(0, Poison())
    with pytest.warns(UserWarning, match=r"merge skipped model\.norm\.weight"):
        run.fit()
    assert run.merge.events[0].skipped >= 1
    assert all(torch.isfinite(weight).all() for weight in run.weights().values())
