"""An engine that dies, hangs, or stops, and a server that shuts down: every ticket ends."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve.router.virtual_time import virtual
from tests.serve.router.world import World, outcome, read, read_all, turns
from zen_train.serve.errors import EngineDeadError, OverloadedError


async def tickets_everywhere(world: World):
    """Running, queued, and waiting for a load."""
    await world.ask("a")
    running = [await world.submit("a", tokens=900) for _ in range(2)]
    await asyncio.sleep(0.1)
    queued = [await world.submit("base", tokens=900) for _ in range(4)]
    loading = [await world.submit("b") for _ in range(2)]
    await asyncio.sleep(0.1)
    return [*running, *queued, *loading]


@pytest.mark.parametrize("how", ["loudly", "silently", "hang"])
def test_an_engine_that_dies_or_hangs_ends_every_ticket_within_seconds(how):
    """vllm#39863, #36960: the engine was gone, and requests waited for ever behind a healthy /health."""

    @virtual
    async def test():
        async with World("a b", load_s=20.0, config={"hang_s": 3.0}) as world:
            world.engine.gates["hash-a"] = asyncio.Event()
            world.engine.gates["hash-a"].set()
            tickets = await tickets_everywhere(world)
            assert world.router.ready()
            died_s = world.now_s()
            if how == "hang":
                world.engine.hang()
            else:
                world.engine.die("step 7 raised", silently=how == "silently")
            if how != "hang":
                assert not world.router.ready(), "at once, before the tickets"
            errors = await asyncio.gather(*(outcome(ticket) for ticket in tickets))
            assert {type(error) for error in errors} == {EngineDeadError}
            assert world.now_s() - died_s <= 4.1
            assert not world.router.ready()
            assert ("no step" if how == "hang" else "step 7 raised") in world.router.why_not_ready()
            with pytest.raises(EngineDeadError) as dead:
                await world.submit("base")
            assert dead.value.status == 503
            for call in (world.router.unload("a"), world.router.pin("a"), world.router.refresh()):
                with pytest.raises(EngineDeadError):
                    await call
            snapshot = world.router.snapshot()
            assert (snapshot.ready, snapshot.queued, snapshot.running) == (False, 0, 0)

    test()


@virtual
async def test_a_dead_engine_is_noticed_without_any_request():
    """vllm#36960: readiness follows the engine, not the traffic."""
    async with World() as world:
        await asyncio.sleep(10.0)
        assert world.router.ready()
        world.engine.die("out of memory")
        assert not world.router.ready()
        assert "out of memory" in world.router.why_not_ready()


@virtual
async def test_an_engine_that_was_idle_for_long_is_not_taken_for_hung():
    async with World(step_s=2.0, config={"hang_s": 3.0}) as world:
        await asyncio.sleep(1000.0)
        await world.ask("base")
        await asyncio.sleep(1000.0)
        assert (await world.ask("base")).finish == "length"
        assert world.router.ready()


@virtual
async def test_an_engine_that_cannot_be_asked_is_given_up():
    """What watches must not fall silent."""
    async with World() as world:
        ticket = await world.submit("base", tokens=900)
        await asyncio.sleep(0.1)
        world.engine.hang()
        world.engine.stats = lambda: 1 / 0
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # it is reported there as well
        assert isinstance(await outcome(ticket), EngineDeadError)


@virtual
async def test_an_engine_that_dies_at_submit_or_during_a_load_is_noticed():
    async with World() as world:
        world.engine.die("a", silently=True)
        assert isinstance(await outcome(await world.submit("base")), EngineDeadError)
        assert world.now_s() < 0.5
    async with World("a", load_s=0.3, config={"watch_interval_s": 100.0}) as world:
        ticket = await world.submit("a")
        await asyncio.sleep(0.1)
        world.engine.die("b", silently=True)
        assert isinstance(await outcome(ticket), EngineDeadError)
        assert not world.router.ready()


@virtual
async def test_an_unload_that_waits_for_a_hung_engine_returns():
    async with World("a", config={"hang_s": 3.0}) as world:
        await world.ask("a")
        await world.submit("a", tokens=900)
        await turns()
        world.engine.hang()
        with pytest.raises(EngineDeadError):
            await world.router.unload("a")


@virtual
async def test_an_engine_that_cannot_free_a_variant_is_given_up():
    async with World("a") as world:
        await world.ask("a")
        world.engine.resident.clear()  # it forgot
        with pytest.raises(EngineDeadError):
            await world.router.unload("a")
        world.engine.breaches.clear()
        assert not world.router.ready()


@virtual
async def test_a_job_that_the_engine_refuses_fails_alone():
    async with World() as world:
        world.engine.refuse = True
        assert isinstance(await outcome(await world.submit("base")), ValueError)
        world.engine.refuse = False
        await world.ask("base")
        assert world.view("base").failed == 1


@virtual
async def test_draining_finishes_what_was_accepted_and_refuses_the_rest():
    async with World("a", max_jobs=1) as world:
        tickets = [await world.submit("base", tokens=50), await world.submit("a", tokens=50)]
        drain = asyncio.create_task(world.router.drain(10.0))
        await turns()
        assert world.router.why_not_ready() == "the server is draining"
        with pytest.raises(OverloadedError) as refused:
            await world.submit("base")
        assert refused.value.status == 503
        assert refused.value.retry_after_s > 0
        assert all(answer.finish == "length" for answer in await read_all(tickets))
        assert await drain == 0
        assert world.now_s() < 1.5


@virtual
async def test_draining_right_after_a_submit_does_not_cut_it_off():
    async with World() as world:
        await world.ask("base")
        await turns()  # it is idle now, and knows it
        ticket = await world.submit("base")
        assert await world.router.drain(10.0) == 0
        assert (await read(ticket)).finish == "length"


@virtual
async def test_draining_cuts_off_what_takes_too_long():
    async with World("a", max_jobs=1, load_s=30.0) as world:
        running, queued, loading = [await world.submit(name, tokens=900) for name in ("base", "base", "a")]
        assert await world.router.drain(2.0) == 3
        assert world.now_s() == pytest.approx(2.0)
        for ticket in (running, queued, loading):
            assert isinstance(await outcome(ticket), OverloadedError)
        assert running.output_tokens > 190


@virtual
async def test_stopping_leaves_no_job_no_task_and_no_open_ticket():
    async with World("a b", load_s=2.0) as world:
        tickets = [await world.submit(name, tokens=900) for name in ("base", "base", "a", "b")]
        await asyncio.sleep(0.1)
        await world.router.stop(timeout_s=10.0)
        assert world.engine.jobs == {}
        assert not world.router.ready()
        for ticket in tickets:
            assert isinstance(await outcome(ticket), OverloadedError)
        with pytest.raises(OverloadedError):
            await world.submit("base")
        await world.router.stop()


@virtual
async def test_stopping_does_not_wait_for_an_engine_that_answers_nothing():
    async with World("a", load_s=1e9 / 1e5) as world:
        await world.submit("base", tokens=900)
        await world.submit("a")
        await asyncio.sleep(0.1)
        world.engine.hang()
        await world.router.stop(timeout_s=1.0)
        assert world.now_s() == pytest.approx(2.1, abs=0.1)


@virtual
async def test_an_engine_that_stops_first_ends_its_jobs_for_their_readers():
    async with World() as world:
        ticket = await world.submit("base", tokens=900)
        await asyncio.sleep(0.1)
        world.engine.stop()
        assert (await read(ticket)).finish == "cancelled"


def test_a_router_that_finds_itself_broken_ends_every_ticket():
    """Not one of them waits for a decision that will never be taken."""

    async def test():
        async with World("a") as world:
            ticket = await world.submit("a", tokens=900)
            await asyncio.sleep(0.5)
            world.router._core.residency.plan = lambda *_args, **_kwargs: 1 / 0  # a bug of ours
            other = await world.submit("base")
            assert isinstance(await outcome(other), EngineDeadError)
            assert isinstance(await outcome(ticket), EngineDeadError)
            assert "the router failed: ZeroDivisionError" in world.router.why_not_ready()

    with pytest.raises(AssertionError, match="the router failed"):
        virtual(test)()
