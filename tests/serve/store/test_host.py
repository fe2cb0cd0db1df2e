"""The host tier: an artifact's bytes in memory, filled once, counted, and given back."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from zen_train.serve.store import HostTier

SIZES = {"w.sign": 100, "w.alpha": 64, "norm.dense": 7}
STORED = 128 + 64 + 64
"""What they take: each part begins at a multiple of 64 bytes."""


class Filler:
    """Writes the first letter of its name to every byte, and counts."""

    def __init__(self, name: str = "a") -> None:
        self.name, self.calls = name, 0

    def __call__(self, parts):
        self.calls += 1
        for part in parts.values():
            part[:] = self.name[0].encode() * len(part)


@pytest.fixture
def tier():
    """Makes tiers, checked after the test."""
    made = []

    def make(budget_bytes=10 * STORED, **options):
        made.append(HostTier(budget_bytes=budget_bytes, **options))
        return made[-1]

    yield make
    for host in made:
        host.check()


def use(host, name, fill=None):
    """Take a lease of `name` and give it back; whether there was one with the right bytes."""
    with host.lease(name, SIZES, fill or Filler(name)) as parts:
        if parts is None:
            return False
        assert {key: bytes(part) for key, part in parts.items()} == {
            key: name[0].encode() * size for key, size in SIZES.items()
        }
        return True


def resident(host):
    return dict(host.stats().resident)


def test_a_second_lease_fills_nothing(tier):
    host, fill = tier(), Filler()
    for _ in range(3):
        assert use(host, "a", fill)
    assert fill.calls == 1
    stats = host.stats()
    assert (stats.hits, stats.lookups, stats.read_bytes) == (2, 3, 171)
    assert (resident(host), stats.budget_bytes) == ({"a": STORED}, 10 * STORED)


def test_every_part_is_aligned_for_any_dtype(tier):
    with tier().lease("a", SIZES, Filler()) as parts:
        first, *others = (np.frombuffer(part, np.uint8).ctypes.data for part in parts.values())
    assert [(other - first) % 64 for other in others] == [0, 0]


def test_memory_comes_from_the_allocator_and_goes_with_the_entry(tier):
    taken, alive = [], []

    def allocate(size_bytes):
        taken.append(size_bytes)
        array = np.empty(size_bytes, np.uint8)
        alive.append(weakref.ref(array))
        return array.data

    host = tier(STORED, allocate=allocate)
    for name in "aba":
        assert use(host, name)
        assert resident(host) == {name: STORED}
        gc.collect()
        assert [ref() is not None for ref in alive] == [False] * (len(alive) - 1) + [True]
    assert taken == [STORED] * 3


def test_counts_are_told_while_memory_is_being_given_back(tier):
    """Unpinning gigabytes takes a while; the event loop asks meanwhile."""
    told = []

    def allocate(size_bytes):
        array = np.empty(size_bytes, np.uint8)
        weakref.finalize(array, lambda: told.append(ask.submit(resident, host).result(10)))
        return array.data

    with ThreadPoolExecutor(1) as ask:
        host = tier(STORED, allocate=allocate)
        for name in "ab":
            assert use(host, name)
        host.remove("b")
        assert told == [{}, {}]


def test_what_is_leased_is_not_evicted(tier):
    host = tier(STORED)
    with host.lease("a", SIZES, Filler("a")) as parts:
        assert not use(host, "b")
        assert bytes(parts["norm.dense"]) == b"a" * 7
    assert use(host, "b")


@pytest.mark.parametrize("budget_bytes", [0, STORED - 1])
def test_without_room_nothing_is_filled(tier, budget_bytes):
    host, fill = tier(budget_bytes), Filler()
    assert not use(host, "a", fill)
    assert fill.calls == host.stats().read_bytes == 0


def test_memory_that_cannot_be_had_is_no_room_and_the_next_tries_again(tier, caplog):
    broken = [True]

    def allocate(size_bytes):
        if broken:
            raise MemoryError("could not be pinned")
        return memoryview(bytearray(size_bytes))

    host = tier(allocate=allocate)
    assert not use(host, "a")
    assert "lower engine.host_bytes: could not be pinned" in caplog.text
    assert resident(host) == {}
    broken.clear()
    assert use(host, "a")


def test_several_threads_fill_one_artifact_once(tier):
    """vllm#15733, ai-dynamo/dynamo#5184"""
    host, fill = tier(), Filler()
    barrier, seen = threading.Barrier(8), []

    def work():
        barrier.wait()
        seen.append(use(host, "a", fill))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8
    assert fill.calls == 1


def test_a_failure_leaves_nothing_and_the_next_tries_again(tier):
    """vllm#11727"""
    host = tier(STORED)

    def fail(parts):
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"), host.lease("a", SIZES, fail):
        pass
    assert resident(host) == {}
    assert use(host, "b")
    assert use(host, "a")


def test_who_waits_for_a_fill_that_fails_fills_it(tier):
    host, begun = tier(STORED), threading.Event()

    def fail(parts):
        begun.set()
        second.join(0.1)  # by then it waits; if not, it finds nothing and fills, too
        raise ValueError("damaged")

    got = []
    second = threading.Thread(target=lambda: begun.wait(30) and got.append(use(host, "a")))
    second.start()
    with pytest.raises(ValueError, match="damaged"), host.lease("a", SIZES, fail):
        pass
    second.join(30)
    assert got == [True]


def test_a_removed_artifact_gives_its_memory_back_after_its_last_lease(tier):
    host, fill = tier(), Filler()
    with ExitStack() as leases:
        leases.enter_context(host.lease("a", SIZES, fill))
        host.remove("a")
        assert resident(host) == {"a": STORED}
    assert resident(host) == {}
    host.remove("a")
    assert use(host, "a", fill)
    assert fill.calls == 2
