"""Health, readiness, metrics and the page's document, before traffic, under it, and when the engine is gone."""

import re
import signal
import threading

import openai
import pytest

from tests.serve.api.stage import ScriptEngine, serving
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.types import HostStats

ASK = [{"role": "user", "content": "hi"}]


def series(stage) -> dict[str, float]:
    lines = stage.http().get("/metrics").text.splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")
    }


def asking(stage, failures: list) -> threading.Thread:
    """Ask in a thread; the server's error, if there is one, is added to `failures`."""

    def ask():
        try:
            stage.client().chat.completions.create(model="tiny", messages=ASK)
        except openai.InternalServerError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_what_is_resident_is_shown_before_any_traffic_with_one_series_a_variant(tmp_path):
    """vllm#45325."""
    with serving(tmp_path) as stage:
        found = series(stage)
        loaded = {name: value for name, value in found.items() if name.startswith("zen_variant_loaded")}
        assert loaded == {
            'zen_variant_loaded{pinned="false",tier="device",variant="tiny"}': 1.0,
            'zen_variant_loaded{pinned="false",tier="disk",variant="zen4-coder"}': 0.0,
            'zen_variant_loaded{pinned="false",tier="disk",variant="zen4-math"}': 0.0,
        }
        for name in ("zen4-coder", "zen4-math"):
            assert found[f'zen_variant_cache_hits_total{{variant="{name}"}}'] == 0
            assert found[f'zen_variant_cache_lookups_total{{variant="{name}"}}'] == 0
            assert found[f'zen_variant_load_seconds_count{{variant="{name}"}}'] == 0
            assert found[f'zen_time_to_first_token_seconds_count{{variant="{name}"}}'] == 0
        assert found["zen_ready"] == found["zen_engine_alive"] == 1
        assert found["process_resident_memory_bytes"] > 1e6


def test_traffic_is_counted_by_variant(tmp_path):
    with serving(tmp_path) as stage:
        for _ in range(3):
            stage.client().chat.completions.create(model="zen4-coder", messages=ASK, max_tokens=5)
        stage.client().chat.completions.create(model="tiny", messages=ASK, max_tokens=5)
        found = series(stage)
        assert found['zen_variant_loaded{pinned="false",tier="device",variant="zen4-coder"}'] == 1
        assert found['zen_variant_cache_lookups_total{variant="zen4-coder"}'] == 3
        assert found['zen_variant_cache_hits_total{variant="zen4-coder"}'] == 2
        assert found['zen_variant_load_seconds_count{variant="zen4-coder"}'] == 1
        assert found['zen_time_to_first_token_seconds_count{variant="zen4-coder"}'] == 3
        assert found['zen_generation_tokens_total{variant="zen4-coder"}'] == 15
        assert found['zen_prompt_tokens_total{variant="tiny"}'] > 0
        assert found['zen_sequences_total{outcome="length",variant="zen4-coder"}'] == 3
        assert found['zen_requests_total{route="/v1/chat/completions",status="200"}'] == 4
        assert found["zen_inter_token_seconds_count"] > 0


def test_label_values_stay_bounded_whatever_is_asked(tmp_path):
    """vllm#45325: no series from a request's text."""
    with serving(tmp_path) as stage:
        for index in range(20):
            stage.http().get(f"/made-up/{index}")
            stage.http().get(f"/v1/models/made-up-{index}")
            stage.http().post("/v1/chat/completions", json={"model": f"made-up-{index}", "messages": ASK})
        text = stage.http().get("/metrics").text
        assert "made-up" not in text
        routes = set(re.findall(r'zen_requests_total\{route="([^"]*)"', text))
        assert routes <= {"other", "/metrics", "/v1/models/{model:path}", "/v1/chat/completions"}


def test_a_variant_that_comes_later_has_its_series_and_loses_them_when_it_goes(tmp_path):
    """vllm#45325."""
    with serving(tmp_path) as stage:
        stage.catalogue.folder("new")
        stage.http().post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "new"})
        assert 'zen_variant_loaded{pinned="false",tier="device",variant="new"}' in series(stage)
        stage.http().post("/v1/unload_lora_adapter", json={"lora_name": "new"})
        assert not any('variant="new"' in name for name in series(stage))


def test_a_dead_engine_is_not_ready_while_the_process_is_healthy(tmp_path):
    """vllm#39863, #36960."""
    with serving(tmp_path, engine=ScriptEngine(reply=lambda _: "x" * 400, step_s=0.005)) as stage:
        assert stage.http().get("/ready").json() == {"status": "ready"}
        failures = []
        thread = asking(stage, failures)
        stage.until(lambda: stage.engine.jobs, "a job runs")
        stage.engine.die("a step raised")
        thread.join(10)
        assert [error.code for error in failures] == ["engine_dead"]
        stage.until(lambda: stage.http().get("/ready").status_code == 503, "readiness falls")
        assert "a step raised" in stage.http().get("/ready").json()["reason"]
        assert stage.http().get("/health").status_code == 200
        assert series(stage)["zen_ready"] == series(stage)["zen_engine_alive"] == 0
        with pytest.raises(openai.InternalServerError) as caught:
            stage.client().chat.completions.create(model="tiny", messages=ASK)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")
        assert stage.http().get("/status.json").json()["engine"]["death"] == "a step raised"


def test_a_hanging_engine_is_given_up_within_its_bound(tmp_path):
    """vllm#39863, #36960."""
    router = RouterConfig(hang_s=0.3, watch_interval_s=0.05)
    with serving(tmp_path, router=router) as stage:
        stage.engine.go.clear()
        with pytest.raises(openai.InternalServerError) as caught:
            stage.client().chat.completions.create(model="tiny", messages=ASK)
        assert caught.value.code == "engine_dead"
        assert stage.http().get("/ready").status_code == 503
        assert stage.http().get("/health").status_code == 200
        stage.engine.death = "hung"  # so that nobody checks the router's books of a server that is given up


def test_draining_finishes_what_runs_refuses_what_is_new_and_says_not_ready(tmp_path):
    with serving(tmp_path, engine=ScriptEngine(reply=lambda _: "word " * 20, step_s=0.002)) as stage:
        chunks = iter(stage.client().chat.completions.create(model="tiny", messages=ASK, stream=True))
        said = [next(chunks)]
        stage.engine.go.clear()
        stage.server.handle_exit(signal.SIGTERM, None)
        stage.until(lambda: stage.http().get("/ready").status_code == 503, "not ready")
        assert stage.http().get("/ready").json()["reason"] == "the server is draining"
        refused = stage.http().post("/v1/chat/completions", json={"model": "tiny", "messages": ASK})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        stage.engine.go.set()
        said += chunks
        assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == "word " * 20
        stage.until(lambda: stage.server.should_exit, "the server ends")


def test_what_does_not_finish_in_time_is_cut_off_with_an_error(tmp_path):
    with serving(tmp_path, drain_s=0.2) as stage:
        stage.engine.go.clear()
        thread = threading.Timer(0.0, stage.server.handle_exit, (signal.SIGTERM, None))
        failures = []
        request = asking(stage, failures)
        stage.until(lambda: stage.engine.jobs, "a job runs")
        thread.start()
        request.join(10)
        assert [error.code for error in failures] == ["overloaded"]


def test_the_version_names_what_serves(stage):
    version = stage.http().get("/version").json()
    assert set(version) == {"version", "python", "torch", "transformers"}


def test_the_status_document_has_what_the_page_draws(tmp_path):
    with serving(tmp_path) as stage:
        stage.client().chat.completions.create(model="zen4-coder", messages=ASK)
        status = stage.http().get("/status.json").json()
        coder = next(view for view in status["variants"] if view["name"] == "zen4-coder")
        assert coder["tier"] == "device"
        assert coder["first_token_p50_s"] > 0
        assert len(coder["first_token_recent_s"]) == 1
        assert status["device_bytes"] == {"used": 1000, "budget": 4000}
        columns = status["history"]
        assert {len(column) for column in columns.values()} == {len(columns["age_s"])}
        assert columns["age_s"][-1] == 0


def test_host_memory_is_shown_where_there_is_a_host_tier(tmp_path):
    with serving(tmp_path) as stage:
        assert stage.http().get("/status.json").json()["host"] is None
        assert not any(name.startswith("zen_host") for name in series(stage))
        stage.engine.host = HostStats(
            budget_bytes=5000,
            resident={"hash-of-zen4-math": 1500, "unknown": 500},
            hits=3,
            lookups=4,
            read_bytes=900,
        )
        status, found = stage.http().get("/status.json").json(), series(stage)
        assert status["host"] == {"used": 2000, "budget": 5000, "hits": 3, "lookups": 4, "read_bytes": 900}
        tiers = {view["name"]: view["tier"] for view in status["variants"]}
        assert tiers == {"tiny": "device", "zen4-coder": "disk", "zen4-math": "host"}
        assert found['zen_variant_loaded{pinned="false",tier="host",variant="zen4-math"}'] == 0
        shown = {name: value for name, value in found.items() if name.startswith("zen_host")}
        assert shown == {
            "zen_host_variant_bytes_used": 2000,
            "zen_host_variant_bytes_budget": 5000,
            "zen_host_hits_total": 3,
            "zen_host_lookups_total": 4,
            "zen_host_read_bytes_total": 900,
        }


def test_the_page_is_plain_files_that_may_load_nothing_from_elsewhere(stage):
    for path, kind in [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")]:
        answer = stage.http().get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
        assert "innerHTML" not in answer.text
