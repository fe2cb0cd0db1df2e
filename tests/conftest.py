"""What all tests share: no network, no W&B run, and the bases they train on."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from zen_train.base import Base, prepare_base
from zen_train.config import BaseSection
from zen_train.serve.config import read_config


@pytest.fixture(autouse=True)
def _empty_tensors_are_nan():
    """Memory that nobody wrote reads as NaN, so that using it fails loudly."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(previous)


@pytest.fixture(scope="session")
def tiny_base() -> Base:
    return prepare_base(BaseSection(name="tiny", kind="random", licence="CC0-1.0", dtype="bfloat16"))


@pytest.fixture(scope="session")
def gpt2_base(tiny_base: Base, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A random GPT-2 with the tiny base's tokenizer: its matrices are stored [in, out]."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = tiny_base.tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_inner=44, n_positions=256,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return prepare_base(BaseSection(name="gpt2", kind="hf", path=str(folder)))


@pytest.fixture(scope="session")
def real_base_model() -> Base:
    return prepare_base(read_config([]).base)  # what is served and trained where nothing else is asked for


@pytest.fixture(scope="session")
def real_base(real_base_model: Base) -> Path:
    """The folder of the real base: SmolLM2-135M-Instruct as bf16 safetensors, with its tokenizer."""
    return real_base_model.folder
