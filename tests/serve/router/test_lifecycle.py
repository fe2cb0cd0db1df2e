"""A request from submit to its end: order, bounds, deadlines, and leaving at every stage."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve.router.virtual_time import virtual
from tests.serve.router.world import World, outcome, read, read_all, turns
from zen_train.serve.errors import (
    BadRequestError,
    ConflictError,
    DeadlineError,
    OverloadedError,
    QueueFullError,
)


@virtual
async def test_requests_of_one_variant_start_in_the_order_they_came():
    async with World("a", max_jobs=2) as world:
        tickets = [await world.submit("a") for _ in range(20)]
        await read_all(tickets)
        assert [job for _, _, job in world.engine.starts] == [ticket.job_id for ticket in tickets]


@virtual
async def test_an_answer_is_every_token_once_and_one_end():
    async with World("a") as world:
        answer = await world.ask("a", tokens=7)
        assert [event.finish for event in answer.events] == [None] * 6 + ["length"]
        assert answer.ticket.output_tokens == 7
        assert await answer.ticket.batch() == []


@virtual
async def test_a_batch_holds_all_that_came_since():
    async with World() as world:
        ticket = await world.submit("base", tokens=10)
        await asyncio.sleep(0.055)
        assert len(await ticket.batch()) == 5
        assert len(await ticket.batch()) == 1


@virtual
async def test_times_are_told_apart():
    async with World("a", max_jobs=1, load_s=2.0) as world:
        ahead = await world.submit("base", tokens=300)
        await asyncio.sleep(0.5)
        answer = await world.ask("a", tokens=2)
        assert answer.ticket.load_s == pytest.approx(2.0)
        assert answer.ticket.queued_s == pytest.approx(2.5)
        assert answer.ticket.first_token_s == pytest.approx(2.51)
        await read(ahead)


@virtual
async def test_a_full_queue_of_one_variant_is_429_and_the_others_go_on():
    async with World("a b", max_jobs=1, config={"max_queue_per_variant": 3, "max_queue_total": 5}) as world:
        await world.ask("a")
        await world.ask("b")
        tickets = [await world.submit("a", tokens=50)]
        await turns()
        tickets += [await world.submit("a", tokens=50) for _ in range(3)]
        with pytest.raises(QueueFullError) as full:
            await world.submit("a")
        assert full.value.status == 429
        assert 1 <= full.value.retry_after_s <= 60
        tickets += [await world.submit("b") for _ in range(2)]
        with pytest.raises(OverloadedError) as overloaded:
            await world.submit("base")
        assert overloaded.value.status == 503
        assert overloaded.value.retry_after_s >= 1
        world.check()
        await read_all(tickets)


@virtual
async def test_retry_after_follows_the_recent_rate():
    async with World(max_jobs=1, config={"max_queue_per_variant": 10, "starvation_s": 5.0}) as world:
        for _ in range(60):
            await world.ask("base", tokens=50)  # two a second
        tickets = [await world.submit("base", tokens=50) for _ in range(10)]
        with pytest.raises(QueueFullError) as full:
            await world.submit("base")
        assert 4 <= full.value.retry_after_s <= 8
        await read_all(tickets)


@virtual
async def test_jobs_that_could_never_run_are_refused_at_once():
    async with World(context_tokens=100, kv_tokens=50) as world:
        for fields in (
            {"prompt": tuple(range(40)), "tokens": 11},
            {"prompt": (), "tokens": 1},
            {"tokens": 0},
            {"tokens": 10**30},
            {"queue_deadline_s": 0.0},
            {"total_deadline_s": float("nan")},
            {"total_deadline_s": float("inf")},
        ):
            prompt = fields.pop("prompt", (1,))
            request = world.request("base", **fields)
            with pytest.raises(BadRequestError):
                await world.router.submit(type(request)(**{**vars(request), "prompt_tokens": prompt}))
        await world.ask("base", prompt=tuple(range(40)), tokens=10)


@virtual
async def test_the_queue_deadline_ends_a_request_that_got_no_place():
    async with World(max_jobs=1) as world:
        running = await world.submit("base", tokens=400)
        late = await world.submit("base", queue_deadline_s=1.5)
        error = await outcome(late)
        assert isinstance(error, DeadlineError)
        assert error.status == 504
        assert world.now_s() == pytest.approx(1.5)
        assert world.engine.jobs.keys() == {running.job_id}
        await read(running)


@virtual
async def test_the_queue_deadline_does_not_touch_a_running_request():
    async with World() as world:
        answer = await world.ask("base", tokens=300, queue_deadline_s=1.0)
        assert answer.finish == "length"


@virtual
async def test_the_total_deadline_ends_a_running_request_after_its_tokens_and_frees_its_place():
    async with World("a", max_jobs=1, load_s=0.5) as world:
        ticket = await world.submit("a", tokens=900, total_deadline_s=1.0)
        assert len([await anext(ticket) for _ in range(45)]) == 45
        assert isinstance(await outcome(ticket), DeadlineError)
        assert 45 <= ticket.output_tokens <= 50
        assert world.now_s() == pytest.approx(1.0)
        await asyncio.sleep(0.02)
        assert world.engine.jobs == {}
        world.check()


@virtual
async def test_cancelling_while_queued_loading_or_running_frees_everything_at_once():
    async with World("a b", max_jobs=1, load_s=1.0) as world:
        loading = await world.submit("a")
        await asyncio.sleep(0.5)
        loading.cancel()
        assert (await read(loading)).finish == "cancelled"
        await asyncio.sleep(1.0)
        running = await world.submit("a", tokens=900)
        queued = await world.submit("a")
        await asyncio.sleep(0.1)
        queued.cancel()
        running.cancel()
        assert (await read(queued)).tokens == []
        assert len((await read(running)).tokens) > 5
        world.check()
        answer = await world.ask("base", tokens=1)
        assert answer.ticket.first_token_s == pytest.approx(0.02, abs=0.011), (
            "the place was free one step later"
        )
        assert world.router.snapshot().kv_tokens_claimed == 0
        assert world.view("a").cancelled == 3


@virtual
async def test_leaving_the_context_cancels_and_an_ended_ticket_cannot_be_cancelled():
    async with World() as world:
        async with await world.submit("base", tokens=900) as ticket:
            await ticket.batch()
        await asyncio.sleep(0.02)
        assert world.engine.jobs == {}
        answer = await world.ask("base")
        answer.ticket.cancel()
        answer.ticket.enough()
        assert world.view("base").completed == 1
        assert world.view("base").cancelled == 1


@virtual
async def test_a_reader_that_has_enough_is_counted_as_finished():
    async with World() as world:
        ticket = await world.submit("base", tokens=900)
        await ticket.batch()
        ticket.enough()
        assert (await ticket.batch())[-1].finish == "stop"
        assert ("end", "base", "stop", 1) in world.metrics.calls
        await asyncio.sleep(0.02)
        assert world.engine.jobs == {}


@virtual
async def test_a_reader_that_is_cancelled_loses_no_event():
    async with World() as world:
        ticket = await world.submit("base", tokens=5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ticket.batch(), 0.001)
        assert len((await read(ticket)).tokens) == 5


@virtual
async def test_a_long_prompt_that_finds_no_kv_room_is_passed_over_but_not_for_ever():
    async with World("a", max_jobs=4, kv_tokens=400, config={"starvation_s": 1.0}) as world:
        await world.ask("a")
        done = asyncio.Event()

        async def flood() -> None:
            while not done.is_set():
                await world.ask("a", prompt=(1,) * 50, tokens=50)

        floods = []
        for _ in range(6):  # their ends fall apart, so that all the room is never free at once
            floods.append(asyncio.create_task(flood()))
            await asyncio.sleep(0.13)
        answer = await world.ask("base", prompt=(2,) * 350, tokens=10)
        # Passed over until it starves, then the jobs that run (0.5 s) end and nobody takes their room.
        assert 0.9 < answer.ticket.first_token_s < 1.7
        done.set()
        await asyncio.gather(*floods)


@virtual
async def test_kv_room_is_claimed_for_the_prompt_and_the_beginning_of_the_output():
    async with World(max_jobs=4, kv_tokens=1000, config={"kv_headroom_tokens": 100}) as world:
        long = await world.submit("base", tokens=900)
        await asyncio.sleep(0.5)
        assert world.router.snapshot().kv_tokens_claimed == 101
        await asyncio.sleep(5.0)
        assert 540 < world.router.snapshot().kv_tokens_claimed < 560
        world.check()
        await read_all([long, await world.submit("base", tokens=900)])
        assert world.router.snapshot().kv_tokens_claimed == 0


@virtual
async def test_a_job_that_the_engine_ends_with_an_error_fails_alone():
    async with World() as world:
        bad, good = await world.submit("base", tokens=50), await world.submit("base", tokens=50)
        await asyncio.sleep(0.1)
        world.engine.fail_job(bad.job_id, FloatingPointError("logits are not finite"))
        assert isinstance(await outcome(bad), FloatingPointError)
        assert (await read(good)).finish == "length"
        assert world.view("base").failed == 1


@virtual
async def test_a_request_made_for_weights_that_the_name_does_not_mean_is_refused():
    async with World("a") as world:
        await world.ask("a", content_hash="hash-a")
        with pytest.raises(ConflictError, match="send it again"):
            await world.submit("a", content_hash="hash-before")
