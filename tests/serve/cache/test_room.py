"""Room: bytes counted and conserved, loads joined, and what is in use, loading or pinned left alone."""

import dataclasses

import pytest

from tests.serve.cache.conftest import SLOT
from zen_train.serve.cache import Hit, Join, PolicyConfig, Start, TierCache, TooLarge, Wait


def test_free_room_is_reserved_without_evicting_anybody(tier):
    cache = tier(slots=2)
    assert cache.plan_load("a", SLOT) == Start()
    assert cache.has_room("a")
    view = cache.snapshot()
    assert (view.free_bytes, view.loading_bytes) == (SLOT, SLOT)
    assert cache.finish_load("a") == ()
    assert cache.plan_load("a", SLOT) == Hit()


def test_the_bytes_of_a_victim_count_until_they_are_confirmed_free(tier):
    cache = tier(slots=1)
    cache.use("a")
    assert cache.plan_load("b", SLOT) == Start(evict=("a",))
    assert not cache.has_room("b")
    assert cache.snapshot().leaving_bytes == SLOT
    with pytest.raises(AssertionError, match="before its room was free"):
        cache.finish_load("b")
    cache.evicted("a")
    assert cache.has_room("b")
    assert cache.snapshot().loading_bytes == SLOT
    cache.finish_load("b")
    assert cache.where() == {"b": "resident"}


def test_sixty_four_requests_for_one_cold_variant_are_one_load(tier):
    """vllm#15733, ai-dynamo/dynamo#5184"""
    cache = tier(slots=2)
    plans = [cache.plan_load("a", SLOT) for _ in range(64)]
    assert plans == [Start(), *[Join()] * 63]


def test_a_failed_load_gives_its_room_back_and_the_next_request_tries_again(tier):
    """vllm#15733, ai-dynamo/dynamo#5184"""
    cache = tier(slots=1)
    cache.use("a")
    assert cache.plan_load("b", SLOT) == Start(evict=("a",))
    cache.fail_load("b")
    assert cache.plan_load("b", SLOT) == Wait("being freed")
    cache.evicted("a")
    assert cache.snapshot().free_bytes == SLOT
    assert cache.plan_load("b", SLOT) == Start()


def test_three_cold_variants_load_side_by_side(tier):
    """ray-project/ray#65346"""
    cache = tier(slots=3)
    cache.use("a", "b", "c")
    plans = [cache.plan_load(key, SLOT) for key in "xyz"]
    assert all(isinstance(plan, Start) for plan in plans)
    assert sorted(victim for plan in plans for victim in plan.evict) == ["a", "b", "c"]


def test_eviction_never_picks_what_is_in_use_or_loading(tier):
    """ggml-org/llama.cpp#21678"""
    cache = tier(slots=3)
    cache.use("used", "idle")
    cache.acquire("used")
    assert cache.plan_load("loading", SLOT) == Start()
    assert cache.plan_load("new", SLOT) == Start(evict=("idle",))
    assert cache.plan_load("newer", SLOT) == Wait("in use", drain=("used",))
    cache.release("used")
    assert cache.plan_load("newer", SLOT) == Start(evict=("used",))
    assert cache.plan_load("newest", SLOT) == Wait("loading")


def test_one_lease_of_many_is_enough_to_stay(tier):
    cache = tier(slots=1)
    cache.use("a")
    cache.acquire("a")
    cache.acquire("a")
    cache.release("a")
    assert isinstance(cache.plan_load("b", SLOT, urgent=True), Wait)
    cache.release("a")
    assert cache.plan_load("b", SLOT) == Start(evict=("a",))


def test_a_lease_that_was_never_taken_cannot_be_returned(tier):
    cache = tier(slots=1)
    cache.use("a")
    with pytest.raises(AssertionError, match="a has no lease"):
        cache.release("a")
    with pytest.raises(AssertionError, match="b is not here"):
        cache.acquire("b")


def test_two_misses_and_one_free_slot_both_finish(tier):
    """llama.cpp#28443"""
    cache = tier(slots=2)
    cache.use("busy")
    cache.acquire("busy")
    assert cache.plan_load("a", SLOT) == Start()
    assert isinstance(cache.plan_load("b", SLOT), Wait)
    cache.finish_load("a", leases=1)
    assert cache.plan_load("b", SLOT).blocked_by == "in use"
    cache.release("a")
    plan = cache.plan_load("b", SLOT)
    assert plan == Start(evict=("a",))
    cache.carry_out("b", plan)
    assert cache.resident() == {"busy", "b"}


def test_bytes_count_and_not_entries(tier):
    """llama.cpp PR#25326"""
    cache = tier(budget_bytes=100)
    cache.use("small-1", "small-2", "small-3", size_bytes=10)
    assert cache.use("large", size_bytes=70) == 1
    assert cache.resident() == {"small-1", "small-2", "small-3", "large"}
    plan = cache.plan_load("larger", 80)
    assert isinstance(plan, Start)
    sizes = {"small-1": 10, "small-2": 10, "small-3": 10, "large": 70}
    assert sum(sizes[victim] for victim in plan.evict) >= 80


def test_a_victim_that_a_larger_one_made_needless_is_spared(tier):
    cache = tier(budget_bytes=100, newcomer_margin=1.0)
    cache.use("small", size_bytes=10)
    cache.use("large", "large", size_bytes=90)
    assert cache.plan_load("new", 80) == Start(evict=("large",))


def test_one_too_large_for_the_budget_is_told_so_with_both_sizes(tier):
    """llama.cpp PR#25326"""
    cache = tier(budget_bytes=1000)
    plan = cache.plan_load("huge", 1001)
    assert plan == TooLarge(1001, 1000, 0)
    assert "1,001" in str(plan)
    assert "1,000" in str(plan)
    assert cache.where() == {}


def test_one_too_large_beside_the_pins_is_told_so(tier):
    cache = tier(slots=2)
    cache.pin("a")
    cache.use("a")
    plan = cache.plan_load("b", 2 * SLOT, urgent=True)
    assert plan == TooLarge(2 * SLOT, 2 * SLOT, SLOT)
    assert "unpin" in str(plan)
    cache.unpin("a")
    assert cache.plan_load("b", 2 * SLOT) == Start(evict=("a",))


def test_room_on_its_way_is_waited_for_before_more_is_evicted(tier):
    cache = tier(budget_bytes=100, newcomer_margin=1.0)
    cache.use("large", size_bytes=60)
    cache.use("small", size_bytes=40)
    assert cache.plan_load("a", 20) == Start(evict=("large",))
    assert cache.plan_load("b", 40) == Wait("being freed")
    cache.evicted("large")
    assert cache.plan_load("b", 40) == Start()
    assert cache.where()["small"] == "resident"


def test_a_key_that_leaves_is_loaded_again_only_when_it_is_gone(tier):
    cache = tier(slots=1)
    cache.use("a")
    cache.plan_load("b", SLOT)
    assert cache.plan_load("a", SLOT) == Wait("being freed")


def test_a_removed_key_leaves_at_once_when_nobody_uses_it(tier):
    """vllm#54839, sglang#36894"""
    cache = tier(slots=1)
    cache.pin("a")
    cache.use("a")
    assert cache.remove("a") == ("a",)
    cache.evicted("a")
    assert cache.snapshot().free_bytes == SLOT
    assert not cache.is_pinned("a")
    assert cache.remove("a") == ()


def test_a_removed_key_in_use_leaves_with_its_last_lease(tier):
    """vllm#54839, sglang#36894"""
    cache = tier(slots=1)
    cache.use("a")
    cache.acquire("a")
    cache.acquire("a")
    assert cache.remove("a") == ()
    assert cache.release("a") == ()
    assert cache.release("a") == ("a",)
    cache.evicted("a")
    assert cache.where() == {}


def test_a_key_removed_while_it_loads_leaves_when_it_is_loaded(tier):
    cache = tier(slots=1)
    cache.plan_load("a", SLOT)
    assert cache.remove("a") == ()
    assert cache.finish_load("a") == ("a",)
    cache.evicted("a")


def test_leases_taken_with_the_load_keep_a_removed_key_until_they_end(tier):
    cache = tier(slots=1)
    cache.plan_load("a", SLOT)
    cache.remove("a")
    assert cache.finish_load("a", leases=1) == ()
    assert cache.release("a") == ("a",)


def test_a_removed_key_that_is_wanted_again_stays(tier):
    cache = tier(slots=1)
    cache.use("a")
    cache.acquire("a")
    cache.remove("a")
    assert cache.plan_load("a", SLOT) == Hit()
    assert cache.release("a") == ()
    assert cache.where() == {"a": "resident"}


def test_a_smaller_budget_evicts_now_what_it_can_and_the_rest_when_it_comes_free(tier):
    cache = tier(slots=3)
    cache.use("a", "b", "c")
    cache.acquire("b")
    cache.acquire("c")
    assert cache.resize(SLOT) == ("a",)
    cache.evicted("a")
    assert cache.snapshot().owed_bytes == SLOT
    assert cache.trim() == ()
    assert isinstance(cache.plan_load("d", SLOT), Wait)
    cache.release("b")
    assert cache.trim() == ("b",)
    cache.evicted("b")
    view = cache.snapshot()
    assert (view.owed_bytes, view.free_bytes, view.in_use_bytes) == (0, 0, SLOT)


def test_a_load_under_a_budget_that_is_owed_bytes_evicts_for_both(tier):
    cache = tier(slots=3)
    cache.use("a", "b", "c")
    for key in "abc":
        cache.acquire(key)
    assert cache.resize(2 * SLOT) == ()
    for key in "abc":
        cache.release(key)
    plan = cache.plan_load("d", SLOT)
    assert isinstance(plan, Start)
    assert len(plan.evict) == 2
    cache.carry_out("d", plan)
    view = cache.snapshot()
    assert (view.owed_bytes, view.free_bytes) == (0, 0)


def test_a_larger_budget_is_free_at_once(tier):
    cache = tier(slots=1)
    cache.use("a")
    assert cache.resize(2 * SLOT) == ()
    assert cache.plan_load("b", SLOT) == Start()


def test_answers_cannot_be_changed(tier):
    plan = tier(slots=1).plan_load("a", SLOT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.evict = ("b",)


@pytest.mark.parametrize("call", [lambda c: c.plan_load("a", -1), lambda c: c.resize(-1)])
def test_negative_sizes_are_refused(tier, call):
    with pytest.raises(ValueError, match="-1; give 0 or more"):
        call(tier(slots=1))
    with pytest.raises(ValueError, match="-5; give 0 or more"):
        TierCache(budget_bytes=-5, clock=lambda: 0.0)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="newcomer_margin"):
        PolicyConfig(newcomer_margin=0.5)
    with pytest.raises(ValueError, match="half_live_s"):
        PolicyConfig(half_live_s=(1.0,))
