"""Chunks, seats, pages and preemption, without tensors."""

from __future__ import annotations

import random

import pytest

from tests.serve.engine.models import job
from zen_train.serve.engine.pages import PagePool
from zen_train.serve.engine.scheduler import Scheduler
from zen_train.serve.engine.sequence import Sequence
from zen_train.serve.engine.slots import BASE_PLACE


class Bench:
    """A scheduler whose forward is `computed += count`."""

    def __init__(self, *, pages=100, page_tokens=8, max_jobs=8, chunk=32):
        self.pool = PagePool(pages, page_tokens)
        self.scheduler = Scheduler(self.pool, max_jobs=max_jobs, prefill_chunk_tokens=chunk)
        self.arrivals = 0

    def add(self, name, prompt_tokens, max_tokens=1000):
        work = job(name, tokens=(1,) * prompt_tokens, max_tokens=max_tokens)
        sequence = Sequence.of(work, lambda event: None, BASE_PLACE, self.arrivals)
        self.arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """Run one step; the counts by job."""
        spans = self.scheduler.plan()
        counts = {span.sequence.job.id: span.count for span in spans}
        ending = [span.sequence for span in spans if span.reaches_end]
        for span in spans:
            span.sequence.computed += span.count
        for sequence in ending:
            sequence.tokens.append(1)
            if sequence.generated_tokens == sequence.job.max_tokens:
                self.scheduler.remove(sequence)
        self.scheduler.check()
        return counts


def test_decodes_go_on_in_every_step_while_a_long_prompt_is_computed():
    bench = Bench(chunk=32)
    bench.add("decode", 4)
    assert bench.step() == {"decode": 4}
    bench.add("long", 200)
    for _ in range(6):
        assert bench.step() == {"decode": 1, "long": 32}
    assert bench.step() == {"decode": 1, "long": 8}
    assert bench.step() == {"decode": 1, "long": 1}


def test_a_short_prompt_does_not_wait_for_a_long_one():
    bench = Bench(chunk=32)
    bench.add("long", 400)
    bench.step()
    bench.add("short", 10)
    assert bench.step() == {"long": 22, "short": 10}
    assert bench.step() == {"short": 1, "long": 32}


def test_the_oldest_prompt_advances_however_many_short_ones_come():
    bench = Bench(chunk=32, max_jobs=64, pages=1000)
    bench.add("long", 160)
    for number in range(10):
        bench.add(f"short-{number}", 16, max_tokens=1)
        bench.add(f"other-{number}", 16, max_tokens=1)
        assert bench.step()["long"] == 16


def test_jobs_beyond_the_seats_wait_in_the_order_of_arrival():
    bench = Bench(max_jobs=2)
    for name in "abc":
        bench.add(name, 3, max_tokens=2 if name == "a" else 10)
    assert set(bench.step()) == {"a", "b"}
    assert set(bench.step()) == {"a", "b"}
    assert set(bench.step()) == {"b", "c"}


def test_the_youngest_job_gives_way_when_pages_run_out_and_comes_back():
    bench = Bench(pages=4, page_tokens=8)
    old, young = bench.add("old", 8, max_tokens=20), bench.add("young", 7, max_tokens=12)
    bench.step()
    while not bench.scheduler.preemptions:
        bench.step()
    assert young.seat < 0
    assert young.computed == 0
    assert young.generated_tokens > 0
    kept = list(young.tokens)
    while bench.scheduler.has_work():
        bench.step()
    assert young.tokens[: len(kept)] == kept
    assert (old.generated_tokens, young.generated_tokens) == (20, 12)


@pytest.mark.parametrize(
    ("pages", "jobs", "prompt", "output"), [(12, 4, 20, 40), (30, 8, 9, 80), (6, 3, 9, 30)]
)
def test_a_preempted_job_comes_back_to_stay(pages, jobs, prompt, output):
    """Equal jobs: each of the younger ones gives way once at most, not again as soon as it is back."""
    bench = Bench(pages=pages, page_tokens=8)
    for number in range(jobs):
        bench.add(f"{number}", prompt, max_tokens=output)
    while bench.scheduler.has_work():
        bench.step()
    assert 0 < bench.scheduler.preemptions <= jobs - 1


@pytest.mark.parametrize("seed", range(6))
def test_every_job_of_a_random_stream_ends_and_the_books_balance(seed):
    rng = random.Random(seed)
    bench = Bench(
        pages=rng.randint(5, 30), page_tokens=8, max_jobs=rng.randint(1, 6), chunk=rng.randint(1, 40)
    )
    room = bench.pool.total * bench.pool.page_tokens
    wanted, alive = {}, []
    for number in range(60):
        prompt_tokens = rng.randint(1, room - 1)
        sequence = bench.add(f"{number}", prompt_tokens, rng.randint(1, min(25, room - prompt_tokens)))
        wanted[sequence] = sequence.job.max_tokens
        alive.append(sequence)
        for _ in range(rng.randint(0, 4)):
            bench.step()
        if rng.random() < 0.1:
            victim = rng.choice(alive)
            if victim.generated_tokens < victim.job.max_tokens and victim in wanted:
                bench.scheduler.remove(victim)
                wanted.pop(victim)
            bench.scheduler.check()
    for _ in range(20_000):
        if not bench.scheduler.has_work():
            break
        bench.step()
    assert all(sequence.generated_tokens == count for sequence, count in wanted.items())
    assert bench.pool.free == bench.pool.total
