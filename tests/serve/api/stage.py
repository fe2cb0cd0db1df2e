"""A server for tests of the API: real HTTP, real router, real tokenizer; an engine that answers what the test says.

`ScriptEngine` keeps the contract of `serve/engine/interface.py` with a thread of its own, as the torch
engine does. Its answers are a function of the job, so a test can have it say an emoji byte by byte, or
nothing until a gate opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai

from zen_train.serve.api.app import create_app
from zen_train.serve.api.connection import ConnectionLimits
from zen_train.serve.api.history import History
from zen_train.serve.api.http_server import DrainingServer, address, listen
from zen_train.serve.api.keys import Keys
from zen_train.serve.api.metrics import Metrics
from zen_train.serve.api.plan import Bounds
from zen_train.serve.api.services import BaseFacts, RequestLimits, Services
from zen_train.serve.api.text import TextModels
from zen_train.serve.engine.interface import Sink
from zen_train.serve.errors import BadRequestError, EngineDeadError, UnknownModelError, VariantUnusableError
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.router import Router
from zen_train.serve.store import Broken
from zen_train.serve.types import EngineLimits, EngineStats, HostStats, Job, TokenEvent, TokenLogprob, Variant
from zen_train.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
SLOT_BYTES = 1000


def tokens(text: str) -> list[int]:
    return TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids


def said_by(job: Job) -> str:
    """The default answer: whose weights, and the end of what was asked."""
    asked = TOKENIZER.backend_tokenizer.decode(list(job.prompt_tokens), skip_special_tokens=True)
    return f"{job.variant_hash or 'base'} heard {asked[-12:].strip()}"


@dataclass
class ScriptEngine:
    """Answers `reply(job)`, then the end token; one token a step for every job."""

    reply: Callable[[Job], str | list[int]] = said_by
    slots: int = 4
    max_jobs: int = 16
    context_tokens: int = 512
    step_s: float = 0.0005
    go: threading.Event = field(default_factory=threading.Event)
    """Cleared: no step begins."""
    may_load: threading.Event = field(default_factory=threading.Event)
    """Cleared: loads wait."""
    host: HostStats | None = None
    """What it says of its host tier."""
    broken: set[str] = field(default_factory=set)
    loads: list[str] = field(default_factory=list)
    jobs_seen: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.go.set()
        self.may_load.set()
        self.jobs: dict[str, tuple[Job, Sink, list[int], int]] = {}
        self.cancelled: list[str] = []
        self.resident: dict[str, int] = {}
        self.death: str | None = None
        self.generated = self.steps = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._beat_s = time.monotonic()
        self._thread: threading.Thread | None = None

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            context_tokens=self.context_tokens,
            max_jobs=self.max_jobs,
            kv_tokens=100_000,
            variant_bytes=self.slots * SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
        )

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self.go.set()
        if self._thread is not None:
            self._thread.join(5)

    def submit(self, job: Job, sink: Sink) -> None:
        if self.death:
            raise EngineDeadError(self.death)
        assert job.variant_hash is None or job.variant_hash in self.resident
        answer = self.reply(job)
        planned = tokens(answer) if isinstance(answer, str) else list(answer)
        with self._lock:
            self.jobs_seen.append(job)
            self.jobs[job.id] = (job, sink, planned, 0)

    def cancel(self, job_id: str) -> None:
        with self._lock:
            taken = self.jobs.pop(job_id, None)
            if taken:
                self.cancelled.append(job_id)
        if taken:
            taken[1](TokenEvent(job_id=job_id, token=None, finish="cancelled"))

    def device_bytes(self, folder: Path) -> int:
        if not folder.is_dir():
            raise VariantUnusableError(f"{folder.name} is gone; export it again")
        return SLOT_BYTES

    async def load(self, content_hash: str, folder: Path) -> None:
        self.loads.append(content_hash)
        self.device_bytes(folder)
        await asyncio.to_thread(self.may_load.wait, 60)
        if content_hash in self.broken:
            raise VariantUnusableError(
                f"{folder.name}: the digest of model.norm does not match; export it again"
            )
        self.resident[content_hash] = SLOT_BYTES

    async def unload(self, content_hash: str) -> None:
        await asyncio.sleep(0)
        del self.resident[content_hash]

    def forget(self, content_hash: str) -> None:
        pass

    def stats(self) -> EngineStats:
        with self._lock:
            running = len(self.jobs)
        return EngineStats(
            alive=self.death is None,
            heartbeat_age_s=time.monotonic() - self._beat_s,
            running_jobs=running,
            waiting_jobs=0,
            kv_tokens_used=0,
            resident=dict(self.resident),
            steps=self.steps,
            tokens_generated=self.generated,
            preemptions=0,
            death=self.death,
            host=self.host,
        )

    def die(self, why: str) -> None:
        self.death = why
        with self._lock:
            jobs, self.jobs = self.jobs, {}
        for job_id, (_, sink, _, _) in jobs.items():
            sink(TokenEvent(job_id=job_id, token=None, finish="error", error=EngineDeadError(why)))

    def _run(self) -> None:
        while not self._ended.is_set() and self.death is None:
            if not self.go.is_set():
                self.go.wait(0.05)  # ended or let go; the heartbeat grows old meanwhile
                continue
            self._beat_s = time.monotonic()
            self._step()
            self._ended.wait(self.step_s)

    def _step(self) -> None:
        self.steps += 1
        events = []
        with self._lock:
            for job_id, (job, sink, planned, done) in list(self.jobs.items()):
                event = self._event(job, planned, done)
                self.generated += 1
                if event.finish:
                    del self.jobs[job_id]
                else:
                    self.jobs[job_id] = (job, sink, planned, done + 1)
                events.append((sink, event))
        for sink, event in events:
            sink(event)

    def _event(self, job: Job, planned: list[int], done: int) -> TokenEvent:
        ends = done >= len(planned) and END in job.stop_tokens and done >= job.min_tokens
        token = END if ends else planned[done % len(planned)]
        finish = "stop" if token in job.stop_tokens and done >= job.min_tokens else None
        if finish is None and done + 1 == job.max_tokens:
            finish = "length"
        if job.sampling.logprobs is None:
            return TokenEvent(job_id=job.id, token=token, finish=finish)
        top = tuple(
            TokenLogprob(other, -float(rank))
            for rank, other in enumerate([token, 65, 66][: job.sampling.logprobs])
        )
        return TokenEvent(job_id=job.id, token=token, finish=finish, logprob=-0.5, top=top)


class FolderCatalogue:
    """Variants by hand: every one in a folder with the tiny tokenizer."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root = root
        self.broken: tuple[Broken, ...] = ()
        self._variants: dict[str, Variant] = {}
        for name in names:
            self.make(name)

    @property
    def variants(self) -> dict[str, Variant]:
        return dict(self._variants)

    def get(self, name: str) -> Variant:
        if name not in self._variants:
            raise UnknownModelError(f"model {name[:99]!r} is not served", param="model")
        return self._variants[name]

    def folder(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        TOKENIZER.save_pretrained(folder)
        return folder

    def make(self, name: str, content_hash: str | None = None) -> Variant:
        variant = Variant(
            name=name,
            content_hash=content_hash or f"hash-of-{name}",
            folder=self.folder(name),
            size_bytes=SLOT_BYTES,
            created_unix_s=1_700_000_000,
        )
        self._variants[name] = variant
        return variant

    def rescan(self) -> None:
        pass

    def add(self, name: str, path: Path) -> Variant:
        folder = (self.root / path).resolve()
        if not folder.is_relative_to(self.root.resolve()) or not folder.is_dir():
            raise BadRequestError(f"no artifact at {path}", param="lora_path")
        number = sum(other.name == name for other in self._variants.values())
        self._variants[name] = dataclasses.replace(self.make(name, f"hash-{number}-of-{name}"), folder=folder)
        return self._variants[name]

    def remove(self, name: str) -> None:
        del self._variants[name]


@dataclass
class Stage:
    """A running server."""

    url: str
    engine: ScriptEngine
    catalogue: FolderCatalogue
    services: Services
    server: DrainingServer
    _http: httpx.Client | None = None

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, http_client=self.http())

    def http(self) -> httpx.Client:
        """Shared: making one takes longer than most requests. It reads no proxy settings and no certificates."""
        if self._http is None:
            limits = httpx.Limits(max_connections=100)
            self._http = httpx.Client(
                base_url=self.url, timeout=60, trust_env=False, verify=False, limits=limits
            )
        return self._http

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that another thread does."""
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s, f"never: {what}"
            time.sleep(0.002)


@contextlib.contextmanager
def serving(
    folder: Path,
    *,
    engine: ScriptEngine | None = None,
    names: tuple[str, ...] = ("zen4-coder", "zen4-math"),
    api_keys: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    router: RouterConfig | None = None,
    limits: dict | None = None,
    connection: dict | None = None,
    drain_s: float = 30.0,
) -> Iterator[Stage]:
    """A server on a free port of this machine until the block ends."""
    engine = engine or ScriptEngine()
    catalogue = FolderCatalogue(folder / "variants", list(names))
    base_folder = folder / "base"
    base_folder.mkdir(exist_ok=True)
    TOKENIZER.save_pretrained(base_folder)
    metrics = Metrics()
    config = router or RouterConfig(watch_interval_s=0.05)
    routing = Router(engine, catalogue, config, base_name="tiny", metrics=metrics)
    context = min(engine.limits.context_tokens, engine.limits.kv_tokens)
    services = Services(
        base=BaseFacts(
            name="tiny", folder=base_folder, fingerprint="ba5e" * 16, created_unix_s=1_600_000_000
        ),
        engine=engine,
        catalogue=catalogue,
        router=routing,
        texts=TextModels(),
        metrics=metrics,
        history=History(routing.snapshot, engine.stats),
        keys=Keys(api_keys, admin_keys),
        bounds=Bounds(
            context_tokens=context,
            max_prompt_tokens=context,
            max_output_tokens=context,
            max_choices=8,
        ),
        limits=RequestLimits(
            **{"max_body_bytes": 200_000, "body_timeout_s": 30.0, "max_requests": 200} | (limits or {})
        ),
    )
    forced: list[bool] = []
    listener = listen("127.0.0.1", 0)
    url = address(listener)
    started = threading.Event()
    wanted = {
        "max_header_bytes": 16_384,
        "max_connections": 200,
        "header_timeout_s": 5.0,
        "write_timeout_s": 5.0,
    }
    server = DrainingServer(
        create_app(services),
        limits=ConnectionLimits(**wanted | (connection or {})),
        keep_alive_s=5,
        on_started=started.set,
        drain=lambda: routing.drain(drain_s),
        end_at_once=lambda: forced.append(True),
    )
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except BaseException as error:
            failures.append(error)
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    if failures:
        raise failures[0]
    stage = Stage(url, engine, catalogue, services, server)
    try:
        yield stage
        if engine.death is None:
            routing.check()
    finally:
        engine.go.set()
        engine.may_load.set()
        if stage._http is not None:
            stage._http.close()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        assert not failures, failures
