"""Choice: who stays and who goes, by traffic, pins and time."""

import pytest

from tests.serve.cache.conftest import SLOT
from zen_train.serve.cache import Start, Wait
from zen_train.serve.cache.rates import RateBook

KEYS = [f"v{number}" for number in range(16)]


def test_sixteen_variants_in_rotation_on_eight_slots_hit_every_second_time(tier):
    """sglang#13349: plain LRU loads for every request; the best that anyone could do is 0.53 loads a request."""
    cache = tier(slots=8)
    cache.use(*KEYS * 4)
    assert cache.use(*KEYS * 25) / 400 < 0.58


def test_rotation_is_kept_from_thrashing_under_the_default_settings(tier):
    """sglang#13349: with automatic pins and minimum residency on, as served."""
    cache = tier(slots=8, auto_pins=1, minimum_residency_s=0.25)
    cache.use(*KEYS * 4)
    assert cache.use(*KEYS * 25) / 400 < 0.58


def test_a_busy_variant_stays_while_others_pass_through(tier):
    cache = tier(slots=2)
    cache.use(*["busy"] * 20)
    cache.use(*KEYS)
    assert "busy" in cache.resident()


def test_a_variant_that_went_quiet_makes_room_in_the_end(tier):
    cache = tier(slots=2)
    cache.use(*["yesterday"] * 50)
    cache.now_s += 100_000.0
    cache.use(*["a", "b"] * 5)
    assert cache.resident() == {"a", "b"}


def test_conversations_are_served_as_lru_would(tier):
    """Each variant in bursts: what was used last is used next, and nothing else predicts it."""
    cache = tier(slots=2)
    bursts = [key for turn in range(30) for key in [KEYS[turn % 16], KEYS[(turn * 7 + 3) % 16]] * 12]
    cache.use(*bursts[:360])
    assert cache.snapshot().half_life_s <= 4.0
    wanted = len([1 for before, key in zip(bursts[360:-2], bursts[362:], strict=True) if before != key]) + 2
    assert cache.use(*bursts[360:]) <= wanted


def test_rates_are_remembered_of_variants_that_are_not_there(tier):
    cache = tier(slots=2, newcomer_margin=1.0)
    for _ in range(30):
        cache.now_s += 1.0
        cache.record_request("busy", SLOT)
    cache.use("a", "a", "busy", "b")
    assert cache.resident() == {"busy", "b"}
    assert cache.requests_per_s("busy") > cache.requests_per_s("a") > 0.0


def test_what_costs_more_to_load_again_for_its_bytes_stays(tier):
    """Two equally busy: evicting the large one frees as much for one load as the small ones for eight."""
    costly = tier(budget_bytes=160, load_overhead_bytes=100, newcomer_margin=1.0, half_lives_s=(1000.0,) * 3)
    costly.use("large", size_bytes=80)
    costly.use(*KEYS[:8], size_bytes=10)
    costly.use("large", size_bytes=80)
    assert costly.plan_load("new", 10) == Start(evict=("large",))


def test_memory_for_rates_is_bounded():
    book = RateBook(half_life_s=10.0, remembered=100)
    for second in range(50):
        book.record("busy", second)
    for number in range(10_000):
        book.record(f"once-{number}", 50.0)
    assert len(book) <= 100
    assert book.count("busy", 50.0) > 5.0


def test_a_rate_halves_in_a_half_life_and_is_right_when_steady():
    book = RateBook(half_life_s=10.0, remembered=100)
    for step in range(1000):
        book.record("a", step * 0.5)
    assert book.per_s("a", 500.0) == pytest.approx(2.0, rel=0.05)
    assert book.count("a", 510.0) == pytest.approx(book.count("a", 500.0) / 2)
    assert book.count("never", 500.0) == 0.0


def test_clocks_of_any_size_are_served():
    book = RateBook(half_life_s=4.0, remembered=100)
    for second in range(4):
        book.record("a", 4e8 + second)
    book.record("b", 4e8 + 3)
    assert book.score("a") > book.score("b")


def test_minimum_residency_holds_an_ordinary_load_back_and_says_until_when(tier):
    cache = tier(slots=2, minimum_residency_s=5.0)
    cache.use("a", "b")
    loaded_at_s = cache.now_s
    assert cache.plan_load("c", SLOT) == Wait("minimum residency", retry_at_s=loaded_at_s - 1.0 + 5.0)
    cache.now_s = loaded_at_s - 1.0 + 5.0
    assert cache.plan_load("c", SLOT) == Start(evict=("a",))


def test_the_retry_time_is_that_of_enough_bytes(tier):
    cache = tier(slots=3, minimum_residency_s=5.0)
    cache.use("a", "b", "c")
    assert cache.plan_load("d", 2 * SLOT) == Wait("minimum residency", retry_at_s=cache.now_s - 1.0 + 5.0)


def test_an_urgent_load_does_not_wait_for_minimum_residency(tier):
    """sglang#17913, #15129: the starvation bound is above the protection against thrash."""
    cache = tier(slots=1, minimum_residency_s=1000.0)
    cache.use("a")
    assert cache.plan_load("b", SLOT, urgent=True) == Start(evict=("a",))


def test_an_explicit_pin_outlasts_absence_and_urgency(tier):
    cache = tier(slots=2)
    cache.pin("pinned")
    assert cache.is_pinned("pinned")
    cache.use("pinned", *KEYS)
    assert "pinned" in cache.resident()
    cache.use("other", after_s=10_000.0)
    assert cache.plan_load("urgent", SLOT, urgent=True) == Start(evict=("other",))
    cache.evicted("other")
    cache.fail_load("urgent")
    view = cache.snapshot()
    assert (view.pinned_bytes, view.free_bytes) == (SLOT, SLOT)


def test_a_pin_set_before_the_load_and_one_taken_away(tier):
    cache = tier(slots=1)
    cache.pin("a")
    cache.use("a")
    assert cache.plan_load("b", SLOT).pinned_bytes == SLOT
    cache.unpin("a")
    assert cache.plan_load("b", SLOT) == Start(evict=("a",))


def automatic(cache):
    return {entry.key for entry in cache.snapshot().entries if entry.auto_pinned}


def test_the_busiest_variants_are_pinned_by_themselves_but_yield_to_urgency(tier):
    cache = tier(slots=2, auto_pins=1)
    cache.use(*["busy"] * 20, "quiet", *["busy"] * 5)
    assert automatic(cache) == {"busy"}
    cache.acquire("quiet")
    assert cache.plan_load("new", SLOT) == Wait("in use", drain=("quiet",))
    cache.release("quiet")
    assert cache.plan_load("large", 2 * SLOT) == Wait("pinned")
    assert cache.plan_load("large", 2 * SLOT, urgent=True).evict in (("busy", "quiet"), ("quiet", "busy"))


def test_an_automatic_pin_does_not_change_hands_between_near_equals(tier):
    cache = tier(slots=4, auto_pins=1)
    cache.use(*["a", "b"] * 20)
    holder = automatic(cache)
    changes = 0
    for key in ["a", "b", "b", "a"] * 50:
        cache.use(key)
        changes += automatic(cache) != holder
    assert changes == 0
    other = ({"a", "b"} - holder).pop()
    cache.use(*[other] * 100)
    assert automatic(cache) == {other}


def test_a_variant_that_went_quiet_loses_its_automatic_pin(tier):
    cache = tier(slots=4, auto_pins=1)
    cache.use(*["a"] * 30)
    assert automatic(cache) == {"a"}
    cache.now_s += 10_000.0
    cache.use("b")
    assert automatic(cache) == set()


def test_automatic_pins_take_no_more_than_their_share(tier):
    cache = tier(slots=4, auto_pins=4, auto_pin_share=0.5)
    cache.use(*["a", "b", "c", "d"] * 20)
    assert len(automatic(cache)) == 2
    small = tier(slots=1, auto_pins=1)
    small.use(*["a"] * 20)
    assert automatic(small) == set()
