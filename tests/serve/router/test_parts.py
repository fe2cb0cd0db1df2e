"""The pure parts one by one: who comes next, who gives way, and the figures."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.serve.router.virtual_time import run
from zen_train.serve.cache import PolicyConfig
from zen_train.serve.router.bridge import EventBridge
from zen_train.serve.router.claims import Holding, claim
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.device_tier import DeviceTier
from zen_train.serve.router.fairness import FairShare
from zen_train.serve.router.gauges import DecayedRate, LatencyWindow, quantile
from zen_train.serve.router.lane import Lane
from zen_train.serve.router.request import RoutedRequest
from zen_train.serve.router.ticket import Ticket
from zen_train.serve.router.watch import EngineWatch
from zen_train.serve.types import EngineStats, TokenEvent


def lane(name: str, *, waiting: int = 1, since_s: float = 0.0, to_go: int = 0, size_bytes: int = 100) -> Lane:
    made = Lane(key=name, variant=None, where="device", size_bytes=size_bytes)
    for i in range(waiting):
        made.queue[ticket(made, f"{name}{i}", since_s)] = None
    if to_go:
        running = ticket(made, f"{name}-runs", since_s, tokens=to_go)
        made.running[running.job_id] = running
    made.last_place_s = made.device_since_s = -1.0
    return made


def ticket(of: Lane, job_id: str, now_s: float, tokens: int = 1) -> Ticket:
    request = RoutedRequest(id=job_id, model="m", prompt_tokens=(1,), max_tokens=tokens)
    return Ticket(request, of, job_id=job_id, now_s=now_s, on_leave=lambda *_: None)


# --- fairness


def shares(fair: FairShare, lanes: list[Lane], cost: dict[str, tuple[int, int]], rounds: int) -> Counter:
    """Tokens that each lane gets when there is one place; nobody ever starves within the rule's bound."""
    got: Counter = Counter()
    for _ in range(rounds):
        chosen = next(fair.order(lanes, 0.0))
        prompt, output = cost[chosen.key]
        fair.starts(chosen, prompt_tokens=prompt)
        for _ in range(output):
            fair.produced(chosen)
        got[chosen.key] += prompt + output
    return got


def test_scarce_places_are_shared_by_tokens_and_not_by_requests():
    fair = FairShare(starvation_s=1e9, output_weight=1.0)
    lanes = [lane("long"), lane("short")]
    got = shares(fair, lanes, {"long": (900, 100), "short": (5, 5)}, 2000)
    assert got["long"] / got["short"] == pytest.approx(1.0, rel=0.1)


def test_an_idle_lane_earns_no_credit():
    fair = FairShare(starvation_s=1e9, output_weight=1.0)
    busy, late = lane("busy"), lane("late")
    shares(fair, [busy], {"busy": (10, 10)}, 1000)
    fair.joins(late)
    got = shares(fair, [busy, late], {"busy": (10, 10), "late": (10, 10)}, 100)
    assert abs(got["busy"] - got["late"]) <= 40


def test_the_lane_that_waited_longest_beyond_the_bound_goes_first():
    fair = FairShare(starvation_s=2.0, output_weight=1.0)
    first, second, third = lane("1", since_s=0.0), lane("2", since_s=-0.5), lane("3", since_s=1.0)
    first.served, second.served, third.served = 100.0, 200.0, 0.0
    assert [each.key for each in fair.order([first, second, third], 1.4)] == ["3", "1", "2"]
    assert [each.key for each in fair.order([first, second, third], 2.1)] == ["2", "1", "3"]
    second.last_place_s = 2.0  # it got a place: its other requests do not count as starving
    assert [each.key for each in fair.order([first, second, third], 2.1)] == ["1", "3", "2"]


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=2, max_size=6),
    st.integers(50, 300),
)
def test_no_two_lanes_that_always_wait_differ_by_more_than_one_request(costs, rounds):
    fair = FairShare(starvation_s=1e9, output_weight=2.0)
    lanes = [lane(str(i)) for i in range(len(costs))]
    shares(fair, lanes, {str(i): cost for i, cost in enumerate(costs)}, rounds)
    served = [each.served for each in lanes]
    assert max(served) - min(served) <= max(prompt + 2.0 * output for prompt, output in costs)


# --- claims


def holding(
    *, size_bytes: int = 100, pinned: bool = False, settled_at_s: float = 0.0, rate: float = 1.0
) -> Holding:
    return Holding(size_bytes=size_bytes, pinned=pinned, settled_at_s=settled_at_s, requests_per_s=rate)


def victims(claimants, busy, *, room_bytes=0, previous=frozenset(), in_time_tokens=100.0, now_s=10.0):
    claims = claim(
        claimants, busy, room_bytes=room_bytes, previous=previous, in_time_tokens=in_time_tokens, now_s=now_s
    )
    return {each.key for each in claims.victims}, claims.due_s


def test_who_gives_way_is_chosen_in_the_stated_order():
    cold = lane("cold")
    late, soon = lane("late", waiting=0, to_go=900), lane("soon", waiting=3, to_go=50)
    idle_queue, quiet, busy = lane("free", waiting=0, to_go=60), lane("q", to_go=70), lane("b", to_go=70)
    held = {late: holding(rate=0.1), soon: holding(), idle_queue: holding()}
    assert victims([cold], held)[0] == {"free"}
    assert victims([cold], held, previous=frozenset({soon}))[0] == {"soon"}
    assert victims([cold], {late: holding(rate=0.1), soon: holding()})[0] == {"soon"}
    assert victims([cold], {quiet: holding(rate=1.0), busy: holding(rate=2.0)})[0] == {"q"}
    assert victims([cold], {late: holding()})[0] == {"late"}, "better late than never"


def test_pinned_and_newly_loaded_lanes_do_not_give_way():
    cold, a, b = lane("cold"), lane("a", to_go=5), lane("b", to_go=5)
    assert victims([cold], {a: holding(pinned=True)}) == (set(), float("inf"))
    assert victims([cold], {a: holding(settled_at_s=12.0), b: holding(settled_at_s=11.0)}) == (set(), 11.0)
    a.device_since_s = 9.0  # loaded, and nobody has had a place since
    assert victims([cold], {a: holding()})[0] == set()
    a.last_place_s = 9.5
    assert victims([cold], {a: holding()})[0] == {"a"}


def test_room_is_counted_before_victims_and_each_claimant_gets_its_own():
    one, two = lane("one"), lane("two", size_bytes=200)
    busy = {lane(str(i), to_go=i): holding(rate=i) for i in range(4)}
    assert victims([one], busy, room_bytes=100)[0] == set()
    assert victims([one, two], busy, room_bytes=100)[0] == {"0", "1"}
    assert victims([one, two], busy)[0] == {"0", "1", "2"}
    assert victims([two, one, two], busy)[0] == {"0", "1", "2"}, "the last cannot be met and takes nobody"


def test_room_that_is_promised_to_a_load_is_not_counted_again():
    lanes = {name: lane(name, waiting=0) for name in "abc"}
    tier = DeviceTier(lanes, budget_bytes=300, clock=lambda: 0.0, config=PolicyConfig())
    for name in "ab":
        lanes[name].where = "loading"
        assert tier.make_room(lanes[name], urgent=False) == []
    assert tier.holdings(set()) == ({}, 100)
    tier.loaded(lanes["a"])
    assert tier.holdings(set()) == ({}, 200), "an idle one can be freed"
    holdings, room_bytes = tier.holdings({lanes["a"]})
    assert (holdings[lanes["a"]].size_bytes, room_bytes) == (100, 100)


# --- the bridge


def test_events_of_another_thread_arrive_once_in_order_and_with_few_wake_ups():
    async def main():
        got: list[TokenEvent] = []
        done = asyncio.Event()

        def deliver(events):
            got.extend(events)
            if len(got) == 14 * 500:
                done.set()

        bridge = EventBridge(asyncio.get_running_loop(), deliver)

        def engine():
            for step in range(500):
                for job in range(14):
                    bridge.sink(TokenEvent(job_id=str(job), token=step))

        thread = threading.Thread(target=engine)
        thread.start()
        await done.wait()
        thread.join()
        for job in range(14):
            assert [event.token for event in got if event.job_id == str(job)] == list(range(500))
        assert bridge.wakeups < 14 * 500 / 2
        bridge.close()
        bridge.sink(TokenEvent(job_id="late", token=1))

    run(main(), loop_factory=asyncio.SelectorEventLoop)


def test_a_burst_is_one_wake_up_and_nothing_arrives_after_close():
    async def main():
        got: list[list[TokenEvent]] = []
        bridge = EventBridge(asyncio.get_running_loop(), got.append)
        for job in range(14):
            bridge.sink(TokenEvent(job_id=str(job), token=1))
        await asyncio.sleep(0.01)
        assert [len(batch) for batch in got] == [14]
        assert bridge.wakeups == 1
        bridge.sink(TokenEvent(job_id="0", token=2))
        bridge.close()
        await asyncio.sleep(0.01)
        assert len(got) == 1

    run(main())


# --- figures


def test_a_steady_rate_is_told_from_the_first_seconds_on_and_fades():
    rate = DecayedRate(half_life_s=30.0)
    assert rate.per_s(5.0) == 0.0
    for i in range(400):
        rate.add(10.0 + i * 0.1)
        if i > 30:
            assert rate.per_s(10.0 + i * 0.1) == pytest.approx(10.0, rel=0.05)
    assert rate.per_s(49.9 + 300.0) < 0.1


def test_quantiles_are_values_that_occurred_within_the_window():
    window = LatencyWindow(window_s=10.0)
    for i in range(100):
        window.add(float(i), i / 100)
    assert window.values(99.0) == [i / 100 for i in range(89, 100)]
    assert window.recent(99.0)[-1] == 0.99
    values = [0.5, 0.1, 0.9, 0.2]
    assert [quantile(values, share) for share in (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)] == [
        0.1,
        0.1,
        0.2,
        0.5,
        0.9,
        0.9,
    ]
    assert quantile([], 0.5) is None


def stats(*, alive: bool = True, age_s: float = 0.0, death: str | None = None) -> EngineStats:
    return EngineStats(
        alive=alive, heartbeat_age_s=age_s, running_jobs=0, waiting_jobs=0, kv_tokens_used=0, resident={},
        steps=0, tokens_generated=0, preemptions=0, death=death,
    )  # fmt: skip


def test_an_engine_is_given_up_when_it_is_dead_or_twice_seen_silent_with_work():
    watch = EngineWatch(hang_s=10.0)
    assert watch.tick(stats(), busy_s=100.0) is None
    assert watch.tick(stats(age_s=100.0), busy_s=-float("inf")) is None
    assert watch.tick(stats(age_s=100.0), busy_s=9.0) is None
    assert "12.0 s" in watch.hang(stats(age_s=12.0), busy_s=100.0)
    assert watch.tick(stats(age_s=12.0), busy_s=100.0) is None
    assert watch.tick(stats(age_s=0.1), busy_s=100.0) is None, "the process had been stopped"
    assert watch.tick(stats(age_s=11.0), busy_s=100.0) is None
    assert "11.5 s" in watch.tick(stats(age_s=11.5), busy_s=100.0)
    assert "no memory" in watch.tick(stats(alive=False, death="no memory"), busy_s=0.0)


def test_the_configuration_refuses_what_it_does_not_know_and_what_does_not_fit():
    for wrong in (
        {"max_queue": 3},
        {"starvation_s": 0.0},
        {"starvation_s": float("inf")},
        {"max_queue_per_variant": 0},
        {"max_queue_per_variant": 100, "max_queue_total": 99},
        {"starvation_s": 0.5, "cache": {"minimum_residency_s": 0.6}},
        {"max_parallel_loads": "4"},
    ):
        with pytest.raises(ValidationError):
            RouterConfig.model_validate(wrong)


def test_the_router_imports_neither_torch_nor_http():
    script = (
        "import sys, zen_train.serve.router\n"
        "print([name for name in ('torch', 'fastapi', 'starlette', 'uvicorn') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
