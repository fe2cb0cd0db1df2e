"""Tiny random models as base and fine-tune, and the one-bit delta computed by hand, apart from the code
under test.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from zen_train.delta import ArtifactReport, BaseInfo, DeltaArtifact, FolderSource, write_artifact

_SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 44,  # not a multiple of 8: padding bits are in use
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-tied": lambda: transformers.LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "llama-untied": lambda: transformers.LlamaConfig(**_SMALL, tie_word_embeddings=False),
    "qwen2": lambda: transformers.Qwen2Config(**_SMALL, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**_SMALL),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_inner=44, n_positions=64
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_SMALL, head_dim=8, moe_intermediate_size=20, num_experts=4, num_experts_per_tok=2
    ),
}
ARCHITECTURES = tuple(_CONFIGS)
STEP_SIZE = 0.01


@dataclass(frozen=True)
class Pair:
    """A bfloat16 base and its float32 fine-tune, as folders."""

    base: Path
    tuned: Path


def make_pair(folder: Path, architecture: str = "llama-tied", *, seed: int = 0) -> Pair:
    """Save a random base and a fine-tune that moved every parameter by zero-mean noise."""
    torch.manual_seed(seed)
    config = _CONFIGS[architecture]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and norms start at constants
            parameter.copy_(parameter.to(torch.bfloat16))
    pair = Pair(folder / "base", folder / "tuned")
    model.to(torch.bfloat16).save_pretrained(pair.base)
    model = model.to(torch.float32)
    perturb(model, seed + 1)
    model.save_pretrained(pair.tuned)
    return pair


def perturb(model: PreTrainedModel, seed: int) -> None:
    """Add zero-mean noise to every parameter in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * STEP_SIZE)


def export(pair: Pair, folder: Path, **options: Any) -> ArtifactReport:
    """`write_artifact` for a pair of folders."""
    base = FolderSource(pair.base)
    return write_artifact(
        folder,
        base=base,
        tuned=FolderSource(pair.tuned),
        base_info=BaseInfo.from_folder(pair.base, name="tiny-base", licence="CC0-1.0"),
        **{"variant": "test", "step": 7} | options,
    )


def damaged_copy(folder: Path, copy: Path, name: str, part: str) -> None:
    """An artifact in one file, with one bit of a stored part flipped."""
    stored = DeltaArtifact.open(folder).part(name, part).view(torch.uint8).numpy().tobytes()
    shutil.copytree(folder, copy)
    path = copy / "delta.safetensors"
    raw = path.read_bytes()
    start = raw.index(stored)
    path.write_bytes(raw[:start] + bytes([raw[start] ^ 1]) + raw[start + 1 :])


def one_bit(base: torch.Tensor, tuned: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """`W0 + mean|D| * sign(D)` per output row, written down directly from the formula."""
    delta = tuned.float() - base.float()
    alpha = delta.double().abs().mean(dim=-2 if transposed else -1, keepdim=True).float()
    return base.float() + torch.where(delta >= 0, alpha, -alpha)


def expected_state(pair: Pair) -> dict[str, torch.Tensor]:
    """The variant's tensors by the folders' names: matrices at one bit, vectors as tuned."""
    base, tuned = FolderSource(pair.base), FolderSource(pair.tuned)
    gpt2 = base.config["model_type"] == "gpt2"
    out = {}
    for name in base.names():
        w0, w1 = base.get(name), tuned.get(name)
        conv1d = gpt2 and ".c_" in name and name.endswith("weight")
        out[name] = one_bit(w0, w1, transposed=conv1d) if w0.dim() >= 2 else w1.float()
    return out


def load(folder: Path) -> PreTrainedModel:
    """The model of a folder, in float32, ready to compute logits."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: PreTrainedModel, tokens: int = 50) -> torch.Tensor:
    """Logits of a fixed random prompt over the first `tokens` ids."""
    ids = torch.randint(0, tokens, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(input_ids=ids).logits
