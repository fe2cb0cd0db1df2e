"""`python -m zen_train.delta distill`: the same signs, scales nearer to the fine-tune's logits, and what it refuses."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.delta.models import perturb
from zen_train.delta import (
    BaseInfo,
    DeltaArtifact,
    FolderSource,
    iter_applied,
    verify_artifact,
    write_artifact,
)
from zen_train.delta.__main__ import main
from zen_train.delta.rescale import rescale_artifact
from zen_train.errors import DeltaError


def exported(base, folder, **options):
    """The delta of FOLDER/tuned, in FOLDER/delta."""
    write_artifact(
        folder / "delta",
        base=base.source(),
        tuned=FolderSource(folder / "tuned"),
        base_info=BaseInfo.from_folder(base.folder, known=base.fingerprint),
        variant="sums",
        step=3,
        **options,
    )
    return folder / "delta"


@pytest.fixture(scope="module")
def made(tiny_base, tmp_path_factory):
    """The tiny base, a fine-tune whose rows moved by very different amounts, its delta, and text."""
    folder = tmp_path_factory.mktemp("distill")
    model = AutoModelForCausalLM.from_pretrained(tiny_base.folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * noise * noise.abs())  # heavy tails: mean |D| is not the best scale
    model.save_pretrained(folder / "tuned")
    exported(
        tiny_base,
        folder,
        embedding="sign",
        provenance={"data": "sums"},
        sidecars=[tiny_base.folder / "tokenizer.json"],
    )
    rows = [{"text": f"The sum of {n} and {n % 7} is {n + n % 7}. " * 3} for n in range(60)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def command(made, tiny_base, out, *more):
    words = ["distill", str(made / "delta"), str(out), "--base", str(tiny_base.folder)]
    return main([*words, "--tuned", str(made / "tuned"), "--text", str(made / "text.jsonl"), *more])


def logits(folder, weights, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights:
            if name in parameters:
                parameters[name].copy_(tensor)
        return model(input_ids=tokens).logits


def test_scales_come_nearer_to_the_fine_tune_and_nothing_else_moves(made, tiny_base, tmp_path, capsys):
    assert command(made, tiny_base, tmp_path / "out", "--steps", "30", "--learning-rate", "0.05") == 0
    assert "matrices fitted in" in capsys.readouterr().out
    before, after = DeltaArtifact.open(made / "delta"), DeltaArtifact.open(tmp_path / "out")
    base, tuned = tiny_base.source(), FolderSource(made / "tuned")
    verify_artifact(tmp_path / "out", base=base, tuned=tuned)
    assert before.content_hash != after.content_hash
    moved = 0
    for name, entry in before.config.tensors.items():
        for suffix in entry.parts:
            same = torch.equal(before.part(name, suffix), after.part(name, suffix))
            moved += not same
            assert same or suffix == "alpha", f"{name}.{suffix}"
    assert moved > 5
    unseen = "The sum of 71 and 4 is 75. The sum of 93 and 5 is 98."
    tokens = tiny_base.tokenizer()(unseen, return_tensors="pt").input_ids
    wanted = logits(tiny_base.folder, ((name, tuned.get(name)) for name in tuned.names()), tokens)
    far, near = (
        (logits(tiny_base.folder, iter_applied(artifact, base), tokens) - wanted).square().mean()
        for artifact in (before, after)
    )
    assert near < 0.95 * far
    assert after.config.provenance["data"] == "sums"
    assert after.config.provenance["distilled"] == {"steps": 30, "learning_rate": 0.05}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        made / "delta" / "tokenizer.json"
    ).read_bytes()


def test_it_can_be_repeated_and_works_with_two_planes(made, tiny_base, tmp_path):
    (tmp_path / "tuned").symlink_to(made / "tuned")
    source = exported(tiny_base, tmp_path, planes=2, scale="matrix")
    for out in ("once", "twice"):
        words = ["distill", str(source), str(tmp_path / out), "--base", str(tiny_base.folder), "--steps", "2"]
        assert main([*words, "--tuned", str(made / "tuned"), "--text", str(made / "text.jsonl")]) == 0
        source = tmp_path / out
        verify_artifact(source, base=tiny_base.source(), tuned=FolderSource(made / "tuned"))


def test_another_fine_tune_is_refused(made, tiny_base, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(made / "tuned", dtype=torch.float32)
    perturb(model, 9)
    model.save_pretrained(tmp_path / "other")
    words = ["distill", str(made / "delta"), str(tmp_path / "out"), "--base", str(tiny_base.folder)]
    assert main([*words, "--tuned", str(tmp_path / "other"), "--text", str(made / "text.jsonl")]) == 2
    assert "is not what" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_base_no_text_and_a_folder_that_exists_are_refused(made, tiny_base, tmp_path, capsys):
    words = ["distill", str(made / "delta"), str(tmp_path / "out"), "--tuned", str(made / "tuned")]
    text = ["--text", str(made / "text.jsonl")]
    assert main([*words, *text, "--base", str(made / "tuned")]) == 2
    assert "fingerprint" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").touch()
    assert main([*words, "--base", str(tiny_base.folder), "--text", str(tmp_path / "empty.jsonl")]) == 2
    assert "empty.jsonl" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert command(made, tiny_base, tmp_path / "out", "--steps", "1") == 2
    assert "out" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").exists()


def test_scales_that_are_negative_or_not_finite_are_refused_and_nothing_is_written(made, tiny_base, tmp_path):
    artifact = DeltaArtifact.open(made / "delta")
    name = next(name for name, entry in artifact.config.tensors.items() if entry.planes)
    alpha = artifact.part(name, "alpha")
    for bad in (-alpha, alpha * float("nan")):
        with pytest.raises(DeltaError, match="NaN, infinity or a negative"):
            rescale_artifact(
                artifact,
                tmp_path / "out",
                {name: [bad]},
                base=tiny_base.source(),
                tuned=FolderSource(made / "tuned"),
                provenance={},
            )
    assert not (tmp_path / "out").exists()


def test_a_damaged_artifact_is_refused(made, tiny_base, tmp_path, capsys):
    shutil.copytree(made / "delta", tmp_path / "delta")
    path = tmp_path / "delta" / "delta.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 1
    path.write_bytes(raw)
    words = ["distill", str(tmp_path / "delta"), str(tmp_path / "out"), "--base", str(tiny_base.folder)]
    assert (
        main([*words, "--tuned", str(made / "tuned"), "--text", str(made / "text.jsonl"), "--steps", "1"])
        == 2
    )
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_coded_directions_are_refused_with_the_remedy(made, tiny_base, tmp_path, capsys):
    (tmp_path / "tuned").symlink_to(made / "tuned")
    source = exported(tiny_base, tmp_path, code="directions")
    words = ["distill", str(source), str(tmp_path / "out"), "--base", str(tiny_base.folder)]
    assert main([*words, "--tuned", str(made / "tuned"), "--text", str(made / "text.jsonl")]) == 2
    message = capsys.readouterr().err
    assert "coded directions" in message
    assert "export.code=signs" in message
    assert not (tmp_path / "out").exists()


def test_matrices_stored_another_way_are_refused(gpt2_base, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(gpt2_base.folder, dtype=torch.float32)
    perturb(model, 3)
    model.save_pretrained(tmp_path / "tuned")
    exported(gpt2_base, tmp_path)
    (tmp_path / "text.txt").write_text("some text " * 50)
    words = ["distill", str(tmp_path / "delta"), str(tmp_path / "out"), "--base", str(gpt2_base.folder)]
    assert main([*words, "--tuned", str(tmp_path / "tuned"), "--text", str(tmp_path / "text.txt")]) == 2
    assert "stored transposed" in capsys.readouterr().err
