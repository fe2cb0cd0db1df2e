"""What the router shows: complete before any traffic, one entry per name, and true afterwards."""

from __future__ import annotations

import asyncio

import pytest

from tests.serve.router.virtual_time import virtual
from tests.serve.router.world import World, outcome, read, read_all, turns


@virtual
async def test_every_variant_is_shown_with_tier_and_pin_before_any_traffic():
    """vllm#45325: metrics showed adapters only while requests for them ran, and labels without bound."""
    async with World("b a", slots=2) as world:
        await world.router.pin("b")
        snapshot = world.router.snapshot()
        shown = [(view.name, view.content_hash, view.tier, view.pinned) for view in snapshot.variants]
        assert shown == [
            ("base", None, "device", False),
            ("a", "hash-a", "disk", False),
            ("b", "hash-b", "device", True),
        ]
        assert [view.device_bytes for view in snapshot.variants] == [0, 100, 100]
        assert (snapshot.device_bytes_used, snapshot.device_bytes_budget) == (100, 200)
        assert snapshot.variants[1].first_token_p50_s is None


@virtual
async def test_a_variant_that_left_the_device_is_shown_in_host_memory_where_there_is_one():
    for host_bytes, tier in ((1000, "host"), (0, "disk")):
        async with World("a b c", slots=1, host_bytes=host_bytes) as world:
            await world.ask("a")
            assert world.view("a").tier == "device"
            await asyncio.sleep(10.0)
            await world.ask("b")
            assert [world.view(name).tier for name in "abc"] == [tier, "device", "disk"]


@virtual
async def test_names_that_nobody_serves_leave_no_trace():
    """vllm#45325, the other side: one series per variant, whatever clients ask for."""
    async with World("a") as world:
        for i in range(100):
            with pytest.raises(ValueError, match="not in the catalogue"):
                await world.submit(f"nonsense-{i}")
        await world.ask("a")
        await world.router.unload("a")
        assert [view.name for view in world.router.snapshot().variants] == ["base"]
        assert {call[1] for call in world.metrics.calls} == {"a"}


@virtual
async def test_figures_agree_with_what_happened():
    async with World("a b", max_jobs=2, load_s=1.0) as world:
        await world.ask("a", tokens=10)
        tickets = [await world.submit("a", tokens=100) for _ in range(4)]
        tickets.append(await world.submit("b", tokens=100))
        await asyncio.sleep(0.5)
        snapshot = world.router.snapshot()
        a, b = world.view("a"), world.view("b")
        assert (snapshot.queued, snapshot.running, snapshot.max_jobs) == (3, 2, 2)
        assert (a.queued, a.running, a.tier, b.queued, b.tier) == (2, 2, "device", 1, "loading")
        assert (snapshot.loads_in_flight, snapshot.load_bytes_in_flight) == (1, 100)
        tickets[0].cancel()
        await asyncio.gather(*(outcome(ticket) for ticket in tickets))
        a, b = world.view("a"), world.view("b")
        assert (a.requests, a.completed, a.cancelled, a.lookups, a.hits, a.loads) == (5, 4, 1, 5, 4, 1)
        assert (b.requests, b.completed, b.lookups, b.hits, b.loads) == (1, 1, 1, 0, 1)
        assert b.last_load_s == pytest.approx(1.0)
        assert sorted(a.first_token_recent_s) == sorted([0.01 + 1.0] + [t.first_token_s for t in tickets[:4]])
        assert a.first_token_p50_s == sorted(a.first_token_recent_s)[2]
        assert a.first_token_p99_s == max(a.first_token_recent_s)
        assert a.tokens_per_s > b.tokens_per_s > 0


@virtual
async def test_whoever_counts_is_told_each_fact_once():
    async with World("a b", slots=1, load_s=0.5) as world:
        await world.ask("a", tokens=3)
        await world.ask("a", tokens=3)
        await asyncio.sleep(5.0)
        await world.ask("b", tokens=3)
        world.disk.broken.add("hash-a")
        await asyncio.sleep(5.0)
        await outcome(await world.submit("a"))
        count = world.metrics.count
        assert count("lookup") == {("a", False): 2, ("a", True): 1, ("b", False): 1}
        assert count("end") == {("a", "length"): 2, ("b", "length"): 1, ("a", "error"): 1}
        assert [call[1] for call in world.metrics.calls if call[0] == "eviction"] == ["a", "b"]
        loads = [call[1:] for call in world.metrics.calls if call[0] == "load"]
        assert loads == [
            (name, pytest.approx(0.5), 100, ok) for name, ok in (("a", True), ("b", True), ("a", False))
        ]
        first = [call for call in world.metrics.calls if call[0] == "first_token"]
        assert [call[1] for call in first] == ["a", "a", "b"]
        assert first[0][2:] == (pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.51))


@virtual
async def test_a_replaced_variant_that_still_answers_is_shown_as_retiring():
    async with World("a", slots=2) as world:
        await world.ask("a")
        running = await world.submit("a", tokens=50)
        await turns()
        world.catalogue.write("a", "hash-new", folder="/variants/a2")
        await world.router.refresh()
        snapshot = world.router.snapshot()
        assert snapshot.retiring == 1
        assert world.view("a").content_hash == "hash-new"
        assert world.view("a").tier == "disk"
        assert snapshot.device_bytes_used == 100
        await read(running)


@virtual
async def test_the_router_says_that_it_is_not_running_before_start_and_after_stop():
    world = World("a")
    assert world.router.why_not_ready() == "the router is not running"
    async with world:
        assert world.router.ready()
        await read_all([await world.submit("a")])
    assert not world.router.ready()
