"""A small engine that keeps the contract of `serve/engine/interface.py` and makes tokens by arithmetic.

The token at position i of a job depends on the variant's hash, the prompt and i, so that an answer by the
wrong weights is visible. A step takes `step_s` of loop time and gives every running job one token; loading
takes `load_s`, or waits for a gate that the test opens. Every breach of the contract by the caller is raised
and kept in `breaches`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from zen_train.serve.engine.interface import Sink
from zen_train.serve.errors import EngineDeadError, VariantUnusableError
from zen_train.serve.types import EngineLimits, EngineStats, HostStats, Job, TokenEvent

SLOT_BYTES = 100


def expected_tokens(content_hash: str | None, prompt: tuple[int, ...], count: int) -> list[int]:
    """What the engine answers."""
    seed = zlib.crc32(repr((content_hash, prompt)).encode())
    return [(seed + 7919 * i) % 50_000 for i in range(count)]


@dataclass
class Disk:
    """What lies in each folder; the catalogue of the tests writes it."""

    hash_in: dict[Path, str] = field(default_factory=dict)
    size_of: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """Hashes whose payload turns out damaged while it is loaded."""


class ModelEngine:
    """Deterministic; everything happens on the event loop."""

    def __init__(
        self,
        disk: Disk,
        *,
        slots: int = 4,
        max_jobs: int = 4,
        kv_tokens: int = 10_000,
        context_tokens: int = 1_000,
        step_s: float = 0.01,
        load_s: float = 0.1,
        host_bytes: int = 0,
    ) -> None:
        self._limits = EngineLimits(
            context_tokens=context_tokens,
            max_jobs=max_jobs,
            kv_tokens=kv_tokens,
            variant_bytes=slots * SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
        )
        self.disk = disk
        self.step_s = step_s
        self.load_s = load_s
        self.gates: dict[str, asyncio.Event] = {}
        """Loads of these hashes end only when the event is set."""
        self.resident: dict[str, int] = {}
        self.host_bytes = host_bytes
        self.host: dict[str, int] = {}
        """What was loaded and not forgotten; nothing else makes room there."""
        self.loading: dict[str, int] = {}
        self.jobs: dict[str, tuple[Job, Sink, int]] = {}
        self.cancelled: set[str] = set()
        self.breaches: list[str] = []
        self.loads: list[str] = []
        """Hashes in the order in which their loads began."""
        self.unloads: list[str] = []
        self.starts: list[tuple[float, str | None, str]] = []
        """(time, hash, job id) of every submit."""
        self.most_jobs = 0
        self.most_bytes = 0
        self.most_loading = 0
        self.read_of: Counter[str] = Counter()
        self.fault: Exception | None = None
        """What the next loads raise."""
        self.refuse = False
        """Refuse jobs as an engine does whose limits are tighter than it said."""
        self.dead: str | None = None
        self.hung = False
        self.steps = 0
        self.tokens = 0
        self._beat_s = 0.0
        self._handle: asyncio.TimerHandle | None = None

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def start(self) -> None:
        self._beat_s = asyncio.get_running_loop().time()

    def submit(self, job: Job, sink: Sink) -> None:
        if self.dead:
            raise EngineDeadError(self.dead)
        if self.refuse:
            raise ValueError(f"job {job.id} is refused")
        if job.variant_hash is not None and job.variant_hash not in self.resident:
            self._breach(f"submit of {job.id}: {job.variant_hash} is not loaded")
        if len(job.prompt_tokens) + job.max_tokens > self._limits.context_tokens:
            self._breach(f"submit of {job.id}: too long")
        assert job.id not in self.jobs
        self.jobs[job.id] = (job, sink, 0)
        self.starts.append((asyncio.get_running_loop().time(), job.variant_hash, job.id))
        self.most_jobs = max(self.most_jobs, len(self.jobs))
        if len(self.jobs) > self._limits.max_jobs:
            self._breach(f"{len(self.jobs)} jobs, {self._limits.max_jobs} allowed")
        self._schedule()

    def cancel(self, job_id: str) -> None:
        if job_id in self.jobs:
            self.cancelled.add(job_id)
            self._schedule()

    def device_bytes(self, folder: Path) -> int:
        content_hash = self.disk.hash_in.get(folder)
        if content_hash is None:
            raise VariantUnusableError(f"{folder} holds no artifact any more; export it again")
        return self.disk.size_of.get(content_hash, SLOT_BYTES)

    async def load(self, content_hash: str, folder: Path) -> None:
        if self.dead:
            raise EngineDeadError(self.dead)
        if content_hash in self.resident or content_hash in self.loading:
            self._breach(f"load of {content_hash}: there already")
        size = self.disk.size_of.get(content_hash, SLOT_BYTES)
        self.loads.append(content_hash)
        self.loading[content_hash] = size
        self.most_loading = max(self.most_loading, len(self.loading))
        used = sum(self.resident.values()) + sum(self.loading.values())
        self.most_bytes = max(self.most_bytes, used)
        try:
            if used > self._limits.variant_bytes:
                self._breach(f"load of {content_hash}: {used} bytes, {self._limits.variant_bytes} allowed")
            if self.disk.hash_in.get(folder) != content_hash:
                raise VariantUnusableError(
                    f"{folder} does not hold {content_hash} any more; send the request again"
                )
            self.read_of[content_hash] += 1
            if content_hash in self.gates:
                await self.gates[content_hash].wait()
            else:
                await asyncio.sleep(self.load_s)
            if self.dead:
                raise EngineDeadError(self.dead)
            if self.fault is not None:
                raise self.fault
            if content_hash in self.disk.broken:
                raise VariantUnusableError(
                    f"{folder}: the digest of model.norm does not match; export it again"
                )
            self.resident[content_hash] = size
            if self.host_bytes:
                self.host[content_hash] = size
        finally:
            del self.loading[content_hash]

    async def unload(self, content_hash: str) -> None:
        if any(job.variant_hash == content_hash for job, _, _ in self.jobs.values()):
            self._breach(f"unload of {content_hash}: in use")
        if content_hash not in self.resident:
            self._breach(f"unload of {content_hash}: not there")
        await asyncio.sleep(0)
        self.resident.pop(content_hash)
        self.unloads.append(content_hash)

    def forget(self, content_hash: str) -> None:
        if content_hash in self.resident or content_hash in self.loading:
            self._breach(f"forget of {content_hash}: it is on the device")
        self.host.pop(content_hash, None)

    def stats(self) -> EngineStats:
        return EngineStats(
            alive=self.dead is None,
            heartbeat_age_s=asyncio.get_running_loop().time() - self._beat_s,
            running_jobs=len(self.jobs),
            waiting_jobs=0,
            kv_tokens_used=sum(len(job.prompt_tokens) + done for job, _, done in self.jobs.values()),
            resident=dict(self.resident),
            steps=self.steps,
            tokens_generated=self.tokens,
            preemptions=0,
            death=self.dead,
            host=self._host_stats() if self.host_bytes else None,
        )

    def _host_stats(self) -> HostStats:
        return HostStats(
            budget_bytes=self.host_bytes, resident=dict(self.host), hits=0, lookups=0, read_bytes=0
        )

    def stop(self) -> None:
        self._end_all("cancelled", None)
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def die(self, why: str, *, silently: bool = False) -> None:
        """What a raising step does; `silently`: a thread that vanishes and tells nobody."""
        self.dead = why
        if not silently:
            self._end_all("error", EngineDeadError(why))

    def fail_job(self, job_id: str, error: Exception) -> None:
        """What a step does for a job whose logits are not finite."""
        _, sink, _ = self.jobs.pop(job_id)
        sink(TokenEvent(job_id=job_id, token=None, finish="error", error=error))

    def hang(self) -> None:
        """No step ends any more."""
        self.hung = True

    def _breach(self, text: str) -> None:
        self.breaches.append(text)
        raise ValueError(text)

    def _schedule(self) -> None:
        if self._handle is None and self.jobs and not self.dead:
            self._handle = asyncio.get_running_loop().call_later(self.step_s, self._step)

    def _step(self) -> None:
        self._handle = None
        if self.hung or self.dead:
            return
        self._beat_s = asyncio.get_running_loop().time()
        self.steps += 1
        for job_id, (job, sink, done) in list(self.jobs.items()):
            if job_id in self.cancelled:
                self.cancelled.discard(job_id)
                del self.jobs[job_id]
                sink(TokenEvent(job_id=job_id, token=None, finish="cancelled"))
                continue
            token = expected_tokens(job.variant_hash, job.prompt_tokens, done + 1)[done]
            self.tokens += 1
            last = done + 1 == job.max_tokens
            if last:
                del self.jobs[job_id]
            else:
                self.jobs[job_id] = (job, sink, done + 1)
            sink(TokenEvent(job_id=job_id, token=token, finish="length" if last else None))
        self._schedule()

    def _end_all(self, finish, error) -> None:
        jobs, self.jobs = self.jobs, {}
        for job_id, (_, sink, _) in jobs.items():
            sink(TokenEvent(job_id=job_id, token=None, finish=finish, error=error))
