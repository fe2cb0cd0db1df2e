"""vLLM's CPU build as the peer of scripts/bench_serve.py: its base alone, and its LoRA path with random adapters.

It runs in an environment of its own (scripts/vllm_peer.sh). Adapters are rank 16 on every linear layer, the shape its
users have; their values do not matter for speed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from configured import configured
from serve_process import ServerProcess, server

from zen_train.base import prepare_base, quiet_transformers


def base_folder() -> Path:
    """The default base as a Hugging Face folder."""
    return prepare_base(configured().base).folder


@contextmanager
def peer_base(python: Path, log: Path) -> Iterator[ServerProcess]:
    """vLLM with the base alone."""
    with server(_command(python), log, timeout_s=400, **_environment()) as found:
        yield found


@contextmanager
def peer_lora(python: Path, log: Path, *, adapters: int) -> Iterator[ServerProcess]:
    """vLLM with `adapters` LoRA adapters, named lora0 and on."""
    with tempfile.TemporaryDirectory() as scratch:
        modules = [f"lora{number}={_adapter(Path(scratch), number)}" for number in range(adapters)]
        options = [
            "--enable-lora",
            "--max-loras",
            str(adapters),
            "--max-lora-rank",
            "16",
            "--lora-modules",
            *modules,
        ]
        with server([*_command(python), *options], log, timeout_s=500, **_environment()) as found:
            yield found


def _command(python: Path) -> list[str]:
    return [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(base_folder()),
        "--served-model-name", "smollm2", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "16",
        "--host", "127.0.0.1", "--port", "{port}",
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _adapter(folder: Path, number: int) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(number)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(base_folder(), dtype=torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-3)
    adapted.save_pretrained(str(folder / f"lora{number}"))
    return folder / f"lora{number}"
