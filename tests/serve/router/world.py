"""A router with everything around it, in virtual time: disk, catalogue, engine, and readers of answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from tests.serve.router.model_engine import SLOT_BYTES, Disk, ModelEngine, expected_tokens
from zen_train.serve.errors import UnknownModelError, VariantUnusableError
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.request import RoutedRequest
from zen_train.serve.router.router import Router
from zen_train.serve.router.ticket import Ticket
from zen_train.serve.types import TokenEvent, Variant


async def inline(function, /, *args):
    """In place of a thread: virtual time has only one."""
    await asyncio.sleep(0)
    return function(*args)


class MemoryCatalogue:
    """Folders that are entries of a dictionary."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.variants: dict[str, Variant] = {}
        self.next: dict[str, Variant] = {}
        """What a rescan finds."""
        self.refused: dict[str, str] = {}
        """Name -> why it is not served."""

    def write(
        self, name: str, content_hash: str, *, size_bytes: int = SLOT_BYTES, folder: str | None = None
    ) -> Path:
        """Export an artifact; served after the next rescan."""
        path = Path(folder or f"/variants/{name}")
        self.disk.hash_in[path] = content_hash
        self.disk.size_of[content_hash] = size_bytes
        self.next[name] = _variant(name, content_hash, path, size_bytes)
        return path

    def get(self, name: str) -> Variant:
        if name in self.refused:
            raise VariantUnusableError(self.refused[name])
        if name not in self.variants:
            raise UnknownModelError(f"{name[:100]} is not in the catalogue")
        return self.variants[name]

    def rescan(self) -> None:
        self.variants = dict(self.next)

    def add(self, name: str, path: Path) -> Variant:
        content_hash = self.disk.hash_in[path]
        variant = _variant(name, content_hash, path, self.disk.size_of[content_hash])
        self.variants = {**self.variants, name: variant}
        self.next[name] = variant
        return variant

    def remove(self, name: str) -> None:
        if name not in self.variants:
            raise UnknownModelError(name)
        self.variants = {key: value for key, value in self.variants.items() if key != name}
        self.next.pop(name, None)


def _variant(name: str, content_hash: str, path: Path, size_bytes: int) -> Variant:
    return Variant(name=name, content_hash=content_hash, folder=path, size_bytes=size_bytes, created_unix_s=0)


class Counting:
    """A `RouterMetrics` that keeps everything."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def lookup(self, variant, *, hit):
        self.calls.append(("lookup", variant, hit))

    def load(self, variant, *, seconds, size_bytes, ok):
        self.calls.append(("load", variant, seconds, size_bytes, ok))

    def eviction(self, variant):
        self.calls.append(("eviction", variant))

    def first_token(self, variant, *, queued_s, load_s, total_s):
        self.calls.append(("first_token", variant, queued_s, load_s, total_s))

    def end(self, variant, *, outcome, output_tokens, total_s):
        self.calls.append(("end", variant, outcome, output_tokens))

    def count(self, kind: str) -> Counter:
        return Counter(call[1:3] for call in self.calls if call[0] == kind)


class World:
    """`names` are served from the start; variant "a" has the hash "hash-a"."""

    def __init__(
        self, names: str = "", *, sizes: dict[str, int] | None = None, config: dict | None = None, **engine
    ) -> None:
        self.disk = Disk()
        self.catalogue = MemoryCatalogue(self.disk)
        for name in names.split():
            size_bytes = (sizes or {}).get(name, SLOT_BYTES)
            self.catalogue.write(name, f"hash-{name}", size_bytes=size_bytes)
        self.catalogue.rescan()
        self.engine = ModelEngine(self.disk, **engine)
        self.metrics = Counting()
        loop = asyncio.get_running_loop()
        self.router = Router(
            self.engine,
            self.catalogue,
            RouterConfig.model_validate(config or {}),
            clock=loop.time,
            metrics=self.metrics,
            in_thread=inline,
        )
        self._requests = 0

    async def __aenter__(self) -> World:
        self.engine.start()
        await self.router.start()
        return self

    async def __aexit__(self, kind, *_exc) -> None:
        if kind is None:
            self.check()
            if self.engine.dead is None and not self.engine.hung:
                await self.router.drain(1000.0)
                self.check()
        await self.router.stop(timeout_s=1000.0)
        self.engine.stop()
        if kind is None:
            assert self.engine.breaches == []

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def check(self) -> None:
        self.router.check()

    def request(
        self, model: str, *, tokens: int = 4, prompt: tuple[int, ...] | None = None, **fields
    ) -> RoutedRequest:
        """Each has a prompt of its own unless one is given."""
        self._requests += 1
        return RoutedRequest(
            id=f"r{self._requests}",
            model=model,
            prompt_tokens=prompt or (self._requests,),
            max_tokens=tokens,
            **fields,
        )

    async def submit(self, model: str, **fields) -> Ticket:
        return await self.router.submit(self.request(model, **fields))

    async def ask(self, model: str, **fields) -> Answer:
        """The whole answer; fails unless it is what the variant's weights say."""
        return await read(await self.submit(model, **fields))

    def view(self, name: str):
        return next(view for view in self.router.snapshot().variants if view.name == name)


class Answer:
    """What a ticket gave."""

    def __init__(self, ticket: Ticket, events: list[TokenEvent], at_s: float) -> None:
        self.ticket = ticket
        self.events = events
        self.tokens = [event.token for event in events if event.token is not None]
        self.finish = events[-1].finish
        self.ended_s = at_s


async def read(ticket: Ticket) -> Answer:
    events = [event async for event in ticket]
    content_hash = None if ticket.variant is None else ticket.variant.content_hash
    tokens = [event.token for event in events if event.token is not None]
    assert tokens == expected_tokens(content_hash, ticket.request.prompt_tokens, len(tokens)), "wrong weights"
    if events[-1].finish == "length":
        assert len(tokens) == ticket.request.max_tokens
    return Answer(ticket, events, asyncio.get_running_loop().time())


async def read_all(tickets: list[Ticket]) -> list[Answer]:
    return await asyncio.gather(*(read(ticket) for ticket in tickets))


async def outcome(ticket: Ticket) -> Answer | Exception:
    """The answer, or what was raised."""
    try:
        return await read(ticket)
    except Exception as error:
        return error


async def turns(count: int = 5) -> None:
    """Let what is ready run; no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)
