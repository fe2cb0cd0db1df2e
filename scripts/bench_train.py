"""What merging, exporting and the callbacks cost a training run, on the real base and its real shapes.

python scripts/bench_train.py [--steps N]    JSON lines on standard output, a table on standard error; 5 minutes.

Bounds: a merge under 1 % of the interval at scale=full; an export under 2 times the time to read and sha256 both
models; the callbacks under 0.5 % of a step; a one-bit-aware step under 1.05 plain ones.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from configured import configured
from measure import Figures, median, spread, timed

from zen_train.base import Base, prepare_base
from zen_train.callbacks.curves import Curves
from zen_train.callbacks.graceful_stop import GracefulStop
from zen_train.callbacks.merge import MergeCallback
from zen_train.callbacks.progress import RunProgress
from zen_train.callbacks.validation import BestWeights, Validation
from zen_train.config import ExportSection, MergeSection, OptimSection, TrainerSection, TuningSection
from zen_train.data.module import TextDataModule
from zen_train.data.records import Corpus, Record
from zen_train.delta import BaseInfo, FolderSource, verify_artifact, write_artifact
from zen_train.merge import merge_tensors
from zen_train.module import CausalLM
from zen_train.tracking import LoggerConfig, make_loggers, resolve_wandb

FULL_INTERVAL_STEPS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--steps", type=int, default=12, help="optimizer steps of 1024 tokens for the overhead figure"
    )
    arguments = parser.parse_args()
    base = prepare_base(configured().base)
    figures = Figures("train")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        step_seconds = callback_overhead(figures, base, folder, steps=arguments.steps)
        one_bit_steps(figures, base, folder, steps=arguments.steps)
        merges(figures, base, step_seconds)
        export(figures, base, folder)
    figures.show()


# -- callbacks ----------


class Timed(L.Callback):
    """Another callback, with the seconds of its `on_train_batch_end` added up."""

    def __init__(self, inner: L.Callback) -> None:
        self.inner = inner
        self.seconds: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.inner.on_train_start(trainer, pl_module)

    def on_train_batch_end(self, *arguments: Any) -> None:
        started = time.perf_counter()
        self.inner.on_train_batch_end(*arguments)
        self.seconds.append(time.perf_counter() - started)

    @property
    def state_key(self) -> str:
        return type(self.inner).__name__


def callback_overhead(figures: Figures, base: Base, folder: Path, *, steps: int) -> float:
    """Seconds of a training step, after recording what the callbacks of a run add to it between merges."""
    data = _data(base, steps)
    settings = TrainerSection(max_steps=steps)
    module = CausalLM(base, tuning=TuningSection(), optim=OptimSection(), trainer=settings)
    validation = Validation(data.val_dataloader, every_n_steps=FULL_INTERVAL_STEPS, best=BestWeights(folder))
    curves = Curves(every_n_steps=1)
    inner: list[L.Callback] = [
        curves,
        MergeCallback(MergeSection(every_n_steps=FULL_INTERVAL_STEPS), validation=validation, folder=folder),
        validation,
        RunProgress(Console(stderr=True), curves=curves, validation=validation),
        GracefulStop(folder / "last.ckpt"),
    ]
    callbacks = [Timed(callback) for callback in inner]

    ends = _fit(module, data, callbacks, steps=steps, folder=folder)
    step_seconds = [after - before for before, after in pairwise(ends[1:])]
    overhead = [sum(callback.seconds[index] for callback in callbacks) for index in range(2, steps)]
    shares = [100 * part / whole for part, whole in zip(overhead, step_seconds, strict=True)]
    figures.add("step of 1024 tokens", median(step_seconds), "s", spread=spread(step_seconds))
    figures.add(
        "callbacks per step",
        median(shares),
        "%",
        bound=0.5,
        against="step of 1024 tokens",
        spread=spread(shares),
    )
    return median(step_seconds)


# -- one-bit-aware training ----------


def one_bit_steps(figures: Figures, base: Base, folder: Path, *, steps: int) -> None:
    """What a step is longer when it writes the one-bit code of all weights: both halves of one run."""
    module = CausalLM(
        base,
        tuning=TuningSection(),
        optim=OptimSection(),
        trainer=TrainerSection(max_steps=2 * steps),
        export=ExportSection(aware=True, aware_share=0.5),
    )
    coding: list[float] = []

    class Watch(L.Callback):
        """Times `encode` of the optimizer, which the module makes when the fit starts."""

        def on_train_start(self, *arguments: Any) -> None:
            assert module.one_bit is not None
            encode = module.one_bit.encode

            def watched() -> None:
                started = time.perf_counter()
                encode()
                coding.append(time.perf_counter() - started)

            module.one_bit.encode = watched  # type: ignore[method-assign, assignment]

    ends = _fit(module, _data(base, 2 * steps), [Watch()], steps=2 * steps, folder=folder)
    taken = [after - before for before, after in pairwise(ends)]
    # Without warming up, and without the step that copies the latents.
    plain, coded = taken[1 : steps - 2], taken[steps:]
    shortest, longest = spread(coded)
    figures.add("coding all weights in one bit, a step", median(coding), "s", spread=spread(coding))
    figures.add(
        "one-bit-aware step",
        median(coded) / median(plain),
        "x",
        bound=1.05,
        against="plain step of the same run",
        spread=(shortest / median(plain), longest / median(plain)),
    )


# -- runs ----------


def _data(base: Base, steps: int) -> TextDataModule:
    text = "The quick brown fox jumps over the lazy dog, and counts from one to ten while it does so. " * 12
    records = [Record(document=f"d{index}", text=f"{index} {text}") for index in range(200)]
    return TextDataModule(
        Corpus(name="bench", train=records[20:], heldout=records[:20]),
        tokenizer=base.tokenizer(),
        context_tokens=256,
        batch_size=4,
        accumulate=1,
        max_steps=steps,
        eval_tokens=1024,
        seed=0,
        cache=False,
    )


def _fit(
    module: CausalLM, data: TextDataModule, callbacks: list[Any], *, steps: int, folder: Path
) -> list[float]:
    """Train; the times at which steps ended."""
    ends: list[float] = []

    class Steps(L.Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            ends.append(time.perf_counter())

    config = LoggerConfig()
    loggers = make_loggers(
        folder, decision=resolve_wandb(config.wandb, env={"WANDB_MODE": "disabled"}), config=config
    )
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        callbacks=[Steps(), *callbacks],
        logger=loggers,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data)
    return ends


# -- merging ----------


def merges(figures: Figures, base: Base, step_seconds: float) -> None:
    """A whole merge of two checkpoints, as the callback does it on one process, for each method and rank."""
    source = base.source()
    tensors = []
    for index, name in enumerate(source.names()):
        weight = source.get(name).float()
        tensors.append(
            (name, weight, [_fine_tuned(weight, seed=2 * index), _fine_tuned(weight, seed=2 * index + 1)])
        )
    interval = FULL_INTERVAL_STEPS * step_seconds
    cases: list[tuple[str, int | None]] = [("mean", None), ("monosoup", None)]
    cases += [("svd_average", rank) for rank in (16, 64, 256)]
    for method, rank in cases:
        started = time.perf_counter()
        for _ in merge_tensors(method, tensors, rank=rank, seed=0):
            pass
        seconds = time.perf_counter() - started
        case = f"merge {method}" + (f" rank {rank}" if rank else "")
        figures.add(case, seconds, "s")
        figures.add(
            f"{case}, share of the interval at scale=full",
            100 * seconds / interval,
            "%",
            bound=1.0,
            against=f"{FULL_INTERVAL_STEPS} steps of 1024 tokens on this machine",
        )


def _fine_tuned(weight: torch.Tensor, *, seed: int) -> torch.Tensor:
    """A change shaped like a real one: a decaying spectrum of 32 directions over a floor of noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(weight.shape, generator=generator)
    if weight.ndim == 2:
        rows, columns = weight.shape
        left, right = (
            torch.randn(rows, 32, generator=generator),
            torch.randn(32, columns, generator=generator),
        )
        noise += 4 * (left / torch.arange(1, 33)) @ right
    return weight + 1e-3 * noise


# -- export ----------


def export(figures: Figures, base: Base, folder: Path) -> None:
    """Export and verify from files, against reading and hashing both models. Memory: tests/delta/test_memory.py."""
    tuned = folder / "tuned"
    shutil.copytree(base.folder, tuned)
    source = base.source()
    changed = {
        name: _fine_tuned(source.get(name).float(), seed=index) for index, name in enumerate(source.names())
    }
    save_file(changed, tuned / "model.safetensors")
    del changed
    info = BaseInfo.from_folder(base.folder, known=base.fingerprint)
    delta = folder / "delta"

    def write() -> None:
        write_artifact(
            delta,
            base=base.source(),
            tuned=FolderSource(tuned),
            base_info=info,
            variant="bench",
            step=0,
            overwrite=True,
        )

    hashing = median(timed(lambda: [_sha256(base.folder), _sha256(tuned)], repeats=5))
    writing = timed(write, repeats=5)
    verifying = timed(
        lambda: verify_artifact(delta, base=base.source(), tuned=FolderSource(tuned)), repeats=3
    )
    figures.add("read and sha256 both models", hashing, "s")
    figures.add("export", median(writing), "s", spread=spread(writing))
    ratio = [seconds / hashing for seconds in writing]
    figures.add(
        "export, times reading and hashing both",
        median(ratio),
        "x",
        bound=2.0,
        against="read and sha256",
        spread=spread(ratio),
    )
    figures.add(
        "verify what was written, errors recomputed", median(verifying), "s", spread=spread(verifying)
    )


def _sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    main()
