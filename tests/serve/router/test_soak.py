"""Random traffic, cancels, deadlines, faults and changes at once: nothing is lost, mixed or leaked."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import Counter, deque

import pytest

from tests.serve.router.model_engine import SLOT_BYTES, Disk, ModelEngine, expected_tokens
from tests.serve.router.virtual_time import run, virtual
from tests.serve.router.world import MemoryCatalogue, World, outcome, turns
from zen_train.serve.errors import (
    DeadlineError,
    OverloadedError,
    ServeError,
    UnknownModelError,
    VariantUnusableError,
)
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.request import RoutedRequest
from zen_train.serve.router.router import Router
from zen_train.serve.types import Job, TokenEvent

NAMES = [f"v{i}" for i in range(16)]


class Storm:
    """One run: what is done next is thrown by dice."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world = world
        self.dice = dice
        self.readers: set[asyncio.Task] = set()
        self.managers: set[asyncio.Task] = set()
        self.results: Counter = Counter()
        self.versions = dict.fromkeys(NAMES, 0)
        self.longest_s = 0.0

    async def request(self) -> None:
        name = self.dice.choice([*NAMES[:4]] * 4 + NAMES + ["base"])
        fields = {}
        if self.dice.random() < 0.05:
            fields["total_deadline_s"] = self.dice.uniform(0.01, 3.0)
        try:
            ticket = await self.world.submit(name, tokens=self.dice.randint(1, 60), **fields)
        except ServeError as refused:
            self.results["refused " + type(refused).__name__] += 1
            return
        task = asyncio.create_task(self.read(ticket))
        self.readers.add(task)
        task.add_done_callback(self.readers.discard)
        if self.dice.random() < 0.15:
            asyncio.get_running_loop().call_later(self.dice.expovariate(2.0), ticket.cancel)

    async def read(self, ticket) -> None:
        result = await outcome(ticket)
        if isinstance(result, Exception):
            assert isinstance(
                result, (DeadlineError, UnknownModelError, VariantUnusableError, OverloadedError)
            ), result
            self.results[type(result).__name__] += 1
        else:
            self.results[result.finish] += 1
            if ticket.first_token_s is not None:
                self.longest_s = max(self.longest_s, ticket.first_token_s)

    async def manage(self) -> None:
        name, world = self.dice.choice(NAMES), self.world
        what = self.dice.choice(
            ["replace", "reload", "unload", "load", "pin", "unpin", "break", "mend", "vanish"]
        )
        if what in ("replace", "reload", "load"):
            self.versions[name] += what != "load"
            content_hash = f"hash-{name}-{self.versions[name]}"
            size_bytes = SLOT_BYTES * self.dice.choice([1, 1, 1, 2])
            size_bytes = world.disk.size_of.get(content_hash, size_bytes)
            folder = self.dice.choice([f"/variants/{name}", f"/variants/{content_hash}"])
            path = world.catalogue.write(name, content_hash, size_bytes=size_bytes, folder=folder)
            work = (
                world.router.refresh() if what == "replace" else world.router.load(name, path, inplace=True)
            )
        elif what == "unload":
            work = world.router.unload(name)
        elif what in ("pin", "unpin"):
            work = getattr(world.router, what)(name if what == "unpin" else self.dice.choice(NAMES[:2]))
        else:
            if what == "break" and name in world.catalogue.variants:
                world.disk.broken.add(world.catalogue.variants[name].content_hash)
            elif what == "mend":
                world.disk.broken.clear()
            elif name in world.catalogue.variants:
                world.disk.hash_in.pop(world.catalogue.variants[name].folder, None)
            return
        task = asyncio.create_task(self.expect(work))
        self.managers.add(task)
        task.add_done_callback(self.managers.discard)

    async def expect(self, work) -> None:
        try:
            await work
        except ServeError as error:
            self.results["manager " + type(error).__name__] += 1


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_loses_no_request_mixes_no_weights_and_leaves_nothing(seed):
    @virtual
    async def test():
        dice = random.Random(seed)
        config = {
            "starvation_s": 1.0,
            "unload_grace_s": 2.0,
            "max_queue_per_variant": 12,
            "max_queue_total": 60,
            "cache": {"minimum_residency_s": 0.3},
        }
        async with World(
            " ".join(NAMES), config=config, slots=8, max_jobs=8, load_s=0.05, kv_tokens=600
        ) as world:
            storm = Storm(world, dice)
            for _ in range(800):
                if dice.random() < 0.04:
                    await storm.manage()
                else:
                    await storm.request()
                await asyncio.sleep(dice.expovariate(25.0))
                world.check()
                for name in NAMES[:2]:
                    if name in world.catalogue.variants and world.view(name).pinned and dice.random() < 0.02:
                        await world.router.unpin(name)
            await asyncio.wait(storm.readers | storm.managers, timeout=60.0)
            await turns()
            assert not storm.readers, storm.readers
            assert not storm.managers, storm.managers
            assert world.engine.most_bytes <= 800
            assert storm.results["length"] > 350, storm.results
            # The bound of a slot: half of starvation_s and the longest job (0.6 s), a load, then a place.
            assert storm.longest_s < 4.0, storm.longest_s
            state = world.router.snapshot()
            assert (state.queued, state.running, state.retiring, state.kv_tokens_claimed) == (0, 0, 0, 0)
            assert world.engine.resident.keys() <= {v.content_hash for v in world.catalogue.variants.values()}

    test()


@virtual
async def test_nothing_accumulates_over_many_requests_and_replacements():
    async with World("a", slots=2) as world:

        async def some(count: int) -> None:
            for i in range(count):
                world.catalogue.write("a", f"hash-{i % 7}", folder=f"/variants/{i % 7}")
                await world.router.refresh()
                ticket = await world.submit("a", tokens=2)
                (await world.submit("base", tokens=500)).cancel()
                await outcome(ticket)
            await asyncio.sleep(5.0)
            world.engine.starts.clear()
            world.engine.loads.clear()
            world.engine.unloads.clear()
            world.metrics.calls.clear()

        await some(50)
        gc.collect()
        before = len(gc.get_objects())
        await some(300)
        gc.collect()
        # The windows of recent latencies grow to their bound: 1024 pairs a name.
        assert len(gc.get_objects()) - before < 1500
        assert len(world.router._core.lanes) == 2


class ThreadEngine(ModelEngine):
    """The same tokens from a real thread that steps as fast as it can."""

    def __init__(self, disk: Disk, **fields) -> None:
        super().__init__(disk, **fields)
        self.wake = threading.Condition()
        self.inbox: deque[tuple[Job, object]] = deque()
        self.gone: set[str] = set()
        self.stopped = False
        self.thread = threading.Thread(target=self.work)

    def start(self) -> None:
        self.thread.start()

    def submit(self, job, sink) -> None:
        with self.wake:
            assert job.variant_hash is None or job.variant_hash in self.resident
            self.inbox.append((job, sink))
            self.wake.notify()

    def cancel(self, job_id) -> None:
        with self.wake:
            self.gone.add(job_id)
            self.wake.notify()

    def stats(self):
        return super().stats()

    def stop(self) -> None:
        with self.wake:
            self.stopped = True
            self.wake.notify()
        self.thread.join()

    def work(self) -> None:
        jobs: dict[str, list] = {}
        while True:
            with self.wake:
                while not (self.inbox or jobs or self.stopped):
                    self.wake.wait()
                if self.stopped:
                    return
                for job, sink in self.inbox:
                    tokens = expected_tokens(job.variant_hash, job.prompt_tokens, job.max_tokens)
                    jobs[job.id] = [sink, deque(tokens)]
                self.inbox.clear()
                gone, self.gone = self.gone, set()
            for job_id in gone & jobs.keys():
                jobs.pop(job_id)[0](TokenEvent(job_id=job_id, token=None, finish="cancelled"))
            for job_id, (sink, tokens) in list(jobs.items()):
                token = tokens.popleft()
                if not tokens:
                    del jobs[job_id]
                sink(TokenEvent(job_id=job_id, token=token, finish=None if tokens else "length"))


def test_an_engine_in_a_thread_of_its_own_loses_no_event():
    async def test():
        disk = Disk()
        catalogue = MemoryCatalogue(disk)
        for name in NAMES:
            catalogue.write(name, f"hash-{name}")
        catalogue.rescan()
        engine = ThreadEngine(disk, slots=6, max_jobs=14, load_s=0.001)
        router = Router(
            engine, catalogue, RouterConfig(starvation_s=0.1, cache={"minimum_residency_s": 0.01})
        )
        engine.start()
        await router.start()
        dice = random.Random(1)

        async def client(i: int) -> int:
            done = 0
            for j in range(12):
                name = dice.choice([*NAMES, "base"])
                request = RoutedRequest(
                    id=f"{i}-{j}", model=name, prompt_tokens=(i, j), max_tokens=dice.randint(1, 60)
                )
                ticket = await router.submit(request)
                if dice.random() < 0.2:
                    await ticket.batch()
                    ticket.cancel()
                    continue
                result = await outcome(ticket)
                assert len(result.tokens) == request.max_tokens
                done += 1
            return done

        done = await asyncio.gather(*(client(i) for i in range(24)))
        assert sum(done) > 150
        assert await router.drain(10.0) == 0
        router.check()
        await router.stop()
        engine.stop()

    run(test(), loop_factory=asyncio.SelectorEventLoop)
