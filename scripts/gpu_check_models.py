"""What gpu_check_engine.py serves: a random Llama base, four exported variants, jobs for all, and dense twins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zen_train.serve.types import Job

SIZE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
DRY_SIZE: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 64,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
CODES: dict[str, dict[str, Any]] = {
    "one": {},
    "other": {},
    "two": {"planes": 2},
    "directions": {"code": "directions"},
}
PROMPT_TOKENS = (150, 9, 40, 17, 70)
"""Of the base and the variants; the first makes the kernels form W0 + alpha S."""


@dataclass(frozen=True)
class Made:
    """A base and its variants, as folders."""

    base: Path
    variants: dict[str, Path]
    hashes: dict[str, str]
    words: int
    new_tokens: int


def make_models(folder: Path, *, dry: bool) -> Made:
    """A random bfloat16 base and a variant for each of CODES that moved every parameter."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from zen_train.delta import BaseInfo, DeltaArtifact, FolderSource, StateDictSource, write_artifact

    size = DRY_SIZE if dry else SIZE
    config = LlamaConfig(**size, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _move(model, seed=2)
    base = folder / "base"
    model.to(torch.bfloat16).save_pretrained(base)
    variants, hashes = {}, {}
    for seed, (name, options) in enumerate(CODES.items(), 3):
        tuned = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        _move(tuned, seed=seed)
        variants[name] = folder / name
        write_artifact(
            variants[name],
            base=FolderSource(base),
            tuned=StateDictSource(tuned.state_dict()),
            base_info=BaseInfo.from_folder(base, name="random"),
            variant=name,
            step=seed,
            embedding="sign",
            **options,
        )
        hashes[name] = DeltaArtifact.open(variants[name]).content_hash
    return Made(base, variants, hashes, size["vocab_size"], 8 if dry else 64)


def _move(model: Any, *, seed: int) -> None:
    """Add noise to every parameter: a share of its size, so that depth does not blow it up."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.5 * parameter.square().mean().sqrt()))


def jobs_of(made: Made, *, dry: bool) -> list[Job]:
    """A greedy job of the base and of every variant."""
    import torch

    from zen_train.serve.types import Job, Sampling

    jobs = []
    for number, name in enumerate([None, *made.variants]):
        generator = torch.Generator().manual_seed(number)
        count = PROMPT_TOKENS[number] // (8 if dry else 1)
        prompt = torch.randint(0, made.words, (max(count, 2),), generator=generator).tolist()
        jobs.append(
            Job(
                id=name or "base",
                variant_hash=name and made.hashes[name],
                prompt_tokens=tuple(prompt),
                max_tokens=made.new_tokens,
                stop_tokens=frozenset(),
                sampling=Sampling(temperature=0.0, logprobs=0),
            )
        )
    return jobs


def dense_models(made: Made, device: str) -> dict[str, Any]:
    """The base and every variant as a float32 model of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from zen_train.delta import DeltaArtifact, apply_delta

    folders = {"base": made.base}
    for name, folder in made.variants.items():
        folders[name] = folder.with_name(f"{name}-merged")
        apply_delta(DeltaArtifact.open(folder), made.base, folders[name], dtype="float32")
    models: dict[str, Any] = {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for name, folder in folders.items()
    }
    return {name: model.to(device) for name, model in models.items()}
