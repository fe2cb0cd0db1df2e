"""The part of gpu_check.py that runs the whole engine: are its answers right, and how long do a step and a load take?

Models: gpu_check_models.py. For float32 and bfloat16, with and without CUDA graphs, one engine serves a mixed batch of
the base and all variants, has them evicted and loaded again from host memory, and serves it again. In float32 every
answer is compared with the same variant as a dense transformers model. A wrong answer, a reload that read the disk, or
memory that is not pinned is a failed check.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpu_check_models import CODES, Made, dense_models, jobs_of, make_models

if TYPE_CHECKING:
    from gpu_check import Check

    from zen_train.serve.engine import TorchEngine
    from zen_train.serve.types import Job, TokenEvent

Dtype = Literal["fp32", "bf16"]
NEEDED_S = 90.0
TOLERANCE = 1e-3
"""Nats between the engine's log probability and the dense model's: both float32, sums in another order."""


@dataclass
class Answers:
    """Events of jobs, with the times at which they came."""

    events: dict[str, list[TokenEvent]] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def sink(self, event: TokenEvent) -> None:
        """Called by the engine's thread."""
        self.events.setdefault(event.job_id, []).append(event)
        self.times_s.append(time.perf_counter())
        if event.finish:
            self.ended.release()


def compare(jobs: list[Job], answers: Answers, dense: dict[str, Any], device: str) -> tuple[float, int]:
    """Largest difference of a log probability, and how many tokens the dense model would not have chosen."""
    import torch

    worst, wrong = 0.0, 0
    for job in jobs:
        events = answers.events[job.id]
        if [event.finish for event in events if event.finish] != ["length"]:
            return float("inf"), job.max_tokens
        tokens = [event.token for event in events]
        ids = torch.tensor([[*job.prompt_tokens, *tokens]], device=device)
        with torch.no_grad():
            logprob_TN = dense[job.id](input_ids=ids).logits[0].float().log_softmax(-1).cpu()
        for number, event in enumerate(events):
            row_N = logprob_TN[len(job.prompt_tokens) + number - 1]
            expected = float(row_N[event.token])
            worst = max(worst, abs((event.logprob or 0.0) - expected))
            wrong += float(row_N.max()) - expected > TOLERANCE
    return worst, wrong


def serve(engine: TorchEngine, jobs: list[Job]) -> tuple[Answers, float]:
    """All jobs side by side; the answers, and seconds a step once all of them decode."""
    answers = Answers()
    for job in jobs:
        engine.submit(job, answers.sink)
    for _ in jobs:
        if not answers.ended.acquire(timeout=120):
            raise TimeoutError(f"no answer within two minutes; engine: {engine.stats()}")
    # The last of the first tokens of all jobs is followed by steps of one token for each job that still runs.
    half_s = sorted(answers.times_s)[len(answers.times_s) // 2 :]
    steps = len(half_s) // len(jobs)
    return answers, (half_s[-1] - half_s[0]) / max(steps - 1, 1)


def place(engine: TorchEngine, made: Made, *, present: bool) -> dict[str, float]:
    """Load or unload every variant, one after another; seconds of each."""

    async def one(name: str) -> float:
        before = time.perf_counter()
        await (
            engine.load(made.hashes[name], made.variants[name])
            if present
            else engine.unload(made.hashes[name])
        )
        return time.perf_counter() - before

    return {name: asyncio.run(one(name)) for name in made.variants}


def check_engine(check: Check) -> None:
    """Every engine, one after another; a failure of one is a failed check and does not hold up the rest."""
    try:
        import pydantic  # noqa: F401
        import transformers
    except ImportError as error:
        check.say(f"engine: skipped, it needs {error.name}")
        return
    if not check.dry and check.left_s < NEEDED_S:
        check.say(f"engine: left out, fewer than {NEEDED_S:.0f} s are left")
        return
    transformers.utils.logging.disable_progress_bar()
    device = "cpu" if check.dry else "cuda"
    with tempfile.TemporaryDirectory() as temporary:
        made = make_models(Path(temporary), dry=check.dry)
        dense = dense_models(made, device)
        dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
        for dtype in dtypes:
            for graphs in (False, True):
                case = f"engine {dtype} {'graphs' if graphs else 'eager'}"
                compared = dense if dtype == "fp32" else None
                _guarded(check, case, lambda: _one_engine(check, case, made, compared, dtype, graphs))  # noqa: B023
    if not check.dry:
        _guarded(check, "pinned memory", lambda: _pinned(check))


def _guarded(check: Check, case: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        check.failed += 1
        check.say(f"{case}: {type(error).__name__}: {error}")


def _one_engine(
    check: Check, case: str, made: Made, dense: dict[str, Any] | None, dtype: Dtype, graphs: bool
) -> None:
    from zen_train.serve.engine import EngineConfig, TorchEngine

    device = "cpu" if check.dry else "cuda"
    config = EngineConfig(
        device=device,
        dtype=dtype,
        cuda_graphs=graphs,
        pad_decode=graphs,
        slots=sum(code.get("planes", 1) for code in CODES.values()),
        max_jobs=4,
        kv_bytes=(1 << 20) if check.dry else (256 << 20),
        host_bytes=1 << 30,
    )
    engine = TorchEngine.from_folder(made.base, config)
    engine.start()
    try:
        jobs = jobs_of(made, dry=check.dry)
        for when in ("first load", "reload"):
            place(engine, made, present=True)
            answers, _ = serve(engine, jobs)
            if dense is not None:
                worst, wrong = compare(jobs, answers, dense, device)
                check.failed += worst > TOLERANCE or wrong > 0
                check.line(case, worst * 1e6, "unats", f"dense float32, {when}", TOLERANCE * 1e6)
                check.line(case, float(wrong), "tokens", "that the dense models would not say", 0.0)
            place(engine, made, present=False)
        place(engine, made, present=True)
        _, step_s = serve(engine, jobs)  # graphs are captured and kernels tuned by now
        check.line(case, step_s * 1e3, "ms", "a decode step of 4 sequences")
        _load_speed(check, case, engine, made)
    finally:
        engine.stop()


def _load_speed(check: Check, case: str, engine: TorchEngine, made: Made) -> None:
    """GB/s of cold loads from host memory, which must not read a file."""
    before = engine.stats().host
    assert before is not None, "the engine was given host_bytes"
    rates = []
    for _ in range(2 if check.dry else 10):
        place(engine, made, present=False)
        for name, seconds in place(engine, made, present=True).items():
            rates.append(before.resident[made.hashes[name]] / seconds / 1e9)
    after = engine.stats().host
    assert after is not None
    missed = (after.lookups - before.lookups) - (after.hits - before.hits)
    check.failed += missed > 0 or after.read_bytes > before.read_bytes
    check.line(case, statistics.median(rates), "GB/s", "cold load from host memory")
    check.line(case, float(missed), "loads", "that read the disk again", 0.0)


def _pinned(check: Check) -> None:
    """The host tier's memory is pinned while it lives."""
    import torch

    from zen_train.serve.engine.host_memory import pinned_memory

    pinned = torch.frombuffer(pinned_memory(1 << 20), dtype=torch.uint8).is_pinned()
    check.failed += not pinned
    check.line("pinned memory", float(not pinned), "failed", "the host tier's allocator", 0.0)
