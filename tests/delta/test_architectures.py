"""Every model family: export, apply, load with transformers, and compare with base plus delta built by
hand.
"""

import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.delta.models import ARCHITECTURES, expected_state, export, load, logits, make_pair, one_bit
from zen_train.delta import (
    BaseInfo,
    DeltaArtifact,
    FolderSource,
    StateDictSource,
    apply_delta,
    fingerprint,
    iter_applied,
    verify_artifact,
    write_artifact,
)
from zen_train.delta.apply import stored_as

EXACT_RMS = 1e-5  # logits of equal float32 weights, summed in another order


def rms_ratio(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_applied_model_is_base_plus_delta(tmp_path, architecture):
    pair = make_pair(tmp_path, architecture)
    report = export(pair, tmp_path / "delta")
    assert report.coverage == 1.0
    verify_artifact(tmp_path / "delta", base=FolderSource(pair.base), tuned=FolderSource(pair.tuned))
    artifact = DeltaArtifact.open(tmp_path / "delta")
    applied = apply_delta(artifact, pair.base, tmp_path / "out", dtype="float32")
    assert applied.rounding_loss == 0.0

    expected, found = expected_state(pair), FolderSource(tmp_path / "out")
    assert sorted(found.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found.get(name), tensor), name

    by_hand = tmp_path / "by-hand"
    by_hand.mkdir()
    save_file(expected, by_hand / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(pair.tuned / "config.json", by_hand)
    wanted = logits(load(by_hand))
    assert rms_ratio(logits(load(tmp_path / "out")), wanted) < EXACT_RMS
    assert (
        rms_ratio(logits(load(pair.tuned)), wanted) > 100 * EXACT_RMS
    )  # one bit is not the fine-tune itself


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2", "qwen2"])
def test_state_dict_of_a_training_model_gives_the_same_artifact_as_its_folder(tmp_path, architecture):
    """What the export callback does: tuned weights in memory, compiled, base on disk."""
    pair = make_pair(tmp_path, architecture)
    from_folder = export(pair, tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(pair.tuned, dtype=torch.float32)
    compiled = torch.compile(model)
    base = FolderSource(pair.base)
    from_memory = write_artifact(
        tmp_path / "two",
        base=base,
        tuned=StateDictSource(compiled.state_dict()),
        base_info=BaseInfo.from_folder(pair.base),
        variant="test",
        step=7,
    )
    assert from_memory.content_hash == from_folder.content_hash
    assert not any("_orig_mod" in row.name for row in from_memory.rows)


def test_weights_can_be_loaded_into_a_model_in_memory(tmp_path):
    """What the evaluation does: W0 + delta copied into a live model, tied head included."""
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    model = load(pair.base)
    base = FolderSource(pair.base)
    missing = model.load_state_dict(dict(iter_applied(artifact, base)), strict=True)
    assert not missing.missing_keys
    apply_delta(artifact, pair.base, tmp_path / "out", dtype="float32")
    assert rms_ratio(logits(model), logits(load(tmp_path / "out"))) < EXACT_RMS


def test_conv1d_is_recorded_as_transposed(tmp_path):
    pair = make_pair(tmp_path, "gpt2")
    export(pair, tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    entry = artifact.entry("transformer.h.0.mlp.c_proj.weight")  # stored [44, 32]: 44 in, 32 out
    assert entry.transposed
    assert entry.expected_parts() == {"sign": ("U8", (32, 6)), "alpha": ("F32", (32,))}
    assert not artifact.entry("transformer.wpe.weight").transposed


def test_caller_can_name_transposed_matrices(tmp_path):
    pair = make_pair(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    export(pair, tmp_path / "delta", transposed=[name])
    artifact = DeltaArtifact.open(tmp_path / "delta")
    assert artifact.entry(name).transposed
    base, tuned = FolderSource(pair.base).get(name), FolderSource(pair.tuned).get(name)
    found = base.float() + artifact.delta(name)
    assert torch.equal(found, one_bit(base, tuned, transposed=True))


def test_stacked_experts_of_a_live_model_are_packed(tmp_path):
    """Transformers 5 holds experts as [E, out, in] in memory: a 3-D parameter is coded expert by expert."""
    pair = make_pair(tmp_path, "qwen3-moe")
    base_model, tuned_model = load(pair.base), load(pair.tuned)
    base, tuned = StateDictSource(base_model.state_dict()), StateDictSource(tuned_model.state_dict())
    stacks = [
        name for name in base.names() if base.spec(name).shape[0] == 4 and len(base.spec(name).shape) == 3
    ]
    assert stacks, "this version of transformers keeps no expert stacks"
    info = BaseInfo(name="moe", fingerprint=fingerprint(base), vocab_size=50, dtype="F32", tied=False)
    write_artifact(tmp_path / "delta", base=base, tuned=tuned, base_info=info, variant="v", step=1)
    artifact = DeltaArtifact.open(tmp_path / "delta")
    applied = dict(iter_applied(artifact, base))
    for name in stacks:
        assert artifact.entry(name).kind == "sign"
        assert artifact.part(name, "sign").dim() == 3
        assert torch.equal(applied[name], one_bit(base.get(name), tuned.get(name)))
    base_model.load_state_dict(applied, strict=True)
    assert torch.isfinite(logits(base_model)).all()


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_rounding_loss_of_a_narrow_output_is_reported(tmp_path, dtype):
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    report = apply_delta(artifact, pair.base, tmp_path / "out", dtype=dtype)
    exact = dict(iter_applied(artifact, FolderSource(pair.base)))
    out, base = FolderSource(tmp_path / "out"), FolderSource(pair.base)
    lost = sum(float((out.get(n).double() - exact[n].double()).square().sum()) for n in out.names())
    moved = sum(float((exact[n].double() - base.get(n).double()).square().sum()) for n in out.names())
    assert report.rounding_loss == pytest.approx((lost / moved) ** 0.5, rel=1e-5)
    assert report.rounding_loss > 1e-4
    wanted = torch.float16 if dtype == "float16" else torch.bfloat16
    assert {out.spec(n).dtype for n in out.names()} == {wanted}
    assert load(tmp_path / "out").config.dtype is not None


def test_sharded_output_loads(tmp_path):
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    apply_delta(artifact, pair.base, tmp_path / "one", dtype="float32")
    apply_delta(artifact, pair.base, tmp_path / "many", dtype="float32", max_shard_bytes=10_000)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    assert torch.equal(logits(load(tmp_path / "one")), logits(load(tmp_path / "many")))


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_a_bf16_model_keeps_a_delta_below_half_a_step_of_bf16(tmp_path, transposed):
    """Rounded to nearest, all of it would vanish beside weights between 1 and 2."""
    torch.manual_seed(0)
    small = 0.1 * 2**-7
    base_NK = (1 + 0.9 * torch.rand(32, 512)).to(torch.bfloat16).float()
    tuned_NK = base_NK + small
    stored = (base_NK.T, tuned_NK.T) if transposed else (base_NK, tuned_NK)
    kept = stored_as(stored[1].contiguous(), torch.bfloat16, transposed=transposed).float()
    assert kept.dtype == torch.float32
    assert kept.shape == stored[0].shape
    moved_NK = (kept - stored[0]).T if transposed else kept - stored[0]
    torch.testing.assert_close(moved_NK.mean(dim=1), torch.full((32,), small), rtol=0.05, atol=0)
