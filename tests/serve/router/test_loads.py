"""Loading: one per variant however many wait, several side by side, failures that reach everybody once."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve.router.virtual_time import virtual
from tests.serve.router.world import World, outcome, read_all, turns
from zen_train.serve.errors import UnknownModelError, VariantUnusableError


@virtual
async def test_a_cold_variant_never_delays_the_base_or_a_resident_one():
    """sglang#14795: a request for an adapter that was not loaded blocked the queue's head."""
    async with World("warm cold", load_s=50.0) as world:
        world.engine.gates["hash-warm"] = asyncio.Event()
        world.engine.gates["hash-warm"].set()
        await world.ask("warm")
        cold = [await world.submit("cold") for _ in range(10)]
        for name in ("base", "warm", "base", "warm"):
            answer = await world.ask(name, tokens=1)
            assert answer.ticket.first_token_s == pytest.approx(world.engine.step_s)
        assert all(ticket.place == "queued" for ticket in cold)
        for answer in await read_all(cold):
            assert answer.ticket.load_s == pytest.approx(50.0)


@virtual
async def test_a_cold_variant_leaves_the_places_to_others_even_when_it_came_first():
    """sglang#14795, with more cold requests than the engine has places."""
    async with World("cold", max_jobs=2, load_s=10.0) as world:
        cold = [await world.submit("cold", tokens=1) for _ in range(5)]
        base = await read_all([await world.submit("base", tokens=1) for _ in range(2)])
        assert [answer.ended_s for answer in base] == [pytest.approx(0.01)] * 2
        await read_all(cold)


@virtual
async def test_three_distinct_cold_variants_load_side_by_side():
    """ray-project/ray#65346: three adapters loaded one after another."""
    async with World("a b c", load_s=1.0) as world:
        answers = await read_all([await world.submit(name) for name in "abc"])
        assert world.engine.most_loading == 3
        assert max(answer.ticket.first_token_s for answer in answers) < 1.1


@virtual
async def test_loads_side_by_side_keep_within_their_number_and_bytes():
    """ray-project/ray#65346, the other side: an I/O budget."""
    names = "a b c d e f"
    async with World(names, slots=6, load_s=1.0, config={"max_parallel_loads": 2}) as world:
        answers = await read_all([await world.submit(name) for name in names.split()])
        assert world.engine.most_loading == 2
        assert max(answer.ticket.first_token_s for answer in answers) == pytest.approx(3.01)
    async with World(names, slots=6, load_s=1.0, config={"max_load_bytes": 350}) as world:
        await read_all([await world.submit(name) for name in names.split()])
        assert world.engine.most_loading == 3
    async with World("a", load_s=1.0, config={"max_load_bytes": 1}) as world:
        await world.ask("a")


@virtual
async def test_sixty_four_requests_for_one_cold_variant_are_one_load():
    """vllm#15733, ai-dynamo/dynamo#5184: each waiting request loaded the adapter again."""
    async with World("a", max_jobs=8) as world:
        tickets = [await world.submit("a") for _ in range(64)]
        answers = await read_all(tickets)
        assert len(answers) == 64
        assert world.engine.loads == ["hash-a"]
        assert world.engine.read_of["hash-a"] == 1


@virtual
async def test_a_failed_load_reaches_all_sixty_four_and_the_next_request_tries_again():
    """vllm#15733: a failure must not be remembered, nor reach only the first."""
    async with World("a") as world:
        world.disk.broken.add("hash-a")
        tickets = [await world.submit("a") for _ in range(64)]
        errors = await asyncio.gather(*(outcome(ticket) for ticket in tickets))
        assert {type(error) for error in errors} == {VariantUnusableError}
        assert all("model.norm" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == 64, "each needs a traceback of its own"
        assert world.engine.loads == ["hash-a"]
        assert world.view("a").load_failures == 1
        assert world.view("a").tier == "disk"
        world.disk.broken.clear()
        await world.ask("a")
        assert world.engine.loads == ["hash-a", "hash-a"]


@virtual
async def test_a_load_that_fails_in_a_way_nobody_foresaw_is_an_error_of_the_variant():
    async with World("a") as world:
        world.engine.fault = OSError(5, "Input/output error")
        error = await outcome(await world.submit("a"))
        assert isinstance(error, VariantUnusableError)
        assert "Input/output error" in str(error)
        assert isinstance(error.__cause__, OSError)
        world.engine.fault = None
        await world.ask("a")


@virtual
async def test_one_reload_request_is_one_read_however_many_requests_follow():
    """vllm#33791: after load_inplace every request read the adapter again."""
    async with World("a") as world:
        await world.ask("a")
        path = world.catalogue.write("a", "hash-new", folder="/variants/a2")
        loaded = await world.router.load("a", path, inplace=True)
        assert loaded.on_device
        assert loaded.variant.content_hash == "hash-new"
        await read_all([await world.submit("a") for _ in range(20)])
        assert world.engine.loads == ["hash-a", "hash-new"]
        assert world.engine.read_of["hash-new"] == 1


@virtual
async def test_files_that_vanish_after_an_eviction_fail_that_request_alone():
    """vllm#11727: the server died when an evicted adapter's files were gone."""
    async with World("a b", slots=1) as world:
        await world.ask("a")
        await asyncio.sleep(5.0)
        await world.ask("b")
        del world.disk.hash_in[world.catalogue.variants["a"].folder]
        await asyncio.sleep(5.0)
        failing, fine, base = await world.submit("a"), await world.submit("b"), await world.submit("base")
        error = await outcome(failing)
        assert isinstance(error, VariantUnusableError)
        assert "/variants/a" in str(error)
        await read_all([fine, base])
        # The second failure is told by the artifact's header: it evicts nobody.
        await world.ask("b")
        await asyncio.sleep(5.0)
        unloads = list(world.engine.unloads)
        assert isinstance(await outcome(await world.submit("a")), VariantUnusableError)
        assert world.engine.unloads == unloads
        await world.ask("b")


@virtual
async def test_an_unknown_variant_is_refused_at_once():
    """huggingface/text-generation-inference#2505: an unknown adapter was answered by the base."""
    async with World("a") as world:
        for name in ("A", "zen4-a", "", "../a", "a\0", "x" * 100_000):
            with pytest.raises(UnknownModelError) as caught:
                await world.submit(name)
            assert caught.value.status == 404
            assert len(str(caught.value)) < 1000
        assert world.engine.starts == []


@virtual
async def test_a_delta_that_does_not_fit_is_an_error_and_never_the_base():
    """vllm#34186: an adapter that matched no module was served as the base."""
    async with World("a") as world:
        world.disk.broken.add("hash-a")
        assert isinstance(await outcome(await world.submit("a")), VariantUnusableError)
        assert world.engine.starts == []
        world.catalogue.refused["other"] = "/variants/other matches no tensor of the base"
        with pytest.raises(VariantUnusableError, match="matches no tensor"):
            await world.submit("other")


@virtual
async def test_a_load_that_nobody_waits_for_any_more_stays_as_a_cache_entry():
    async with World("a", load_s=1.0) as world:
        tickets = [await world.submit("a") for _ in range(3)]
        await asyncio.sleep(0.5)
        for ticket in tickets:
            ticket.cancel()
        world.check()
        await asyncio.sleep(1.0)
        assert world.view("a").tier == "device"
        await world.ask("a")
        assert world.engine.loads == ["hash-a"]


@virtual
async def test_a_load_that_has_not_begun_is_not_begun_for_nobody():
    async with World("a b", load_s=1.0, config={"max_parallel_loads": 1}) as world:
        first, second = await world.submit("a"), await world.submit("b")
        await asyncio.sleep(0.5)
        second.cancel()
        await read_all([first])
        await turns()
        assert world.engine.loads == ["hash-a"]


@virtual
async def test_a_new_variant_is_loaded_by_the_administrator_and_a_damaged_one_is_not_served():
    async with World() as world:
        path = world.catalogue.write("a", "hash-a")
        loaded = await world.router.load("a", path)
        assert loaded.on_device
        await world.ask("a")
        assert world.engine.loads == ["hash-a"]
        path = world.catalogue.write("bad", "hash-bad")
        world.disk.broken.add("hash-bad")
        with pytest.raises(VariantUnusableError, match="digest"):
            await world.router.load("bad", path)
        with pytest.raises(UnknownModelError):
            await world.submit("bad")
        assert world.engine.resident == {"hash-a": 100}


@virtual
async def test_loading_by_hand_makes_nobody_wait():
    """Every slot is in use: the variant is served, and loaded for its first request."""
    async with World("a", slots=1) as world:
        running = await world.submit("a", tokens=100)
        await asyncio.sleep(0.5)
        path = world.catalogue.write("b", "hash-b")
        loaded = await world.router.load("b", path)
        assert not loaded.on_device
        assert world.now_s() < 0.6
        await read_all([running, await world.submit("b")])
