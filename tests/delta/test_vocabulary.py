"""Vocabularies that grew, and heads tied or untied on either side."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.delta.models import export, load, logits, make_pair, one_bit, perturb
from zen_train.delta import (
    DeltaArtifact,
    FolderSource,
    StateDictSource,
    apply_delta,
    iter_applied,
    quick_check,
    verify_artifact,
)
from zen_train.errors import DeltaError

EXACT_RMS = 1e-5


def grow(pair, rows=2):
    model = AutoModelForCausalLM.from_pretrained(pair.tuned, dtype=torch.float32)
    model.resize_token_embeddings(50 + rows, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[50:] = torch.randn(
            rows, 32, generator=torch.Generator().manual_seed(9)
        )
    model.save_pretrained(pair.tuned)


def check(pair, tmp_path):
    """Verify, apply, and compare the applied model with `iter_applied`. Returns artifact and applied
    model.
    """
    verify_artifact(tmp_path / "delta", base=FolderSource(pair.base), tuned=FolderSource(pair.tuned))
    artifact = DeltaArtifact.open(tmp_path / "delta")
    apply_delta(artifact, pair.base, tmp_path / "out", dtype="float32")
    model = load(tmp_path / "out")
    state = model.state_dict()
    applied = dict(iter_applied(artifact, FolderSource(pair.base)))
    assert set(applied) == set(state)
    for name, tensor in applied.items():
        assert torch.equal(state[name], tensor), name
    return artifact, model


@pytest.mark.parametrize("architecture", ["llama-tied", "llama-untied", "gpt2"])
def test_grown_vocabulary_is_packed_and_its_new_rows_are_stored(tmp_path, architecture):
    """mergekit #47, #614: base 32000, fine-tune 32002 (here 50 and 52)."""
    pair = make_pair(tmp_path, architecture)
    grow(pair)
    report = export(pair, tmp_path / "delta")
    assert report.coverage == 1.0
    artifact, model = check(pair, tmp_path)
    embedding = "transformer.wte.weight" if architecture == "gpt2" else "model.embed_tokens.weight"
    entry = artifact.entry(embedding)
    assert (entry.kind, entry.base_rows, entry.shape) == ("rows", 50, (52, 32))
    assert (artifact.config.vocab_size, artifact.config.base.vocab_size) == (52, 50)
    assert model.config.vocab_size == 52

    base, tuned = FolderSource(pair.base), FolderSource(pair.tuned)
    expected = dict(model.state_dict().items())
    for name in base.names():
        w0, w1 = base.get(name), tuned.get(name)
        if w0.shape != w1.shape:
            expected[name] = torch.cat([one_bit(w0, w1[:50]), w1[50:]])
    by_hand = AutoModelForCausalLM.from_pretrained(pair.tuned, dtype=torch.float32).eval()
    by_hand.load_state_dict(expected)
    found, wanted = logits(model, 52), logits(by_hand, 52)
    assert found.shape[-1] == 52
    assert float((found - wanted).norm() / wanted.norm()) < EXACT_RMS
    assert torch.equal(model.get_input_embeddings().weight[50:], tuned.get(embedding)[50:])


def test_grown_vocabulary_over_unchanged_rows_stores_only_the_new_ones(tmp_path):
    pair = make_pair(tmp_path)
    grow(pair)
    base, tuned = FolderSource(pair.base), FolderSource(pair.tuned)
    name = "model.embed_tokens.weight"
    state = {n: tuned.get(n) for n in tuned.names()}
    state[name] = torch.cat([base.get(name).float(), state[name][50:]])
    model = AutoModelForCausalLM.from_pretrained(pair.tuned, dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(pair.tuned)
    export(pair, tmp_path / "delta")
    artifact, _ = check(pair, tmp_path)
    assert artifact.entry(name).planes == 0
    assert list(artifact.entry(name).parts) == ["rows"]


def test_grown_vocabulary_beyond_the_bound_is_stored_whole(tmp_path):
    pair = make_pair(tmp_path)
    grow(pair)
    export(pair, tmp_path / "delta", embedding="dense")
    artifact, _ = check(pair, tmp_path)
    assert artifact.entry("model.embed_tokens.weight").kind == "dense"


def test_tied_head_is_stored_once(tmp_path):
    pair = make_pair(tmp_path)
    report = export(pair, tmp_path / "delta")
    artifact, model = check(pair, tmp_path)
    entry = artifact.config.tensors["lm_head.weight"]
    assert (entry.kind, entry.target) == ("tied", "model.embed_tokens.weight")
    assert {row.name: row.size_bytes for row in report.rows}["lm_head.weight"] == 0
    assert artifact.config.tied
    assert model.config.tie_word_embeddings
    assert "lm_head.weight" not in FolderSource(tmp_path / "out").names()


def untie(pair, *, equal):
    """Make the tuned side untied: same head and embedding, or a head of its own."""
    model = AutoModelForCausalLM.from_pretrained(pair.tuned, dtype=torch.float32)
    head = model.lm_head.weight.detach().clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head if equal else head + 0.01 * torch.randn(head.shape))
    model.save_pretrained(pair.tuned)
    assert set(FolderSource(pair.tuned).names()) >= {"lm_head.weight", "model.embed_tokens.weight"}


def test_tuned_side_untied_with_equal_copies_is_stored_once(tmp_path):
    """mergekit #350, #615: one side untied too; no KeyError, stored once."""
    pair = make_pair(tmp_path)
    untie(pair, equal=True)
    report = export(pair, tmp_path / "delta")
    assert report.coverage == 1.0
    artifact, model = check(pair, tmp_path)
    assert artifact.config.tensors["lm_head.weight"].kind == "tied"
    assert artifact.config.tied
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_tuned_side_untied_with_its_own_head_is_coded_against_the_shared_tensor(tmp_path):
    """mergekit #350, #615."""
    pair = make_pair(tmp_path)
    torch.manual_seed(4)
    untie(pair, equal=False)
    export(pair, tmp_path / "delta")
    artifact, model = check(pair, tmp_path)
    entry = artifact.entry("lm_head.weight")
    assert (entry.kind, entry.base_tensor) == ("sign", "model.embed_tokens.weight")
    assert not artifact.config.tied
    assert not model.config.tie_word_embeddings
    base, tuned = FolderSource(pair.base), FolderSource(pair.tuned)
    expected = one_bit(base.get("model.embed_tokens.weight"), tuned.get("lm_head.weight"))
    assert torch.equal(model.lm_head.weight, expected)


def test_base_untied_and_tuned_tied_is_stored_once(tmp_path):
    """mergekit #350, #615, the other way round."""
    pair = make_pair(tmp_path, "llama-untied")
    model = AutoModelForCausalLM.from_pretrained(pair.tuned, dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(pair.tuned)
    assert "lm_head.weight" not in FolderSource(pair.tuned).names()
    export(pair, tmp_path / "delta")
    artifact, applied = check(pair, tmp_path)
    assert artifact.config.tensors["lm_head.weight"].kind == "tied"
    assert artifact.config.tied
    assert applied.config.tie_word_embeddings
    assert torch.equal(applied.lm_head.weight, applied.model.embed_tokens.weight)


def test_base_tensor_that_the_variant_no_longer_uses_is_checked_too(tmp_path):
    """The base has a head of its own, the variant ties it: another head is another base all the same."""
    pair = make_pair(tmp_path, "llama-untied")
    model = AutoModelForCausalLM.from_pretrained(pair.tuned, dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(pair.tuned)
    export(pair, tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    tensors = load_file(pair.base / "model.safetensors")
    tensors["lm_head.weight"][7, 7] += 1
    save_file(tensors, pair.base / "model.safetensors", metadata={"format": "pt"})
    quick_check(
        FolderSource(pair.base), artifact.config.base.fingerprint
    )  # reads a few tensors, not this one
    with pytest.raises(DeltaError, match=r"another base: lm_head.weight has digest"):
        apply_delta(artifact, pair.base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folder_that_stores_a_tied_head_twice_is_read_as_tied(tmp_path):
    pair = make_pair(tmp_path)
    untie(pair, equal=True)
    config = pair.tuned / "config.json"
    config.write_text(
        config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    source = FolderSource(pair.tuned)
    assert source.aliases() == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in source.names()


def test_state_dict_with_tied_parameters_names_the_head_as_tied(tmp_path):
    pair = make_pair(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(pair.tuned, dtype=torch.float32)
    perturb(model, 3)
    source = StateDictSource(model.state_dict())
    assert source.aliases() == {"lm_head.weight": "model.embed_tokens.weight"}


def test_two_names_for_one_tensor_cannot_point_at_a_missing_one(tmp_path):
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    assert artifact.resolve("lm_head.weight") == "model.embed_tokens.weight"
    with pytest.raises(DeltaError, match="has no parameter nothing"):
        artifact.entry("nothing")
