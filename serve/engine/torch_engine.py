"""`TorchEngine`: one resident base, variants in slots beside it, jobs of all of them in one forward.

This is the composition: model, slots, loader, KV pool, scheduler, forward and step thread, behind
`interface.Engine`. All memory is taken at construction (base, slots, keys and values), so that neither a
long prompt nor a full set of variants can run out of it later (vllm#29049, #15039). Loading happens in
threads of its own, at a lower priority than the steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

from zen_train.delta import Fingerprint
from zen_train.errors import BaseModelError, ConfigError
from zen_train.kernels.common import choose_backend
from zen_train.serve.engine.batch import BatchBuilder
from zen_train.serve.engine.config import EngineConfig
from zen_train.serve.engine.host_memory import make_host_tier
from zen_train.serve.engine.interface import Sink
from zen_train.serve.engine.loop import StepLoop
from zen_train.serve.engine.pages import PagePool
from zen_train.serve.engine.residents import Residents
from zen_train.serve.engine.runner import Runner
from zen_train.serve.engine.scheduler import Scheduler
from zen_train.serve.engine.sequence import Sequence
from zen_train.serve.engine.slots import VariantSlots
from zen_train.serve.engine.variant_loader import VariantLoader
from zen_train.serve.engine.weights import ServedModel, load_model
from zen_train.serve.errors import EngineDeadError
from zen_train.serve.types import EngineLimits, EngineStats, Job

_PARALLEL_LOADS = 4
_LOADER_NICENESS = 10


class TorchEngine:
    """Implements `interface.Engine`."""

    def __init__(self, model: ServedModel, config: EngineConfig) -> None:
        """Take all memory.

        Raises:
            BaseModelError: `kv_bytes` below one page, or `host_bytes` above the memory.
            ConfigError: `kernels` that do not run on this device.
        """
        architecture = model.architecture
        page_bytes = config.page_tokens * architecture.kv_token_values * model.dtype.itemsize
        pages = config.kv_bytes // page_bytes
        if pages < 1:
            raise BaseModelError(
                f"kv_bytes={config.kv_bytes} holds no page; {config.page_tokens} tokens of this base take {page_bytes} "
                "bytes. Raise the budget to that or more."
            )
        try:
            choose_backend(config.kernels, model.blocks.device)
        except ValueError as error:
            raise ConfigError(f"engine.kernels={config.kernels}: {error}") from error
        self._model = model
        self._slots = VariantSlots(model)
        self._host = make_host_tier(config.host_bytes, model.blocks.device)
        self._loader = VariantLoader(model, self._slots, max_planes=config.max_planes, host=self._host)
        self._residents = Residents()
        self._pool = PagePool(pages, config.page_tokens)
        self._scheduler = Scheduler(
            self._pool, max_jobs=config.max_jobs, prefill_chunk_tokens=config.prefill_chunk_tokens
        )
        on_gpu = model.blocks.device.type == "cuda"
        graphs = on_gpu and config.cuda_graphs
        builder = BatchBuilder(
            max_jobs=config.max_jobs,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            max_planes=config.max_planes,
            context_tokens=architecture.context_tokens,
            page_tokens=config.page_tokens,
            device=model.blocks.device,
        )
        runner = Runner(
            model,
            builder,
            pages=pages,
            page_tokens=config.page_tokens,
            graphs=graphs,
            pad=config.pad_decode if config.pad_decode is not None else graphs,
            kernels=config.kernels,
        )
        self._loop = StepLoop(self._scheduler, runner.scores, ended=self._ended, threads=config.threads)
        self._arrivals = count()
        self._load_threads = ThreadPoolExecutor(
            _PARALLEL_LOADS, thread_name_prefix="variant-load", initializer=_lower_priority
        )
        self._limits = EngineLimits(
            context_tokens=architecture.context_tokens,
            max_jobs=config.max_jobs,
            kv_tokens=pages * config.page_tokens,
            variant_bytes=self._slots.total * model.layout.slot_bytes,
            slot_bytes=model.layout.slot_bytes,
        )

    @classmethod
    def from_folder(
        cls, base_folder: Path, config: EngineConfig, *, fingerprint: Fingerprint | None = None
    ) -> TorchEngine:
        """Load a base and build the engine around it.

        Args:
            base_folder: config.json and safetensors.
            config: budgets.
            fingerprint: of that folder, when it is known; saves hashing every tensor.

        Raises:
            BaseModelError: a base that is not served or not whole, or a budget that holds nothing.
        """
        return cls(load_model(base_folder, config, fingerprint=fingerprint), config)

    @property
    def limits(self) -> EngineLimits:
        """What it was built for."""
        return self._limits

    def start(self) -> None:
        """Start the thread; returns when it takes jobs.

        What the process holds by now is exempted from garbage collection: a full collection walks all
        objects of the imported libraries, which stopped every stream for 200 ms in the middle of a load.
        """
        gc.freeze()
        self._loop.start()

    def submit(self, job: Job, sink: Sink) -> None:
        """Queue a job. Raises ValueError or EngineDeadError; no event follows then."""
        self._check(job)
        place = self._residents.accept(job.id, job.variant_hash)
        try:
            self._loop.submit(Sequence.of(job, sink, place, next(self._arrivals)))
        except EngineDeadError:
            self._residents.ended(job.id, job.variant_hash)
            raise

    def cancel(self, job_id: str) -> None:
        """End a job before the next step."""
        self._loop.cancel(job_id)

    def device_bytes(self, folder: Path) -> int:
        """What the artifact in `folder` takes; raises VariantUnusableError when it cannot be served."""
        return self._loader.device_bytes(folder)

    def verify(self, folder: Path) -> None:
        """Check the artifact in `folder` ahead of its first load; raises VariantUnusableError as that would."""
        self._loader.verify(folder)

    async def load(self, content_hash: str, folder: Path) -> None:
        """Place a variant; returns when it can be used, at once when it is there already.

        A caller that is cancelled leaves no variant behind: what its load still brings in is taken out again.

        Raises:
            VariantUnusableError: damaged, vanished, another hash or base, a form that is not served, no free
            slot. ConflictError: another load of it is running.
        """
        if not self._residents.begin_load(content_hash):
            return
        abandoned = threading.Event()
        future = self._load_threads.submit(self._load, content_hash, folder, abandoned)
        try:
            await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            abandoned.set()
            future.add_done_callback(lambda done: self._take_back(content_hash, done))
            raise

    def _load(self, content_hash: str, folder: Path, abandoned: threading.Event) -> None:
        place = None
        try:
            place = self._loader.load(content_hash, folder)
            if abandoned.is_set():
                self._slots.give_back(place)
                place = None
        finally:
            self._residents.end_load(content_hash, place)

    def _take_back(self, content_hash: str, done: Future[None]) -> None:
        """After an abandoned load that was too far to notice: nobody knows of the variant, so it has no
        jobs.
        """
        if done.exception() is None and content_hash in self._residents.planes():
            self._slots.give_back(self._residents.take_out(content_hash))

    async def unload(self, content_hash: str) -> None:
        """Empty and free a variant's slots. Raises ValueError for one that is not loaded or has jobs."""
        place = self._residents.take_out(content_hash)
        self._slots.give_back(place)

    def forget(self, content_hash: str) -> None:
        """Give back the host memory of a variant that is served no longer: soon, since unpinning takes a while."""
        with contextlib.suppress(RuntimeError):  # stopped: everything goes anyway
            self._load_threads.submit(self._loader.forget, content_hash)

    def stats(self) -> EngineStats:
        """A snapshot."""
        loop, slot_bytes = self._loop, self._limits.slot_bytes
        return EngineStats(
            alive=loop.alive,
            heartbeat_age_s=time.monotonic() - loop.heartbeat_s,
            running_jobs=len(self._scheduler.running),
            waiting_jobs=len(self._scheduler.waiting),
            kv_tokens_used=(self._pool.total - self._pool.free) * self._pool.page_tokens,
            resident={name: planes * slot_bytes for name, planes in self._residents.planes().items()},
            steps=loop.steps,
            tokens_generated=loop.tokens_generated,
            preemptions=self._scheduler.preemptions,
            death=loop.death,
            host=self._host.stats() if self._host else None,
        )

    def stop(self) -> None:
        """End the thread after the current step, and the load threads. Idempotent."""
        gc.unfreeze()
        self._loop.stop()
        self._load_threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, sequence: Sequence) -> None:
        self._residents.ended(sequence.job.id, sequence.job.variant_hash)

    def _check(self, job: Job) -> None:
        """Refuse what could never be computed, so that no step fails of it. Raises ValueError."""
        limits, words = self._limits, self._model.architecture.vocabulary
        if not job.prompt_tokens or job.max_tokens < 1:
            raise ValueError(
                f"job {job.id}: {len(job.prompt_tokens)} prompt tokens, max_tokens={job.max_tokens}; "
                "needed: at least 1 each"
            )
        most = min(limits.context_tokens, limits.kv_tokens)
        if len(job.prompt_tokens) + job.max_tokens > most:
            raise ValueError(
                f"job {job.id}: {len(job.prompt_tokens)} prompt tokens and max_tokens={job.max_tokens} are more than "
                f"{most} together (context {limits.context_tokens}, room for keys and values {limits.kv_tokens})"
            )
        for what, tokens in (
            ("prompt token", job.prompt_tokens),
            ("logit_bias for token", job.sampling.logit_bias),
        ):
            if wrong := [
                token for token in (min(tokens, default=0), max(tokens, default=0)) if not 0 <= token < words
            ]:
                raise ValueError(f"job {job.id}: {what} {wrong[0]}; allowed: 0 to {words - 1}")


def _lower_priority() -> None:
    """Let the steps go first: on Linux niceness belongs to a thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOADER_NICENESS)
