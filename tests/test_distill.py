"""Scale distillation: only scales move, towards the fine-tune's logits (BitDelta's released code moved more)."""

import lightning as L
import pytest
import torch

from tests.small_run import small_run
from tests.test_module import exporting
from zen_train.callbacks.distill import DistillCallback
from zen_train.config import ExportSection
from zen_train.delta import DeltaArtifact
from zen_train.distill import CodedMatrix, distill, real_tokens
from zen_train.errors import ConfigError

DISTILL = ExportSection(distill_steps=6)


def test_padding_is_not_real_text_and_everything_else_is():
    # A document of 3, one of 2, padding of 2; then a row that one document fills.
    position_BT = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    found = real_tokens({"position_ids": position_BT})
    assert found.tolist() == [[True] * 5 + [False] * 2, [True] * 7]


@pytest.mark.parametrize("scale", ["row", "matrix"])
def test_it_finds_the_scales_of_a_linear_layer(scale):
    """With one layer and known inputs the best scales solve a least-squares problem; the fit must come near."""
    torch.manual_seed(0)
    base, change = torch.randn(6, 16), 0.1 * torch.randn(6, 16) * torch.rand(6, 1)
    weight = torch.nn.Parameter(base + change)
    tuned = weight.detach().clone()
    inputs = [{"x": torch.randn(64, 16) * torch.linspace(0.1, 3, 16)} for _ in range(4)]
    matrix = CodedMatrix.of(weight, base, scale=scale, along_weight=1.0, dither=False)
    losses = distill(
        [matrix],
        student=lambda batch: batch["x"] @ weight.T,
        teacher=lambda batch: batch["x"] @ tuned.T,
        batches=inputs * 100,
        learning_rate=0.05,
    )
    x = torch.cat([batch["x"] for batch in inputs])
    wanted, term = x @ change.T, x @ change.sign().T
    if scale == "row":
        best = (wanted * term).sum(0) / term.square().sum(0)
    else:
        best = ((wanted * term).sum() / term.square().sum()).expand(6)
    reached = ((x @ (weight.detach() - base).T) - wanted).square().mean()
    least = (best * term - wanted).square().mean()
    start = (matrix.starts[0].expand(6, 1).T * term - wanted).square().mean()
    assert len(losses) == 400
    assert reached - least <= 0.2 * (start - least)
    assert torch.equal((weight.detach() - base).sign(), change.sign())


def test_what_is_exported_dense_is_not_coded(tiny_base, tmp_path):
    dense = ExportSection(distill_steps=2, embedding="dense")
    name, seen = "model.embed_tokens.weight", {}

    class Look(L.Callback):
        def on_train_end(self, trainer, pl_module):
            seen["tuned"] = dict(pl_module.model.named_parameters())[name].detach().clone()

    distilling = DistillCallback(dense, evaluator=None)
    run = small_run(tiny_base, tmp_path, export=dense, extra_callbacks=(Look(), distilling)).fit()
    assert torch.equal(run.weights()[name], seen["tuned"])
    assert len(distilling.losses) == 2


def test_matrices_stored_another_way_are_refused_before_the_first_step(gpt2_base, tmp_path):
    run = small_run(gpt2_base, tmp_path, extra_callbacks=(DistillCallback(DISTILL, evaluator=None),))
    with pytest.raises(ConfigError, match=r"c_attn\.weight.*export\.distill_steps=0"):
        run.fit()
    assert run.trainer.global_step == 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_run_exports_distilled_scales_and_moves_nothing_else(tiny_base, tmp_path, precision):
    plain, fitted = (exporting(tiny_base, tmp_path / name, code="signs") for name in ("plain", "fitted"))
    distilling = DistillCallback(DISTILL, evaluator=None)
    small_run(tiny_base, tmp_path / "a", extra_callbacks=(plain,), precision=precision).fit()
    small_run(tiny_base, tmp_path / "b", extra_callbacks=(distilling, fitted), precision=precision).fit()
    assert len(distilling.losses) == 6
    assert distilling.losses[-1] < distilling.losses[0]
    one, other = (DeltaArtifact.open(tmp_path / name / "delta") for name in ("plain", "fitted"))
    changed = 0
    for name, entry in one.config.tensors.items():
        assert other.config.tensors[name].kind == entry.kind, name
        if entry.kind == "sign":
            (before,), (after,) = one.planes(name), other.planes(name)
            moved = before.alpha > 0
            assert torch.equal(before.sign[moved], after.sign[moved]), name
            changed += int((before.alpha - after.alpha).abs().max() > 1e-3 * before.alpha.max())
        elif entry.kind == "dense":
            assert torch.equal(one.whole(name, "dense"), other.whole(name, "dense")), name
    assert changed > 5
