"""Variants that are added, replaced and removed while they are served."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve.router.virtual_time import virtual
from tests.serve.router.world import World, outcome, read, read_all, turns
from zen_train.serve.errors import ConflictError, UnknownModelError, VariantUnusableError


@virtual
async def test_new_weights_under_an_old_name_answer_new_requests_and_old_ones_finish_on_the_old():
    """vllm#42125, #30931: after an adapter was replaced, cached state of the old one leaked into answers."""
    async with World("a", slots=2) as world:
        old = [await world.submit("a", tokens=50) for _ in range(2)]
        await asyncio.sleep(0.3)
        world.catalogue.write("a", "hash-new", folder="/variants/a2")
        changes = await world.router.refresh()
        assert changes.replaced == ("a",)
        new = [await world.submit("a", tokens=5) for _ in range(2)]
        for answer in await read_all(new):
            assert answer.ticket.variant.content_hash == "hash-new"
        world.check()
        assert world.router.snapshot().retiring == 1
        for answer in await read_all(old):
            assert answer.ticket.variant.content_hash == "hash-a"
            assert len(answer.tokens) == 50
        await asyncio.sleep(0.1)
        assert world.engine.resident == {"hash-new": 100}
        assert world.router.snapshot().retiring == 0
        assert world.view("a").requests == 4, "the name keeps its history"


@virtual
async def test_what_waits_while_the_old_weights_are_there_finishes_on_them():
    """vllm#42125: never mixed, whatever the order of events."""
    async with World("a", slots=2, max_jobs=1) as world:
        await world.ask("a")
        running = await world.submit("base", tokens=50)
        await turns()
        waiting = await world.submit("a")
        world.catalogue.write("a", "hash-new", folder="/variants/a2")
        await world.router.refresh()
        answer = await read(waiting)
        assert answer.ticket.variant.content_hash == "hash-a"
        await read(running)


@virtual
async def test_what_waits_for_weights_that_are_replaced_before_they_are_loaded_gets_the_new_ones():
    """The old folder holds the new weights by then: the old ones cannot be had any more."""
    async with World("a b", slots=1, config={"starvation_s": 10.0}) as world:
        running = await world.submit("b", tokens=200)
        await asyncio.sleep(0.5)
        waiting = await world.submit("a")
        bound = await world.submit("a", content_hash="hash-a")
        world.catalogue.write("a", "hash-new")
        await world.router.refresh()
        await turns()
        assert isinstance(await outcome(bound), ConflictError)
        answer = await read(waiting)
        assert answer.ticket.variant.content_hash == "hash-new"
        assert answer.ticket.submitted_s == pytest.approx(0.5)
        await read(running)


@virtual
async def test_a_load_that_fails_because_the_weights_were_replaced_sends_its_waiters_to_the_new_ones():
    async with World("a", slots=2) as world:
        world.engine.gates["hash-a"] = asyncio.Event()
        tickets = [await world.submit("a") for _ in range(3)]
        await turns()
        world.catalogue.write("a", "hash-new")
        world.disk.broken.add("hash-a")
        await world.router.refresh()
        await turns()
        world.check()
        world.engine.gates["hash-a"].set()
        for answer in await read_all(tickets):
            assert answer.ticket.variant.content_hash == "hash-new"


@virtual
async def test_the_old_weights_can_come_back():
    async with World("a", slots=2) as world:
        running = await world.submit("a", tokens=100)
        await asyncio.sleep(0.3)
        world.catalogue.write("a", "hash-new", folder="/variants/a2")
        await world.router.refresh()
        await world.ask("a")
        world.catalogue.write("a", "hash-a")
        await world.router.refresh()
        answer = await world.ask("a")
        assert answer.ticket.variant.content_hash == "hash-a"
        assert world.engine.loads == ["hash-a", "hash-new"], "they were never unloaded"
        await read(running)
        await asyncio.sleep(0.1)
        assert world.engine.resident == {"hash-a": 100}


@virtual
async def test_reloading_the_only_slot_brings_the_new_weights_at_once():
    async with World("a", slots=1) as world:
        await world.ask("a")
        path = world.catalogue.write("a", "hash-new", folder="/variants/a2")
        assert (await world.router.load("a", path, inplace=True)).on_device
        assert world.engine.resident == {"hash-new": 100}
        assert (await world.ask("a")).ticket.load_s == 0.0


@virtual
async def test_two_names_of_the_same_weights_share_one_load_and_part_in_peace():
    async with World(slots=2) as world:
        world.catalogue.write("a", "hash-x", folder="/variants/a")
        world.catalogue.write("b", "hash-x", folder="/variants/b")
        await world.router.refresh()
        await read_all([await world.submit("a"), await world.submit("b")])
        assert world.engine.loads == ["hash-x"]
        await world.router.unload("a")
        assert world.engine.resident == {"hash-x": 100}
        assert (await world.ask("b")).ticket.variant.name == "b"
        await world.router.unload("b")
        assert world.engine.resident == {}


@virtual
async def test_unloading_frees_the_bytes_and_the_next_request_gets_404():
    """vllm#54839, sglang#36894: unload hung, or freed nothing."""
    async with World("a b") as world:
        await world.ask("a")
        await world.router.unload("a")
        assert world.engine.resident == {}
        assert world.router.snapshot().device_bytes_used == 0
        with pytest.raises(UnknownModelError):
            await world.submit("a")
        with pytest.raises(UnknownModelError):
            await world.router.unload("a")
        assert [view.name for view in world.router.snapshot().variants] == ["base", "b"]
        await world.router.unload("b")  # was never loaded
        with pytest.raises(ConflictError):
            await world.router.unload("base")


@virtual
async def test_unloading_lets_running_requests_finish_and_sends_waiting_ones_away():
    """vllm#54839: with requests in flight."""
    async with World("a", max_jobs=1) as world:
        await world.ask("a")
        running, waiting = await world.submit("a", tokens=100), await world.submit("a")
        await turns()
        unload = asyncio.create_task(world.router.unload("a"))
        assert isinstance(await outcome(waiting), UnknownModelError)
        assert len((await read(running)).tokens) == 100
        await unload
        assert world.engine.resident == {}


@virtual
async def test_unloading_returns_although_a_request_runs_on_and_on():
    """vllm#54839: a grace, then it is cut off."""
    async with World("a", config={"unload_grace_s": 2.0}) as world:
        await world.ask("a")
        running = await world.submit("a", tokens=900)
        await turns()
        started_s = world.now_s()
        await world.router.unload("a")
        assert world.now_s() - started_s == pytest.approx(2.01, abs=0.02)
        error = await outcome(running)
        assert isinstance(error, UnknownModelError)
        assert "grace" in str(error)


@virtual
async def test_unloading_while_it_loads_returns_and_leaves_nothing():
    """sglang#36894."""
    async with World("a", load_s=1.0) as world:
        waiting = await world.submit("a")
        await asyncio.sleep(0.5)
        await world.router.unload("a")
        assert world.now_s() == pytest.approx(1.0)
        assert world.engine.resident == {}
        assert isinstance(await outcome(waiting), UnknownModelError)
        world.check()


@virtual
async def test_a_variant_whose_files_are_gone_is_removed_by_a_rescan():
    async with World("a b") as world:
        await read_all([await world.submit("a"), await world.submit("b")])
        del world.catalogue.next["a"]
        assert (await world.router.refresh()).removed == ("a",)
        await asyncio.sleep(0.1)
        assert world.engine.resident == {"hash-b": 100}
        with pytest.raises(UnknownModelError):
            await world.submit("a")


@virtual
async def test_weights_that_no_name_means_any_more_give_their_host_memory_back():
    """Removed, replaced, shared by two names, and only after the last job on them."""
    async with World("a b c", host_bytes=1000) as world:
        world.catalogue.write("twin", "hash-c", folder="/variants/twin")
        await world.router.refresh()
        await read_all([await world.submit(name) for name in "abc"])
        assert world.engine.host.keys() == {"hash-a", "hash-b", "hash-c"}
        await world.router.unload("a")
        assert world.engine.host.keys() == {"hash-b", "hash-c"}
        running = await world.submit("b", tokens=100)
        await asyncio.sleep(0.1)
        world.catalogue.write("b", "hash-new", folder="/variants/b2")
        await world.router.refresh()
        await asyncio.sleep(0.1)
        assert "hash-b" in world.engine.host
        await read(running)
        await world.ask("b")
        await world.router.unload("c")
        assert world.engine.host.keys() == {"hash-c", "hash-new"}
        await world.router.unload("twin")
        assert world.engine.host.keys() == {"hash-new"}


@virtual
async def test_a_variant_that_was_never_loaded_leaves_quietly():
    async with World("a b", host_bytes=1000) as world:
        await world.ask("a")
        del world.catalogue.next["b"]
        await world.router.refresh()
        assert world.engine.host.keys() == {"hash-a"}


@virtual
async def test_a_variant_that_is_added_is_served_at_once():
    async with World() as world:
        world.catalogue.write("a", "hash-a")
        with pytest.raises(UnknownModelError):
            await world.submit("a")
        assert (await world.router.refresh()).added == ("a",)
        await world.ask("a")


@virtual
async def test_a_name_is_not_taken_over_unless_asked():
    async with World("a") as world:
        path = world.catalogue.write("other", "hash-other")
        with pytest.raises(ConflictError, match="load_inplace"):
            await world.router.load("a", path)
        with pytest.raises(ConflictError, match="base"):
            await world.router.load("base", path, inplace=True)
        assert (await world.ask("a")).ticket.variant.content_hash == "hash-a"


@virtual
async def test_a_replacement_that_cannot_be_loaded_says_so_and_the_next_request_tries_again():
    async with World("a") as world:
        await world.ask("a")
        path = world.catalogue.write("a", "hash-new")
        world.disk.broken.add("hash-new")
        with pytest.raises(VariantUnusableError):
            await world.router.load("a", path, inplace=True)
        assert isinstance(await outcome(await world.submit("a")), VariantUnusableError)
        world.disk.broken.clear()
        assert (await world.ask("a")).ticket.variant.content_hash == "hash-new"


@virtual
async def test_a_pin_keeps_a_variant_on_the_device_and_follows_its_name_to_new_weights():
    async with World("a b c", slots=2, config={"starvation_s": 1.0}) as world:
        assert (await world.router.pin("a")).on_device
        for _ in range(5):
            await world.ask("b")
            await world.ask("c")
            await asyncio.sleep(2.0)
        assert "hash-a" in world.engine.resident
        world.catalogue.write("a", "hash-new", folder="/variants/a2")
        await world.router.refresh()
        await world.ask("a")
        for _ in range(5):
            await world.ask("b")
            await world.ask("c")
            await asyncio.sleep(2.0)
        assert "hash-new" in world.engine.resident
        assert world.view("a").pinned
        await world.router.unpin("a")
        assert not world.view("a").pinned
        await read_all([await world.submit("b"), await world.submit("c")])
        with pytest.raises(ConflictError):
            await world.router.pin("base")
        with pytest.raises(UnknownModelError):
            await world.router.pin("d")


@virtual
async def test_a_pin_that_follows_its_name_does_not_stay_on_weights_that_another_name_shares():
    async with World("c", slots=2) as world:
        world.catalogue.write("a", "hash-x", folder="/variants/a")
        world.catalogue.write("b", "hash-x", folder="/variants/b")
        await world.router.refresh()
        await world.router.pin("a")
        await world.ask("b")
        world.catalogue.write("a", "hash-new", folder="/variants/a2")
        await world.router.refresh()
        await world.ask("a")
        await asyncio.sleep(5.0)
        await world.ask("c")
        assert world.engine.resident.keys() == {"hash-new", "hash-c"}


@virtual
async def test_a_pin_that_does_not_fit_beside_the_others_is_refused_and_not_kept():
    async with World("a b", slots=1) as world:
        await world.router.pin("a")
        with pytest.raises(Exception, match="pinned"):
            await world.router.pin("b")
        assert not world.view("b").pinned
        await world.router.unload("a")
        assert (await world.router.pin("b")).on_device
