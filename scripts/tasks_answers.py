"""Greedy answers of the base and variants beside it from our own engine, in this process: all in one running batch."""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zen_train.base import Base
from zen_train.data.tokenise import prompt_text
from zen_train.delta import DeltaArtifact, Fingerprint
from zen_train.serve.api.text import TextModel
from zen_train.serve.engine import EngineConfig, TorchEngine
from zen_train.serve.types import Job, Sampling, TokenEvent

Dtype = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Answer:
    """`cut`: it ended because of its length."""

    text: str
    cut: bool


class Answerer:
    """One engine with a base in it."""

    def __init__(self, engine: TorchEngine, base: Base) -> None:
        self._engine, self._tokenizer = engine, base.tokenizer()
        self._stop = TextModel(base.folder).end_tokens

    def load(self, delta: Path) -> str:
        """Place a variant; its content hash, by which it is asked."""
        content_hash = DeltaArtifact.open(delta).content_hash
        asyncio.run(self._engine.load(content_hash, delta))
        return content_hash

    def answers(
        self, models: Mapping[str, str | None], prompts: list[str], *, max_tokens: int
    ) -> dict[str, list[Answer]]:
        """The answers of each model (name -> content hash, None: the base) to all prompts, in their order."""
        ended: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        rendered = [prompt_text(prompt, self._tokenizer) for prompt in prompts]
        ids: list[list[int]] = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        tokens: dict[str, list[int]] = {}
        finishes: dict[str, str] = {}
        for number, prompt_tokens in enumerate(ids):
            room = self._engine.limits.context_tokens - len(prompt_tokens)
            for name, content_hash in models.items():
                tokens[f"{name} {number}"] = []
                if room < 1:  # nothing can be said after such a prompt, which is an answer cut at once
                    finishes[f"{name} {number}"] = "length"
                    continue
                job = Job(
                    id=f"{name} {number}",
                    variant_hash=content_hash,
                    prompt_tokens=tuple(prompt_tokens),
                    max_tokens=min(max_tokens, room),
                    stop_tokens=self._stop,
                    sampling=Sampling(temperature=0),
                )
                self._engine.submit(job, ended.put)
        while len(finishes) < len(tokens):
            event = ended.get()
            if event.token is not None:
                tokens[event.job_id].append(event.token)
            if event.finish in ("error", "cancelled"):
                raise RuntimeError(f"{event.job_id}: the engine ended the answer") from event.error
            if event.finish:
                finishes[event.job_id] = event.finish
        return {
            name: [
                Answer(self._text(tokens[f"{name} {number}"]), finishes[f"{name} {number}"] == "length")
                for number in range(len(prompts))
            ]
            for name in models
        }

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()


@contextmanager
def answering(base: Base, *, dtype: Dtype, folder: Path | None = None) -> Iterator[Answerer]:
    """An engine for `base`, or for a fine-tune of it in `folder`."""
    config = EngineConfig(dtype=dtype, slots=2, max_jobs=16)
    known: Fingerprint | None = base.fingerprint if folder is None else None
    engine = TorchEngine.from_folder(folder or base.folder, config, fingerprint=known)
    engine.start()
    try:
        yield Answerer(engine, base)
    finally:
        engine.stop()


@contextmanager
def full_model(base: Base, weights: Path) -> Iterator[Path]:
    """A model folder around the float32 weights that fidelity_runs.py keeps, without a second copy where it can be."""
    with tempfile.TemporaryDirectory(dir=weights.parent) as temporary:
        folder = Path(temporary)
        try:
            os.link(weights, folder / "model.safetensors")
        except OSError:  # a file system without links
            shutil.copyfile(weights, folder / "model.safetensors")
        shutil.copyfile(base.folder / "config.json", folder / "config.json")
        yield folder
