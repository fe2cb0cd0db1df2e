"""Variants through the API: listed, loaded, replaced, removed, broken; and what went wrong elsewhere."""

import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.serve.api.stage import ScriptEngine, serving

ASK = [{"role": "user", "content": "hi"}]


def say(stage, model, **settings):
    return stage.client().chat.completions.create(model=model, messages=ASK, **settings)


def text_of(stage, model, **settings):
    return say(stage, model, **settings).choices[0].message.content


def test_models_list_the_base_and_variants_with_root_and_parent(stage):
    models = stage.client().models.list().data
    assert [model.id for model in models] == ["tiny", "zen4-coder", "zen4-math"]
    base, coder = models[0], models[1]
    assert (base.root, base.parent, base.content_hash) == ("tiny", None, "ba5e" * 16)
    assert (coder.root, coder.parent, coder.content_hash) == ("zen4-coder", "tiny", "hash-of-zen4-coder")
    assert coder.created == 1_700_000_000
    assert stage.client().models.retrieve("zen4-coder") == coder
    with pytest.raises(openai.NotFoundError):
        stage.client().models.retrieve("zen4-codr")


def test_a_cold_miss_delays_neither_the_base_nor_resident_variants(tmp_path):
    """sglang#14795."""
    with serving(tmp_path) as stage:
        text_of(stage, "zen4-math")
        stage.engine.may_load.clear()
        with ThreadPoolExecutor() as pool:
            cold = pool.submit(text_of, stage, "zen4-coder")
            stage.until(lambda: stage.engine.loads[-1] == "hash-of-zen4-coder", "its load began")
            assert text_of(stage, "tiny").startswith("base")
            assert text_of(stage, "zen4-math").startswith("hash-of-zen4-math")
            assert not cold.done()
            stage.engine.may_load.set()
            assert cold.result().startswith("hash-of-zen4-coder")


def test_many_requests_for_one_cold_variant_are_one_load_and_all_are_answered(tmp_path):
    """vllm#15733, dynamo#5184: 64 requests, one read."""
    with serving(tmp_path) as stage:
        stage.engine.may_load.clear()
        with ThreadPoolExecutor(64) as pool:
            waiting = [pool.submit(text_of, stage, "zen4-coder") for _ in range(64)]
            stage.until(lambda: stage.services.router.snapshot().queued == 64, "64 wait")
            stage.engine.may_load.set()
            assert {answer.result() for answer in waiting} == {"hash-of-zen4-coder heard i\nassistant"}
        assert stage.engine.loads == ["hash-of-zen4-coder"]


def test_a_failed_load_reaches_all_who_wait_and_the_next_request_tries_again(tmp_path):
    """vllm#15733, dynamo#5184."""
    with serving(tmp_path) as stage:
        stage.engine.broken.add("hash-of-zen4-coder")
        stage.engine.may_load.clear()
        with ThreadPoolExecutor(64) as pool:
            streams = [False, True]
            waiting = [pool.submit(say, stage, "zen4-coder", stream=streams[i % 2]) for i in range(64)]
            stage.until(lambda: stage.services.router.snapshot().queued == 64, "64 wait")
            stage.engine.may_load.set()
            for answer in waiting:
                with pytest.raises(openai.InternalServerError) as caught:
                    answer.result()
                assert caught.value.status_code == 503
                assert caught.value.code == "variant_unusable"
                assert "digest" in str(caught.value)
        assert stage.engine.loads == ["hash-of-zen4-coder"]
        stage.engine.broken.clear()
        assert text_of(stage, "zen4-coder").startswith("hash-of-zen4-coder")


def test_an_unloaded_variant_is_404_at_once_and_its_bytes_are_free(tmp_path):
    """vllm#54839, sglang#36894: unload returns always."""
    with serving(tmp_path) as stage:
        text_of(stage, "zen4-coder")
        assert "hash-of-zen4-coder" in stage.engine.resident
        answer = stage.http().post("/v1/unload_lora_adapter", json={"lora_name": "zen4-coder"})
        assert answer.status_code == 200
        assert stage.engine.resident == {}
        with pytest.raises(openai.NotFoundError):
            say(stage, "zen4-coder")
        again = stage.http().post("/v1/unload_lora_adapter", json={"lora_name": "zen4-coder"})
        assert again.status_code == 404
        assert (
            'zen_variant_cache_lookups_total{variant="zen4-coder"}' not in stage.http().get("/metrics").text
        )


def test_an_unload_during_a_stream_lets_it_finish(tmp_path):
    """vllm#54839, sglang#36894."""
    with serving(
        tmp_path, engine=ScriptEngine(reply=lambda job: f"{job.variant_hash} " * 9, step_s=0.002)
    ) as stage:
        chunks = iter(say(stage, "zen4-coder", stream=True))
        said = [next(chunks)]
        with ThreadPoolExecutor() as pool:
            unload = pool.submit(
                stage.http().post, "/v1/unload_lora_adapter", json={"lora_name": "zen4-coder"}
            )
            said += chunks
            assert unload.result().status_code == 200
        text = "".join(chunk.choices[0].delta.content or "" for chunk in said)
        assert text == "hash-of-zen4-coder " * 9
        assert said[-1].choices[0].finish_reason == "stop"


def test_new_weights_under_a_name_answer_new_requests_and_old_streams_keep_the_old(tmp_path):
    """vllm#42125, #30931."""
    with serving(
        tmp_path, engine=ScriptEngine(reply=lambda job: f"{job.variant_hash} " * 9, step_s=0.002)
    ) as stage:
        chunks = iter(say(stage, "zen4-coder", stream=True))
        said = [next(chunks)]
        body = {"lora_name": "zen4-coder", "lora_path": "zen4-coder"}
        assert stage.http().post("/v1/load_lora_adapter", json=body).status_code == 409
        answer = stage.http().post("/v1/load_lora_adapter", json=body | {"load_inplace": True})
        assert answer.status_code == 200
        assert answer.json()["content_hash"] == "hash-1-of-zen4-coder"
        new = say(stage, "zen4-coder")
        assert new.choices[0].message.content == "hash-1-of-zen4-coder " * 9
        said += chunks
        assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == "hash-of-zen4-coder " * 9
        assert said[0].system_fingerprint != new.system_fingerprint
        stage.until(lambda: list(stage.engine.resident) == ["hash-1-of-zen4-coder"], "the old one left")


def test_a_request_that_waits_while_its_variant_is_replaced_is_answered_by_the_new_one(tmp_path):
    """vllm#42125, #30931: its prompt is made again, with the new template."""
    with serving(tmp_path) as stage:
        stage.engine.may_load.clear()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(say, stage, "zen4-coder")
            stage.until(lambda: stage.services.router.snapshot().queued == 1, "it waits")
            folder = stage.catalogue.variants["zen4-coder"].folder
            body = {"lora_name": "zen4-coder", "lora_path": "zen4-coder", "load_inplace": True}
            load = pool.submit(stage.http().post, "/v1/load_lora_adapter", json=body)
            stage.until(
                lambda: stage.services.router.variant("zen4-coder").content_hash == "hash-1-of-zen4-coder",
                "replaced",
            )
            (folder / "chat_template.jinja").write_text("NEW")
            stage.engine.broken.add("hash-of-zen4-coder")  # its files are no longer there
            stage.engine.may_load.set()
            assert load.result().status_code == 200
            answer = waiting.result()
        assert answer.choices[0].message.content == "hash-1-of-zen4-coder heard NEW"
        assert answer.system_fingerprint == "fp_hash-1-of-zen4-c"


def test_a_new_variant_is_loaded_by_path_and_served(tmp_path):
    with serving(tmp_path) as stage:
        stage.catalogue.folder("fresh")
        body = {"lora_name": "my/fresh one", "lora_path": "fresh"}
        answer = stage.http().post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["on_device"] is True
        assert text_of(stage, "my/fresh one").startswith("hash-0-of-my/fresh one")
        assert stage.client().models.retrieve("my/fresh one").parent == "tiny"


def test_a_load_that_cannot_be_is_an_error_and_changes_nothing(tmp_path):
    with serving(tmp_path) as stage:
        for body, status in [
            ({"lora_name": "x", "lora_path": "../../etc"}, 400),
            ({"lora_name": "x", "lora_path": "absent"}, 400),
            ({"lora_name": "tiny", "lora_path": "zen4-math"}, 409),
            ({"lora_name": "", "lora_path": "zen4-math"}, 400),
            ({"lora_name": "x"}, 400),
            ({"lora_name": "x", "lora_path": 3}, 400),
        ]:
            answer = stage.http().post("/v1/load_lora_adapter", json=body)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["message"]
        assert [model.id for model in stage.client().models.list()] == ["tiny", "zen4-coder", "zen4-math"]


def test_a_variant_without_its_tokenizer_is_an_error_of_its_own(tmp_path):
    """vllm#11727: files that vanished fail that request, everything else lives on."""
    with serving(tmp_path) as stage:
        for path in stage.catalogue.variants["zen4-coder"].folder.iterdir():
            path.unlink()
        with pytest.raises(openai.InternalServerError) as caught:
            say(stage, "zen4-coder")
        assert caught.value.code == "variant_unusable"
        assert text_of(stage, "zen4-math").startswith("hash-of-zen4-math")


def test_a_variant_whose_folder_vanished_is_an_error_of_its_own(tmp_path):
    """vllm#11727."""
    with serving(
        tmp_path, names=("zen4-coder", "zen4-math", "zen4-chat"), engine=ScriptEngine(slots=1)
    ) as stage:
        text_of(stage, "zen4-coder")
        text_of(stage, "zen4-math")  # takes the only slot
        folder = stage.catalogue.variants["zen4-coder"].folder
        folder.rename(folder.with_name("elsewhere"))
        with pytest.raises(openai.InternalServerError) as caught:
            say(stage, "zen4-coder")
        assert caught.value.code == "variant_unusable"
        assert text_of(stage, "zen4-chat").startswith("hash-of-zen4-chat")


def test_a_pinned_variant_stays_while_others_come_and_go(tmp_path):
    with serving(tmp_path, names=("a", "b", "c"), engine=ScriptEngine(slots=2)) as stage:
        answer = stage.http().post("/v1/pin", json={"model": "a"})
        assert answer.json() == {"id": "a", "pinned": True, "on_device": True}
        for name in ("b", "c", "b", "c"):
            text_of(stage, name)
        assert "hash-of-a" in stage.engine.resident
        assert (
            'zen_variant_loaded{pinned="true",tier="device",variant="a"} 1.0'
            in stage.http().get("/metrics").text
        )
        assert stage.http().post("/v1/unpin", json={"model": "a"}).json() == {"id": "a", "pinned": False}
        assert stage.http().post("/v1/pin", json={"model": "nope"}).status_code == 404
        assert stage.http().post("/v1/pin", json={"model": "tiny"}).status_code == 409


def test_more_variants_than_slots_and_the_base_at_once_are_all_answered(tmp_path):
    """sglang#23141."""
    names = tuple(f"v{index}" for index in range(6))
    with (
        serving(tmp_path, names=names, engine=ScriptEngine(slots=2)) as stage,
        ThreadPoolExecutor(14) as pool,
    ):
        gate = threading.Barrier(14)

        def ask(name):
            gate.wait()
            return text_of(stage, name)

        asked = [*names, "tiny"] * 2
        for name, answer in zip(asked, pool.map(ask, asked), strict=True):
            assert answer.startswith("base" if name == "tiny" else f"hash-of-{name} ")
