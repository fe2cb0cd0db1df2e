"""More variants than slots: the cap holds, all are answered, nobody waits beyond the bound or thrashes."""

from __future__ import annotations

import asyncio
import itertools
import random

from tests.serve.router.virtual_time import virtual
from tests.serve.router.world import World, outcome, read, read_all, turns
from zen_train.serve.errors import OverloadedError, TooLargeError

SIXTEEN = " ".join(f"v{i}" for i in range(16))


@virtual
async def test_more_variants_than_slots_and_the_base_in_one_tick_are_all_answered():
    """sglang#23141: the batch held more adapters than slots, and an assertion ended the server."""
    async with World(SIXTEEN, slots=4, max_jobs=8) as world:
        tickets = [await world.submit(name) for name in [*SIXTEEN.split(), "base"]]
        answers = await read_all(tickets)
        assert [len(answer.tokens) for answer in answers] == [4] * 17
        assert world.engine.most_bytes <= world.engine.limits.variant_bytes
        assert world.engine.most_jobs <= 8


@virtual
async def test_sixteen_variants_in_rotation_on_eight_slots_share_loads_and_wait_a_bounded_time():
    """sglang#13349: each request of a rotation loaded its adapter; first tokens took 6.3 s, not 40 ms."""
    async with World(SIXTEEN, slots=8, max_jobs=16, load_s=0.15, config={"starvation_s": 1.0}) as world:

        async def client(first: int) -> list[float]:
            waits = []
            for i in range(20):
                answer = await world.ask(f"v{(first + i) % 16}", tokens=10)
                waits.append(answer.ticket.first_token_s)
            return waits

        waits = sorted(itertools.chain(*await asyncio.gather(*(client(i) for i in range(32)))))
        loads = len(world.engine.loads) / len(waits)
        # A slot is claimed after half the bound; then a job of 0.1 s must end, and a load takes 0.15 s.
        assert loads < 0.5, loads
        assert waits[-1] < 1.0, waits[-1]


@virtual
async def test_a_rare_variant_is_served_within_the_bound_while_another_keeps_the_only_slot_busy():
    """sglang#17913, #15129: A, B, A, A, A, ... with one slot: B was never served."""
    async with World("a b", slots=1, max_jobs=2, load_s=0.1, config={"starvation_s": 2.0}) as world:
        done = asyncio.Event()

        async def flood() -> None:
            while not done.is_set():
                await world.ask("a", tokens=20)

        floods = [asyncio.create_task(flood()) for _ in range(6)]
        await asyncio.sleep(0.01)
        for _ in range(5):
            answer = await world.ask("b")
            # Half the bound, then A's running jobs (20 steps of 10 ms) and the load.
            assert answer.ticket.first_token_s < 2.0, answer.ticket.first_token_s
            assert answer.ticket.first_token_s > 0.2, "B took the slot at once: A would thrash"
            await asyncio.sleep(1.0)
        done.set()
        await asyncio.gather(*floods)
        a = world.view("a")
        assert a.completed > 10 * a.loads, "A lost its slot too often"


@virtual
async def test_a_cold_variant_takes_an_idle_slot_at_once():
    async with World("a b", slots=1) as world:
        await world.ask("a")
        await asyncio.sleep(10.0)
        answer = await world.ask("b")
        assert answer.ticket.first_token_s < 0.2
        assert world.engine.unloads == ["hash-a"]


@virtual
async def test_what_is_asked_for_often_stays_although_another_was_used_last():
    async with World("often once new", slots=2, config={"cache": {"auto_pins": 0}}) as world:
        for _ in range(30):
            await world.ask("often")
            await asyncio.sleep(1.0)
        await world.ask("once")
        await asyncio.sleep(5.0)
        await world.ask("new")
        assert world.engine.unloads == ["hash-once"]


@virtual
async def test_eviction_never_takes_a_variant_that_runs_or_that_requests_wait_for():
    """llama.cpp#21678: eviction picked a model in use. Here the other waits."""
    async with World("a b c", slots=2, max_jobs=1, load_s=0.1, config={"starvation_s": 4.0}) as world:
        running = await world.submit("a", tokens=150)  # 1.5 s, and keeps the only place
        waiting = await world.submit("b", tokens=1)
        await asyncio.sleep(0.5)
        cold = await world.submit("c", tokens=1)
        await asyncio.sleep(0.5)
        world.check()
        assert set(world.engine.resident) == {"hash-a", "hash-b"}
        assert world.engine.unloads == []
        await read_all([running, waiting, cold])


@virtual
async def test_a_variant_for_which_there_can_be_no_room_is_refused_with_retry_after():
    """llama.cpp#21678: all slots pinned is an answer, not an endless wait."""
    async with World("a b c", slots=2) as world:
        await world.router.pin("a")
        await world.router.pin("b")
        refused = await outcome(await world.submit("c"))
        assert isinstance(refused, OverloadedError)
        assert refused.status == 503
        assert refused.retry_after_s > 0
        assert "pinned" in str(refused)
        assert isinstance(await outcome(await world.submit("c")), OverloadedError)
        await world.router.unpin("b")
        await asyncio.sleep(2.0)
        await world.ask("c")


@virtual
async def test_two_misses_with_one_free_slot_both_finish():
    """llama.cpp#28443: the second miss waited for ever."""
    async with World("a b", slots=1) as world:
        answers = await read_all([await world.submit("a"), await world.submit("b")])
        assert all(answer.finish == "length" for answer in answers)
        assert world.engine.loads == ["hash-a", "hash-b"]


@virtual
async def test_a_variant_above_the_whole_budget_gets_a_clear_error_and_evicts_nobody():
    """llama.cpp PR#25326: one too large for the budget."""
    async with World("a", slots=2) as world:
        world.catalogue.write("big", "hash-big", size_bytes=201)
        await world.router.refresh()
        await world.ask("a")
        error = await outcome(await world.submit("big"))
        assert isinstance(error, TooLargeError)
        assert "201" in str(error)
        assert "200" in str(error)
        assert world.engine.unloads == []
        assert world.engine.loads == ["hash-a"]


@virtual
async def test_a_large_variant_gets_its_room_although_small_ones_keep_coming():
    """A claim that needs two slots is not robbed of the first while it waits for the second."""
    async with World("a b c d", slots=2, max_jobs=4, load_s=0.05, config={"starvation_s": 2.0}) as world:
        world.catalogue.write("large", "hash-large", size_bytes=200)
        await world.router.refresh()
        done = asyncio.Event()

        async def flood(name: str) -> None:
            while not done.is_set():
                await world.ask(name, tokens=20)

        floods = [asyncio.create_task(flood(name)) for name in "abcd" for _ in range(2)]
        await asyncio.sleep(3.0)
        answer = await world.ask("large")
        assert answer.ticket.first_token_s < 3.0, answer.ticket.first_token_s
        done.set()
        await asyncio.gather(*floods)


@virtual
async def test_a_cancelled_claim_gives_the_busy_variant_its_slot_back():
    async with World("a b", slots=1, max_jobs=2, config={"starvation_s": 2.0}) as world:
        long = await world.submit("a", tokens=500)  # 5 s
        await asyncio.sleep(0.5)
        claimant = await world.submit("b")
        await asyncio.sleep(1.5)
        held_back = await world.submit("a", tokens=1)
        await asyncio.sleep(0.5)
        assert held_back.place == "queued", "the slot is being drained for b"
        claimant.cancel()
        answer = await read(held_back)
        assert answer.ticket.first_token_s < 0.6
        assert (await read(long)).finish == "length"
        assert world.engine.unloads == []


@virtual
async def test_of_two_busy_variants_the_one_whose_jobs_end_in_time_gives_way():
    async with World("long short cold", slots=2, max_jobs=4, config={"starvation_s": 2.0}) as world:
        await read_all([await world.submit("long", tokens=10), await world.submit("short", tokens=10)])
        long = await world.submit("long", tokens=900)  # 9 s
        await asyncio.sleep(0.5)
        shorts = [await world.submit("short", tokens=90) for _ in range(4)]
        cold = await world.submit("cold")
        await read_all(shorts)
        assert (await read(cold)).ticket.first_token_s < 2.0
        assert "hash-short" in world.engine.unloads
        await read(long)


@virtual
async def test_random_traffic_on_few_slots_keeps_within_bytes_and_loses_nobody():
    dice = random.Random(4)
    sizes = {f"v{i}": 200 for i in range(0, 13, 3)} | {"v15": 300}
    async with World(SIXTEEN, sizes=sizes, slots=5, max_jobs=6) as world:
        tickets = []
        for _ in range(300):
            name = f"v{min(int(dice.expovariate(0.25)), 15)}"
            tickets.append(await world.submit(name, tokens=dice.randint(1, 30)))
            await asyncio.sleep(dice.expovariate(12.0))
            world.check()
        await turns()
        await read_all(tickets)
        assert world.engine.most_bytes <= 500
