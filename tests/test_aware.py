"""One-bit-aware fine-tuning: what is trained is what is exported (no public report; issue 5 of this project)."""

import lightning as L
import pytest
import torch

from tests.callbacks.test_resume import assert_same
from tests.small_run import small_run
from tests.test_module import compiled, exporting
from zen_train.aware import LATENT, OneBitAdamW, encode_
from zen_train.config import ExportSection, MergeSection
from zen_train.delta import DeltaArtifact, iter_applied
from zen_train.delta.codec import add_delta, encode
from zen_train.errors import ConfigError
from zen_train.kernels.common.dither import dither_bf16
from zen_train.module import trained_values

AWARE = ExportSection(aware=True, aware_share=0.5)


@pytest.mark.parametrize("along_weight", [1.0, 8.0])
@pytest.mark.parametrize("scale", ["row", "matrix"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (3, 4, 9), (2048, 600)], ids=str)
def test_the_code_is_the_artifacts_own(shape, scale, along_weight):
    torch.manual_seed(0)
    base = torch.randn(shape).bfloat16()
    latent = base.float() + 1e-3 * torch.randn(shape)
    latent.view(-1)[0] = base.view(-1)[0]  # a difference of exactly zero
    coded = torch.empty(shape)
    encode_(coded, latent, base, scale=scale, along_weight=along_weight, dither=False)
    expected = add_delta(base, encode(base, latent, scale=scale, along_weight=along_weight).planes)
    # alpha is a float32 mean here and a float64 one there.
    torch.testing.assert_close(coded, expected, rtol=0, atol=1e-8 + 2**-23 * float(expected.abs().max()))
    encode_(coded, latent, base, scale=scale, along_weight=along_weight, dither=True)
    assert torch.equal(coded, coded.bfloat16().float())
    assert (coded - expected).abs().max() <= 2**-7 * expected.abs().max()


def one_bit(weight, base, **settings):
    defaults = {
        "start": 1,
        "scale": "row",
        "along_weight": 1.0,
        "latent_rate": 3.0,
        "dither": False,
        "lr": 0.01,
        "weight_decay": 0.0,
    }
    return OneBitAdamW([{"params": [weight]}], base={weight: base}, **defaults | settings)


def test_the_gradient_at_the_code_moves_the_latent():
    """Against AdamW on a plain copy of the latent, fed the same gradients, at the latents' own learning rate."""
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    weight = torch.nn.Parameter(base.clone())
    ours = one_bit(weight, base)
    latent = torch.nn.Parameter(base.clone())
    plain = torch.optim.AdamW([latent], lr=0.01, weight_decay=0.0)
    for step in range(5):
        gradient = torch.randn(4, 6)
        weight.grad, latent.grad = gradient.clone(), gradient.clone()
        ours.step()
        plain.param_groups[0]["lr"] = 0.01 if step == 0 else 0.03
        plain.step()
        torch.testing.assert_close(ours.latent(weight), latent.data, rtol=0, atol=0)
        change = latent.data - base
        code = base + change.abs().mean(1, keepdim=True) * change.sign()
        torch.testing.assert_close(weight.data, code, rtol=0, atol=1e-6)
    assert ours.param_groups[0]["lr"] == 0.01


def test_before_the_switch_it_is_adamw(tiny_base, tmp_path):
    late = ExportSection(aware=True, aware_share=0.01)  # begins after the last step but for its code
    plain = small_run(tiny_base, tmp_path / "a", max_steps=3).fit()
    aware = small_run(tiny_base, tmp_path / "b", max_steps=3, export=late).fit()
    values = dict(trained_values(aware.module))
    for name, weight in plain.weights().items():
        assert torch.equal(values[name], weight), name


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_the_exported_delta_is_the_trained_model(tiny_base, tmp_path, precision):
    export = exporting(tiny_base, tmp_path, code="signs")
    run = small_run(tiny_base, tmp_path, export=AWARE, extra_callbacks=(export,), precision=precision).fit()
    applied = dict(iter_applied(DeltaArtifact.open(tmp_path / "delta"), tiny_base.source()))
    for name, weight in run.weights().items():
        torch.testing.assert_close(applied[name], weight, rtol=1e-5, atol=1e-6, msg=name)
    for row in export.report.rows:
        assert row.kind != "sign" or row.relative_error < 1e-3, row


def test_matrices_stored_transposed_are_coded_by_their_output_rows(gpt2_base, tmp_path):
    export = exporting(gpt2_base, tmp_path, code="signs")
    run = small_run(gpt2_base, tmp_path, export=AWARE, extra_callbacks=(export,)).fit()
    applied = dict(iter_applied(DeltaArtifact.open(tmp_path / "delta"), gpt2_base.source()))
    for name, weight in run.weights().items():
        torch.testing.assert_close(applied[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_a_compiled_model_trains_the_same_code(tiny_base, tmp_path):
    plain = small_run(tiny_base, tmp_path / "plain", max_steps=6, export=AWARE).fit()
    run = small_run(tiny_base, tmp_path / "compiled", max_steps=6, export=AWARE)
    run.module.configure_model = compiled(run.module, run.module.configure_model)
    run.fit()
    assert run.module.one_bit.coding
    assert_same(dict(trained_values(run.module)), dict(trained_values(plain.module)))


def test_training_sees_the_code_and_learns_from_it(tiny_base, tmp_path):
    seen = {}

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen[trainer.global_step] = {n: p.detach().clone() for n, p in pl_module.model.named_parameters()}

    run = small_run(tiny_base, tmp_path, max_steps=8, export=AWARE, extra_callbacks=(Look(),)).fit()
    name, source = "model.layers.0.mlp.up_proj.weight", tiny_base.source()
    steps_coded = [
        step
        for step, weights in seen.items()
        if (weights[name] - source.get(name).float()).abs().std(1).max() < 1e-2 * weights[name].abs().max()
        and torch.equal(weights[name], weights[name].bfloat16().float())
    ]
    assert steps_coded[-4:] == [4, 5, 6, 7]
    assert not torch.equal(seen[5][name], seen[7][name])
    losses = [point["train/loss"] for point in run.curves.points]
    assert losses[-1] < losses[3]


@pytest.mark.parametrize("stop_at", [2, 6, 8], ids=lambda n: f"stopped-at-{n}")
def test_a_resumed_aware_run_equals_an_uninterrupted_one(tiny_base, tmp_path, stop_at):
    merge = MergeSection(method="mean", every_n_steps=4, accept="if_not_worse")
    options = {"merge": merge, "accumulate": 2, "records": 12, "max_steps": 10, "export": AWARE}
    whole = small_run(tiny_base, tmp_path / "whole", **options).fit()
    first = small_run(tiny_base, tmp_path / "parts", **options)
    first.trainer.fit_loop.epoch_loop.max_steps = stop_at
    first.fit()
    second = small_run(tiny_base, tmp_path / "parts", **options).fit(resume=first.checkpoint)
    assert_same(second.weights(), whole.weights())
    assert_same(dict(trained_values(second.module)), dict(trained_values(whole.module)))
    assert second.validation.points == whole.validation.points


@pytest.mark.parametrize("saved", [True, False])
def test_a_resume_with_the_other_kind_of_run_is_refused(tiny_base, tmp_path, saved):
    sections = {True: AWARE, False: ExportSection()}
    first = small_run(tiny_base, tmp_path / "first", max_steps=4, export=sections[saved]).fit()
    second = small_run(tiny_base, tmp_path / "second", max_steps=6, export=sections[not saved])
    with pytest.raises(ConfigError, match=f"Resume with export.aware={str(saved).lower()}"):
        second.fit(resume=first.checkpoint)


@pytest.mark.parametrize("accept", ["always", "if_not_worse"])
@pytest.mark.parametrize("state", ["keep", "reset"])
def test_a_merge_averages_latents_and_leaves_a_code(tiny_base, tmp_path, accept, state):
    merge = MergeSection(method="mean", every_n_steps=2, accept=accept, optimizer_state=state)
    run = small_run(tiny_base, tmp_path, max_steps=6, merge=merge, export=AWARE).fit()
    assert len(run.merge.events) == 2
    values, source = dict(trained_values(run.module)), tiny_base.source()
    for name, weight in run.weights().items():
        if weight.ndim < 2:
            continue
        code, base = torch.empty(weight.shape), source.get(name)
        encode_(code, values[name], base, scale="row", along_weight=AWARE.along_weight, dither=False)
        assert torch.equal(weight, dither_bf16(code).float()), name
    assert all(LATENT in run.module.one_bit.state[parameter] for parameter in run.module.one_bit.base)
