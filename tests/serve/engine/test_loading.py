"""Bases that are served, refused, damaged; and reading tensors from files."""

from __future__ import annotations

import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.serve.engine.models import CONFIGS, SMALL, load_dense, make_base
from zen_train.delta import TensorSpec, fingerprint
from zen_train.delta.sources import FolderSource
from zen_train.errors import BaseModelError, DeltaError
from zen_train.serve.engine import EngineConfig
from zen_train.serve.engine.architecture import read_architecture
from zen_train.serve.engine.tensor_files import FilePlace, find_places, memory_of, reading
from zen_train.serve.engine.weights import load_model

TINY = EngineConfig(slots=1)


def change_config(folder, **options):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "model_type='mixtral'"),
        ({"model_type": "gemma2"}, "model_type='gemma2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic'",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config="),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, options, named):
    base = make_base(tmp_path / "base", "llama-untied")
    change_config(base, **options)
    with pytest.raises(BaseModelError) as caught:
        read_architecture(base, context_tokens=None)
    assert named in str(caught.value)


def test_mixed_windows_are_served_within_the_window_only(tmp_path):
    config = transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=32, max_window_layers=1
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match="layer_types mixes"):
        read_architecture(tmp_path, context_tokens=None)
    assert read_architecture(tmp_path, context_tokens=32)[0].decoder.window_tokens is None


@pytest.mark.parametrize("architecture", CONFIGS)
def test_rotation_tables_are_those_of_transformers(tmp_path, architecture):
    base = make_base(tmp_path / "base", architecture)
    _, rotary = read_architecture(base, context_tokens=100)
    cos, sin = load_dense(base).model.rotary_emb(torch.zeros(1, 1), torch.arange(100).unsqueeze(0))
    half = cos.shape[-1] // 2
    assert torch.allclose(rotary.cos, cos[0, :, :half], atol=1e-6)
    assert torch.allclose(rotary.sin, sin[0, :, :half], atol=1e-6)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_scaled_rotation_tables_are_those_of_transformers(tmp_path, kind):
    options = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(**SMALL, rope_parameters=options)
    config.save_pretrained(tmp_path)
    _, rotary = read_architecture(tmp_path, context_tokens=None)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, _ = theirs(torch.zeros(1, 1), torch.arange(128).unsqueeze(0))
    assert torch.allclose(rotary.cos, cos[0, :, : cos.shape[-1] // 2], atol=1e-6)


def test_the_fingerprint_is_the_one_that_artifacts_record(family):
    model = load_model(family.base, TINY)
    assert model.fingerprint == fingerprint(FolderSource(family.base))
    known = fingerprint(FolderSource(family.base))
    assert load_model(family.base, TINY, fingerprint=known).fingerprint is known


def test_auto_keeps_bf16_and_fp32_holds_the_same_values(family):
    kept, wide = (load_model(family.base, EngineConfig(slots=1, dtype=dtype)) for dtype in ("auto", "fp32"))
    assert (kept.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    for target, matrix in kept.matrices.items():
        assert torch.equal(matrix.float(), wide.matrices[target])


def test_a_base_in_shards_is_the_same_base(family, tmp_path):
    transformers.AutoModelForCausalLM.from_pretrained(family.base, dtype=torch.bfloat16).save_pretrained(
        tmp_path, max_shard_size="10KB"
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, parts = load_model(family.base, TINY), load_model(tmp_path, TINY)
    assert whole.fingerprint.root == parts.fingerprint.root
    assert all(torch.equal(matrix, parts.matrices[target]) for target, matrix in whole.matrices.items())


def test_missing_left_over_misshapen_and_infinite_tensors_are_refused_by_name(tmp_path):
    base = make_base(tmp_path / "base", "llama-untied")
    stored = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for tensors, message in (
        ({key: value for key, value in stored.items() if key != name}, f"{name} .1 in all. is missing"),
        (stored | {"model.layers.0.extra.weight": torch.zeros(3)}, "model.layers.0.extra.weight"),
        (stored | {name: torch.zeros(3, 32, dtype=torch.bfloat16)}, r"\[3, 32\]"),
        (stored | {name: torch.full_like(stored[name], torch.inf)}, f"{name} holds NaN or infinite"),
    ):
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BaseModelError, match=message):
            load_model(base, TINY)


def test_a_folder_without_a_model_and_a_context_beyond_it_are_refused(family, tmp_path):
    with pytest.raises(BaseModelError, match=r"config\.json"):
        load_model(tmp_path, TINY)
    with pytest.raises(BaseModelError, match="context_tokens=129"):
        load_model(family.base, EngineConfig(context_tokens=129))


def test_unknown_settings_are_refused():
    for wrong in (
        {"devise": "cpu"},
        {"device": "tpu"},
        {"max_jobs": 0},
        {"page_tokens": 7},
        {"dtype": "int8"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            EngineConfig(**wrong)


def test_tensors_are_read_to_their_places_with_few_calls(tmp_path, monkeypatch):
    tensors = {f"t{number:04d}": torch.arange(number, number + 5) for number in range(1200)}
    save_file(tensors, tmp_path / "model.safetensors")
    places = find_places(tmp_path, "model")
    buffers = {name: torch.zeros(5, dtype=torch.int64) for name in places}
    calls = []
    preadv = os.preadv

    def short(handle, vectors, offset):
        """Gives fewer bytes than asked for, as a file system may."""
        calls.append(len(vectors))
        return preadv(handle, [*vectors[:-1], vectors[-1][:3]] if len(calls) == 1 else vectors, offset)

    monkeypatch.setattr(os, "preadv", short)
    with reading() as reader:
        reader.read((places[name], memory_of(buffer)) for name, buffer in buffers.items())
    assert all(torch.equal(buffers[name], tensor) for name, tensor in tensors.items())
    assert len(calls) == 4


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    save_file({"t": torch.zeros(5000)}, tmp_path / "model.safetensors")
    place = find_places(tmp_path, "model")["t"]
    os.truncate(tmp_path / "model.safetensors", 2000)
    with reading() as reader, pytest.raises(DeltaError, match="ends at byte 2000"):
        reader.read([(place, memory_of(torch.zeros(5000)))])
    gone = FilePlace(tmp_path / "gone", 0, 1, TensorSpec(torch.uint8, (1,)))
    with reading() as reader, pytest.raises(DeltaError, match="No such file"):
        reader.read([(gone, memoryview(bytearray(1)))])
