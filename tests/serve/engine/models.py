"""Tiny bases with exported variants, jobs run to their end, and the same variants as dense transformers
models.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from zen_train.delta import BaseInfo, DeltaArtifact, FolderSource, apply_delta, write_artifact
from zen_train.serve.engine import EngineConfig, TorchEngine
from zen_train.serve.types import Job, Sampling, TokenEvent

SMALL: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 64,
    "intermediate_size": 44,  # not a multiple of 8: padding bits are in use
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama-tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-untied": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "mistral-window": lambda: transformers.MistralConfig(**SMALL, sliding_window=12),
}


@dataclass(frozen=True)
class Family:
    """A base and its variants, as folders."""

    base: Path
    variants: dict[str, Path]

    def hash(self, name: str) -> str:
        return DeltaArtifact.open(self.variants[name]).content_hash

    def dense(self, name: str | None) -> Any:
        """The variant (None: the base) as a float32 transformers model, merged by zen_train.delta."""
        if name is None:
            return load_dense(self.base)
        merged = self.variants[name].with_name(f"{name}-{self.hash(name)[:8]}-merged")
        if not merged.exists():
            apply_delta(DeltaArtifact.open(self.variants[name]), self.base, merged, dtype="float32")
        return load_dense(merged)


@cache
def load_dense(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def noise(model: Any, seed: int, scale: float, *, only: str = "") -> None:
    """Add zero-mean noise to every parameter whose name holds `only`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def make_base(folder: Path, architecture: str) -> Path:
    """A random bfloat16 base whose norms and biases are not constants."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](), dtype=torch.float32)
    noise(model, 2, 0.15)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_variant(base: Path, folder: Path, *, seed: int, only: str = "", **options: Any) -> Path:
    """Export a fine-tune that moved every parameter (or those whose name holds `only`) by noise."""
    tuned = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    noise(tuned, seed, 0.1, only=only)
    tuned_folder = folder.with_name(f"{folder.name}-tuned-{seed}")
    tuned.save_pretrained(tuned_folder)
    write_artifact(
        folder,
        base=FolderSource(base),
        tuned=FolderSource(tuned_folder),
        base_info=BaseInfo.from_folder(base, name="tiny"),
        **{"variant": folder.name, "step": seed, "embedding": "sign"} | options,
    )
    return folder


def make_family(folder: Path, architecture: str = "llama-tied") -> Family:
    """A base with five variants: three plain ones (`a`, `b`, `two` planes), one that moved only the MLPs (`mlp`), and
    one in coded directions (`coded`).
    """
    base = make_base(folder / "base", architecture)
    return Family(
        base,
        {
            "a": make_variant(base, folder / "a", seed=11),
            "b": make_variant(base, folder / "b", seed=12, scale="matrix"),
            "two": make_variant(base, folder / "two", seed=13, planes=2),
            "mlp": make_variant(base, folder / "mlp", seed=14, only="mlp"),
            "coded": make_variant(base, folder / "coded", seed=15, code="directions"),
        },
    )


def engine_of(family: Family, **options: Any) -> TorchEngine:
    """A started float32 engine with small budgets; stop it."""
    settings = {
        "dtype": "fp32",
        "max_jobs": 8,
        "slots": 6,
        "kv_bytes": 1 << 20,
        "prefill_chunk_tokens": 16,
        "page_tokens": 8,
        "threads": 1,
    }
    engine = TorchEngine.from_folder(family.base, EngineConfig(**settings | options))
    engine.start()
    return engine


def load(engine: TorchEngine, family: Family, names: Iterable[str]) -> None:
    """Load variants, one after another."""

    async def all_of_them() -> None:
        for name in names:
            await engine.load(family.hash(name), family.variants[name])

    asyncio.run(all_of_them())


def unload(engine: TorchEngine, content_hash: str) -> None:
    asyncio.run(engine.unload(content_hash))


def prompt(tokens: int, seed: int = 0, words: int = SMALL["vocab_size"]) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, words, (tokens,), generator=generator).tolist())


def job(
    job_id: str, variant_hash: str | None = None, tokens: Sequence[int] = (1, 2, 3), **options: Any
) -> Job:
    """A greedy job without stop tokens."""
    defaults = {"max_tokens": 8, "stop_tokens": frozenset(), "sampling": Sampling(temperature=0, logprobs=3)}
    return Job(id=job_id, variant_hash=variant_hash, prompt_tokens=tuple(tokens), **defaults | options)


class Running:
    """Events of jobs, collected by their sinks."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.events: dict[str, list[TokenEvent]] = {}
        self._changed = threading.Condition()

    def submit(self, *jobs: Job) -> Running:
        for each in jobs:
            self.events[each.id] = []
            self.engine.submit(each, self._sink)
        return self

    def _sink(self, event: TokenEvent) -> None:
        with self._changed:
            self.events[event.job_id].append(event)
            self._changed.notify_all()

    def wait(self, condition: Any = None, timeout_s: float = 60) -> Running:
        """Until `condition()` holds; without one, until every job has ended."""
        with self._changed:
            assert self._changed.wait_for(condition or self._all_ended, timeout_s), self.events
        return self

    def _all_ended(self) -> bool:
        return all(events and events[-1].finish for events in self.events.values())

    def tokens(self, job_id: str) -> list[int]:
        return [event.token for event in self.events[job_id] if event.token is not None]

    def finish(self, job_id: str) -> str | None:
        finishes = [event.finish for event in self.events[job_id] if event.finish]
        assert len(finishes) == 1, "every job ends with exactly one event that has finish set"
        return finishes[0]


class Gate:
    """Lets an engine run so many steps and no more, until it is opened."""

    def __init__(self, engine: TorchEngine) -> None:
        self._permits = threading.Semaphore(0)
        self._open = False
        self._forward = engine._loop._scores
        engine._loop._scores = self._scores

    def _scores(self, spans: Any) -> torch.Tensor:
        if not self._open:
            assert self._permits.acquire(timeout=60)
        return self._forward(spans)

    def allow(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        self._open = True
        self.allow(1)


def run(engine: TorchEngine, *jobs: Job) -> Running:
    """Submit and wait for the ends."""
    return Running(engine).submit(*jobs).wait()


def assert_equals_dense(model: Any, work: Job, events: list[TokenEvent], *, tolerance: float = 1e-4) -> None:
    """Greedy tokens are those of the dense model and log probabilities agree, alternatives included."""
    tokens = [event.token for event in events]
    assert len(tokens) == work.max_tokens
    ids = torch.tensor([[*work.prompt_tokens, *tokens]])
    with torch.no_grad():
        logprob_TN = model(input_ids=ids).logits[0].log_softmax(-1)
    for number, event in enumerate(events):
        row_N = logprob_TN[len(work.prompt_tokens) + number - 1]
        assert event.token == int(row_N.argmax()), f"{work.id}: token {number}"
        assert abs(event.logprob - float(row_N[event.token])) < tolerance, f"{work.id}: token {number}"
        for other in event.top:
            assert abs(other.logprob - float(row_N[other.token])) < tolerance
        assert [other.token for other in event.top] == row_N.topk(len(event.top)).indices.tolist()
