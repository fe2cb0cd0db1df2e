"""The training step: what it optimises, what it leaves alone, and when it stops."""

import json
import math

import lightning as L
import pytest
import torch
from safetensors import safe_open

from tests.small_run import small_run
from zen_train.callbacks.export import ExportCallback, full_weights
from zen_train.config import ExportSection, LoraSection, OptimSection, TuningSection
from zen_train.data.packing import model_inputs
from zen_train.delta import BaseInfo
from zen_train.errors import ConfigError, TrainingError
from zen_train.loss import IGNORE, shifted
from zen_train.module import learning_rate_share, load_weights_, trained_parameters


def assert_close(one, other, tolerance):
    for name, weight in one.items():
        assert (weight - other[name]).norm() <= tolerance * weight.norm(), name


def exporting(base, folder, code="auto"):
    return ExportCallback(
        ExportSection(code=code),
        folder=folder / "delta",
        variant="sums",
        base_info=BaseInfo.from_folder(base.folder, known=base.fingerprint),
        checkpoint_every_n_steps=100,
        provenance=dict,
    )


def test_four_by_one_gives_the_same_update_as_one_by_four(tiny_base, tmp_path):
    """torchtune PR#1875: every token of an optimizer step weighs the same, however unequal the micro-batches."""
    options = {
        "max_steps": 3,
        "precision": "32-true",
        "optim": OptimSection(learning_rate=1e-3, warmup_steps=0),
    }
    whole = small_run(tiny_base, tmp_path / "a", batch_size=4, accumulate=1, **options).fit()
    parts = small_run(tiny_base, tmp_path / "b", batch_size=1, accumulate=4, **options).fit()
    counts = {parts.data.train_dataloader()._blocks.label_tokens(index) for index in range(4)}
    assert len(counts) > 1, "the case needs unequal token counts"
    # With eps=1, Adam's update is linear in the gradient; its usual division would blow the rounding up.
    moved = {name: weight - tiny_base.source().get(name).float() for name, weight in whole.weights().items()}
    other = {name: weight - tiny_base.source().get(name).float() for name, weight in parts.weights().items()}
    assert_close(moved, other, 1e-3)
    losses = [[point["train/loss"] for point in run.curves.points] for run in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0])


def test_the_loss_is_the_one_transformers_computes(tiny_base, tmp_path):
    """Labels shifted by one, unlabelled tokens left out, packed documents apart: as the model's own loss has it."""
    run = small_run(tiny_base, tmp_path, precision="32-true", max_steps=1).fit()
    batch = next(iter(run.data.train_dataloader()))
    with torch.no_grad():
        theirs = run.module.model(**model_inputs(batch), labels=batch["labels"]).loss
        ours = run.module.nll(batch) / (shifted(batch["labels"]) != IGNORE).sum()
    torch.testing.assert_close(ours, theirs)


def test_the_loss_goes_down(tiny_base, tmp_path):
    points = small_run(tiny_base, tmp_path, max_steps=30).fit().curves.points
    assert points[-1]["train/loss"] < 0.7 * points[0]["train/loss"]


def test_the_frozen_part_stays_as_in_the_base_bit_for_bit(tiny_base, tmp_path):
    tuning = TuningSection(freeze_layers=1, freeze_embeddings=True)
    weights = small_run(tiny_base, tmp_path, tuning=tuning).fit().weights()
    source = tiny_base.source()
    for name, weight in weights.items():
        frozen = "embed_tokens" in name or "layers.0." in name
        assert torch.equal(weight, source.get(name).float()) == frozen, name


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (TuningSection(freeze_layers=3), "the model has 2 blocks"),
    ],
)
def test_more_frozen_blocks_than_there_are_is_refused(tiny_base, tmp_path, tuning, message):
    with pytest.raises(ConfigError, match=message):
        small_run(tiny_base, tmp_path, tuning=tuning).fit()


def test_gradient_checkpointing_changes_memory_and_not_the_weights(tiny_base, tmp_path):
    plain = small_run(tiny_base, tmp_path / "a", max_steps=2).fit().weights()
    saving = small_run(tiny_base, tmp_path / "b", max_steps=2, gradient_checkpointing=True).fit().weights()
    assert_close(plain, saving, 1e-6)


def test_a_lora_run_exports_the_merged_weights_of_its_matrices(tiny_base, tmp_path):
    """peft #2502, #1388, unsloth #3091: the exported weights give the adapter model's logits."""
    tuning = TuningSection(method="lora", lora=LoraSection(rank=4, alpha=8))
    export = exporting(tiny_base, tmp_path)
    run = small_run(tiny_base, tmp_path, tuning=tuning, extra_callbacks=(export,)).fit()
    ids = torch.arange(24)[None]
    with torch.no_grad():
        adapter = run.module.model.eval()(input_ids=ids).logits
        merged = {name: get() for name, get in full_weights(run.module)}
        assert set(merged) == set(tiny_base.source().names())
        plain = small_run(tiny_base, tmp_path / "plain")
        plain.module.trainer = plain.trainer
        plain.module.configure_model()
        plain.module.model.load_state_dict(merged, strict=False)
        logits = plain.module.model.eval()(input_ids=ids).logits
    assert (logits - adapter).norm() <= 1e-5 * adapter.norm()
    kinds = {row.name: row.kind for row in export.report.rows}
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "directions"
    assert kinds["model.embed_tokens.weight"] == "same"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_exported_names_carry_no_trace_of_compilation(tiny_base, tmp_path, method):
    """Lightning #20233, #17415: `_orig_mod.` in a name is a name that nobody can load."""
    export, tuning = exporting(tiny_base, tmp_path), TuningSection(method=method)
    run = small_run(tiny_base, tmp_path, max_steps=1, tuning=tuning, extra_callbacks=(export,))
    run.module.configure_model = compiled(run.module, run.module.configure_model)
    run.fit()
    config = json.loads((tmp_path / "delta" / "delta_config.json").read_text())
    assert set(config["tensors"]) >= set(tiny_base.source().names())
    kinds = {row.name: row.kind for row in export.report.rows}
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "directions"  # "same": the adapter was lost
    with safe_open(tmp_path / "delta" / "delta.safetensors", framework="pt") as file:
        assert not any("_orig_mod" in name for name in file.keys())  # noqa: SIM118 safe_open is no mapping


def test_weights_reach_every_parameter_of_a_compiled_model(tiny_base, tmp_path):
    """The delta is scored in the model that was trained; what it did not reach would be scored as fine-tuned."""
    run = small_run(tiny_base, tmp_path, max_steps=1)
    run.module.configure_model = compiled(run.module, run.module.configure_model)
    run.fit()
    source = tiny_base.source()
    load_weights_(run.module, ((name, source.get(name)) for name in source.names()))
    for name, weight in trained_parameters(run.module):
        assert torch.equal(weight, source.get(name).float()), name
    one_less = [name for name in source.names() if name != "model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"1 were not given: model.layers.1.mlp.up_proj.weight\."):
        load_weights_(run.module, ((name, source.get(name)) for name in one_less))


def compiled(module, configure):
    """Wrap every block in torch.compile, as users do, without paying for a compiler."""

    def configure_model():
        configure()
        plain = module.model if module.tuning.method == "full" else module.model.get_base_model()
        blocks = plain.model.layers
        for index in range(len(blocks)):
            blocks[index] = torch.compile(blocks[index], backend="eager")

    return configure_model


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_records(tiny_base, tmp_path):
    class Poison(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 3:
                with torch.no_grad():
                    pl_module.model.model.norm.weight.fill_(math.nan)

    run = small_run(tiny_base, tmp_path, extra_callbacks=(Poison(),))
    with pytest.raises(
        TrainingError, match=r"loss became nan at optimizer step 4\. The batch held: .*sum-\d+"
    ):
        run.fit()
    kept = torch.load(run.checkpoint, weights_only=True)
    assert kept["global_step"] == 2
    assert all(torch.isfinite(weight).all() for weight in kept["state_dict"].values())


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_update(tiny_base, tmp_path):
    class Poison(L.Callback):
        def on_after_backward(self, trainer, pl_module):
            if trainer.global_step == 3:
                pl_module.model.model.norm.weight.grad.fill_(math.inf)

    run = small_run(tiny_base, tmp_path, extra_callbacks=(Poison(),))
    with pytest.raises(TrainingError, match="gradient norm became"):
        run.fit()
    assert all(torch.isfinite(weight).all() for weight in run.weights().values())


def test_the_learning_rate_warms_up_and_comes_down_to_its_share():
    config = OptimSection(warmup_steps=10, final_learning_rate_share=0.1)
    shares = [learning_rate_share(step, config, 100) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[10] == 1.0
    assert shares[100] == pytest.approx(0.1)
    assert shares[10:] == sorted(shares[10:], reverse=True)


def test_weight_decay_leaves_norms_and_biases_alone(tiny_base, tmp_path):
    run = small_run(tiny_base, tmp_path, optim=OptimSection(weight_decay=0.1))
    run.module.trainer = run.trainer
    run.module.configure_model()
    groups = run.module.configure_optimizers()["optimizer"].param_groups
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [
        (0.1, {2}),
        (0.0, {1}),
    ]
