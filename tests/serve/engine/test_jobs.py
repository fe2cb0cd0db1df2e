"""The life of a job: accepted or refused, cancelled, stopped, failed; each ends with exactly one last event."""

from __future__ import annotations

import threading

import pytest

from tests.serve.engine.models import Gate, Running, assert_equals_dense, job, load, prompt, run
from zen_train.serve.errors import EngineDeadError
from zen_train.serve.types import Sampling


def test_stop_tokens_end_a_job_and_are_reported(family, start):
    engine = start()
    free = run(engine, job("free", max_tokens=12))
    stop = free.tokens("free")[5]
    first = free.tokens("free").index(stop)
    ended = run(engine, job("ended", max_tokens=12, stop_tokens=frozenset({stop})))
    assert ended.tokens("ended") == free.tokens("free")[: first + 1]
    assert ended.finish("ended") == "stop"
    assert ended.events["ended"][-1].token == stop


def test_min_tokens_forbid_an_early_stop(family, start):
    engine = start()
    stop = run(engine, job("free")).tokens("free")[0]
    late = run(engine, job("late", stop_tokens=frozenset({stop}), min_tokens=4, max_tokens=9))
    assert stop not in late.tokens("late")[:4]


def test_a_cancelled_job_ends_once_and_frees_its_pages(family, start):
    engine = start(max_jobs=2)
    running = Running(engine).submit(
        *(job(f"{n}", max_tokens=100, tokens=prompt(20, seed=n)) for n in range(4))
    )
    running.wait(lambda: len(running.events["0"]) > 3)
    for job_id in ("0", "3", "3", "unknown"):
        engine.cancel(job_id)
    running.wait()
    assert [running.finish(f"{n}") for n in range(4)] == ["cancelled", "length", "length", "cancelled"]
    assert running.events["3"][-1].token is None
    engine.cancel("0")
    assert run(engine, job("next")).finish("next") == "length"
    assert engine.stats().kv_tokens_used == 0


def test_stopping_ends_running_and_waiting_jobs(family, start):
    engine = start(max_jobs=2)
    gate = Gate(engine)
    running = Running(engine).submit(*(job(f"{n}", max_tokens=100) for n in range(5)))
    gate.allow(2)
    running.wait(lambda: running.events["0"])
    threading.Timer(0, gate.open).start()
    engine.stop()
    engine.stop()
    running.wait()
    assert {running.finish(f"{n}") for n in range(5)} == {"cancelled"}
    assert not engine.stats().alive
    with pytest.raises(EngineDeadError):
        engine.submit(job("late"), print)


def test_a_step_that_raises_ends_every_job_and_is_seen_in_the_stats(family, start, monkeypatch):
    """vllm#39863, #36960: a dead engine says so at once, and answers everybody."""
    engine = start(max_jobs=2)
    assert engine.stats().alive
    gate = Gate(engine)
    running = Running(engine).submit(*(job(f"{n}", max_tokens=100) for n in range(5)))
    gate.allow(3)
    running.wait(lambda: len(running.events["0"]) == 3)

    def failing(spans):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(gate, "_forward", failing)
    gate.open()
    running.wait()
    for n in range(5):
        assert running.finish(f"{n}") == "error"
        assert isinstance(running.events[f"{n}"][-1].error, EngineDeadError)
    stats = engine.stats()
    assert not stats.alive
    assert stats.death == "RuntimeError: the device is gone"
    with pytest.raises(EngineDeadError, match="the device is gone"):
        engine.submit(job("late"), print)
    engine.stop()


def test_scores_that_are_not_finite_end_that_job_alone(family, start):
    engine = start()
    load(engine, family, ["a", "b"])
    place = engine._residents._places[family.hash("a")]
    engine._model.tables["final_norm"][place.vector, 0] = float("nan")
    works = [job("good", family.hash("b"), prompt(9)), job("bad", family.hash("a"), prompt(9)), job("base")]
    running = run(engine, *works)
    assert running.finish("bad") == "error"
    assert "not finite" in str(running.events["bad"][-1].error)
    assert_equals_dense(family.dense("b"), works[0], running.events["good"])
    assert_equals_dense(family.dense(None), works[2], running.events["base"])
    assert engine.stats().alive


def test_a_sink_that_raises_ends_its_own_job_alone(family, start):
    engine = start()

    def broken(event):
        raise RuntimeError("closed loop")

    engine.submit(job("broken", max_tokens=50), broken)
    assert run(engine, job("fine")).finish("fine") == "length"
    assert run(engine, job("broken")).finish("broken") == "length", "its id is free again"
    assert engine.stats().alive


def test_a_job_that_could_never_fit_is_refused_at_once(family, start):
    """vllm#29049: not accepted and then failed for want of memory."""
    engine = start(kv_bytes=5 * 8 * 256)
    assert engine.limits.kv_tokens == 40
    with pytest.raises(ValueError, match="room for keys and values 40"):
        engine.submit(job("big", tokens=prompt(30), max_tokens=11), print)
    assert run(engine, job("just", tokens=prompt(30), max_tokens=10)).finish("just") == "length"
    with pytest.raises(ValueError, match="context 128"):
        start().submit(job("long", tokens=prompt(100), max_tokens=29), print)
    for wrong in (
        job("empty", tokens=()),
        job("none", max_tokens=0),
        job("beyond", tokens=(1, 83)),
        job("negative", tokens=(-1,)),
        job("bias", sampling=Sampling(logit_bias={83: 1.0})),
    ):
        with pytest.raises(ValueError, match=wrong.id):
            engine.submit(wrong, print)
    engine.submit(job("twice", max_tokens=9), lambda event: None)
    with pytest.raises(ValueError, match="exists already"):
        engine.submit(job("twice"), print)


def test_long_prompts_with_all_slots_full_stay_within_the_budget(family, start):
    """vllm#29049, #15039: base, slots and keys and values are taken at the start and never grow."""
    engine = start(slots=5, max_jobs=6, kv_bytes=20 * 8 * 256)
    load(engine, family, ["a", "b", "two", "mlp"])
    held = [
        t.data_ptr() for bank in engine._model.banks.values() for t in (bank.sign_VPNB, bank.row_scale_VPN)
    ]
    works = [
        job(f"{n}", family.hash("ab"[n % 2]), prompt(90 + n, seed=n), max_tokens=30) for n in range(8)
    ]  # each takes 15 or 16 of the 20 pages
    running = Running(engine).submit(*works)
    most = 0
    while not running._all_ended():
        most = max(most, engine.stats().kv_tokens_used)
    assert 0 < most <= engine.limits.kv_tokens == 160
    for n, work in enumerate(works):
        assert_equals_dense(family.dense("ab"[n % 2]), work, running.events[work.id])
    assert held == [
        t.data_ptr() for bank in engine._model.banks.values() for t in (bank.sign_VPNB, bank.row_scale_VPN)
    ]
    with pytest.raises(ValueError, match="variant_bytes"):
        start(variant_bytes=1000)
    with pytest.raises(ValueError, match="kv_bytes"):
        start(kv_bytes=1000)


def test_an_idle_engine_takes_no_steps_and_keeps_its_heartbeat(family, start):
    engine = start()
    run(engine, job("w"))
    steps = engine.stats().steps
    assert steps == 8
    assert engine.stats().heartbeat_age_s < 5
    assert engine.stats().steps == steps


def test_the_same_seed_gives_the_same_tokens_in_any_batch(family, start):
    engine = start()
    load(engine, family, ["a"])

    def sampled(job_id, seed):
        sampling = Sampling(temperature=1.3, top_p=0.9, seed=seed)
        return job(job_id, family.hash("a"), prompt(11), max_tokens=20, sampling=sampling)

    alone = run(engine, sampled("alone", 5)).tokens("alone")
    crowd = [sampled(f"{n}", n) for n in range(6)]
    others = [job(f"greedy-{n}", None, prompt(30, seed=n)) for n in range(3)]
    together = run(engine, *others, *crowd)
    assert together.tokens("5") == alone
    assert len({tuple(together.tokens(f"{n}")) for n in range(6)}) == 6
    unseeded = run(engine, sampled("x", None), sampled("y", None))
    assert unseeded.tokens("x") != unseeded.tokens("y")
