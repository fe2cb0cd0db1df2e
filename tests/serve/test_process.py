"""`python -m zen_train.serve` as a user runs it: a process, the torch engine on the tiny base, the official client."""

import contextlib
import signal
import socket
import threading

import openai
import pytest

from tests.serve.processes import export, server_process

ASK = [{"role": "user", "content": "What is 1 plus 2?"}]
SETTINGS = ("base=tiny", "port=0", "engine.slots=2", "engine.max_planes=1", "engine.kv_bytes=4000000")


@pytest.fixture(scope="module")
def variants(tiny_base, tmp_path_factory):
    """Two variants as training leaves them, and a broken one."""
    root = tmp_path_factory.mktemp("run") / "outputs"
    for seed, name in enumerate(("coder", "math"), start=1):
        export(tiny_base, root / name / "delta", name, seed=seed)
    (root / "torn" / "delta").mkdir(parents=True)
    (root / "torn" / "delta" / "delta_config.json").write_text("{")
    return root


@pytest.fixture(scope="module")
def server(variants):
    """With no word about variants: what `outputs/` holds is served."""
    with server_process(*SETTINGS, "rescan_s=0.2", cwd=variants.parent) as running:
        running.wait_until_it_serves()
        yield running


def answer(server, model, **settings):
    """With a seed, so that equal weights say the same; greedy, a random tied model repeats its last token for ever."""
    return server.client().chat.completions.create(
        model=model, messages=ASK, **{"max_tokens": 24, "seed": 3} | settings
    )


def test_the_start_says_what_is_served_and_what_is_not(server):
    said = server.output()
    for word in ("zen4-coder", "zen4-math", "not served", "torn", "budget", "/v1", "status page"):
        assert word in said
    assert "Traceback" not in said


def test_the_client_talks_to_the_base_and_to_each_variant(server):
    models = [model.id for model in server.client().models.list()]
    assert models == ["tiny", "zen4-coder", "zen4-math"]
    texts = {model: answer(server, model).choices[0].message.content for model in models}
    assert len(set(texts.values())) == 3
    for model in models:  # the same again, whatever ran in between
        assert answer(server, model).choices[0].message.content == texts[model]


def test_a_stream_says_what_the_whole_answer_says(server):
    whole = answer(server, "zen4-coder", max_tokens=60)
    chunks = list(
        answer(server, "zen4-coder", max_tokens=60, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert {chunk.model for chunk in chunks} == {"zen4-coder"}


def test_a_seed_gives_the_same_answer_and_logprobs_are_probabilities(server):
    settings = {"temperature": 1.0, "seed": 11, "logprobs": True, "top_logprobs": 3}
    first, again = answer(server, "zen4-math", **settings), answer(server, "zen4-math", **settings)
    assert first.choices[0].message.content == again.choices[0].message.content
    for entry in first.choices[0].logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3


def test_a_broken_variant_says_why_and_an_unknown_one_is_404(server):
    """text-generation-inference#2505, vllm#34186."""
    with pytest.raises(openai.InternalServerError) as caught:
        answer(server, "zen4-torn")
    assert caught.value.code == "variant_unusable"
    with pytest.raises(openai.NotFoundError):
        answer(server, "zen4-absent")


def test_a_variant_that_is_exported_while_the_server_runs_is_served_replaced_and_removed(
    server, variants, tiny_base
):
    """vllm#42125, #30931: new weights under the same name answer as a fresh server would."""
    folder = export(tiny_base, variants / "late" / "delta", "late", seed=5)
    names = lambda: [model.id for model in server.client().models.list()]  # noqa: E731
    server.until(lambda: "zen4-late" in names(), "the new variant is served")
    before = server.client().models.retrieve("zen4-late").content_hash
    old = answer(server, "zen4-late").choices[0].message.content
    export(tiny_base, folder, "late", seed=6)
    server.until(
        lambda: server.client().models.retrieve("zen4-late").content_hash != before, "the new weights"
    )
    new = answer(server, "zen4-late").choices[0].message.content
    assert new != old
    export(tiny_base, variants / "twin" / "delta", "twin", seed=6)
    server.until(lambda: "zen4-twin" in names(), "its twin is served")
    assert answer(server, "zen4-twin").choices[0].message.content == new
    for name in ("late", "twin"):
        reply = server.client().post(
            "/unload_lora_adapter", body={"lora_name": f"zen4-{name}"}, cast_to=object
        )
        assert reply["deleted"] is True
    assert "zen4-late" not in names()


def test_two_servers_cannot_share_a_port(server, tmp_path):
    port = server.url.rsplit(":", 1)[1]
    with server_process("base=tiny", f"port={port}", cwd=tmp_path) as second:
        assert second.wait() == 2
        assert f"cannot listen on 127.0.0.1 port {port}" in second.output().replace("\n", " ")
        assert "port=0" in second.output()
        assert "Traceback" not in second.output()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["base=./absent"], "no such folder"),
        (["base=smol"], "Did you mean smollm2"),
        (["prt=1"], "Did you mean port"),
        (["engine.slots=0"], "engine.slots=0"),
        (["host=256.1.1.1"], "cannot listen"),
        (["base=tiny", "port=0", "engine.kv_bytes=1"], "kv_bytes"),
        (["port"], "key=value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_started_is_told_in_one_message(words, hint, tmp_path):
    with server_process(*words, cwd=tmp_path) as process:
        assert process.wait(120) == 2
        assert hint in process.output()
        assert "Traceback" not in process.output()


def test_no_variants_is_fine(tmp_path):
    with server_process(*SETTINGS, cwd=tmp_path) as process:
        process.wait_until_it_serves()
        assert "no variants in outputs yet" in process.output()
        assert answer(process, "tiny").choices[0].message.content is not None
        process.process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_a_variant_that_leaves_the_device_waits_in_host_memory_until_it_is_removed(variants):
    words = ("engine.slots=1", "engine.host_bytes=50000000", "router.cache.minimum_residency_s=0")
    with server_process(*SETTINGS, *words, cwd=variants.parent) as process:
        process.wait_until_it_serves()
        assert "host memory" in process.output()
        said = [answer(process, f"zen4-{name}").choices[0].message.content for name in ("coder", "math") * 2]
        assert said[:2] == said[2:]
        status = process.get("/status.json").json()
        # Other tests may have added variants.
        tiers = {view["name"]: view["tier"] for view in status["variants"]}
        assert (tiers["tiny"], tiers["zen4-coder"], tiers["zen4-math"]) == ("device", "host", "device")
        assert (status["host"]["hits"], status["host"]["lookups"]) == (2, 4)
        held = status["host"]["used"]
        process.client().post("/unload_lora_adapter", body={"lora_name": "zen4-coder"}, cast_to=object)
        process.until(
            lambda: process.get("/status.json").json()["host"]["used"] == held // 2, "its memory is free"
        )
        assert f"zen_host_variant_bytes_used {held / 2}" in process.get("/metrics").text


def test_sigterm_lets_a_stream_finish_and_says_not_ready_meanwhile(variants):
    with server_process(*SETTINGS, "drain_s=60", cwd=variants.parent) as process:
        process.wait_until_it_serves()
        stream = answer(process, "zen4-coder", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
        chunks = iter(stream)
        said = [next(chunks)]
        process.process.send_signal(signal.SIGTERM)
        process.until(lambda: process.get("/ready").status_code == 503, "not ready")
        assert process.get("/health").status_code == 200
        with pytest.raises(openai.InternalServerError):
            answer(process, "tiny")
        said += chunks
        assert said[-1].choices[0].finish_reason == "length"
        assert process.wait() == 0
        assert "Traceback" not in process.output()


def test_a_second_signal_ends_at_once(variants):
    with server_process(*SETTINGS, "drain_s=600", cwd=variants.parent) as process:
        process.wait_until_it_serves()

        def ask():
            with contextlib.suppress(Exception):  # the connection breaks in one way or another
                for _ in answer(
                    process, "tiny", max_tokens=450, stream=True, n=16, extra_body={"ignore_eos": True}
                ):
                    pass

        asking = threading.Thread(target=ask)
        asking.start()
        process.until(lambda: process.get("/status.json").json()["running"] > 0, "it runs")
        process.process.send_signal(signal.SIGINT)
        process.until(lambda: "draining" in process.output(), "it drains")
        process.process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        asking.join(20)


def test_the_port_is_free_again_after_the_end(tmp_path):
    with server_process(*SETTINGS, cwd=tmp_path) as process:
        process.wait_until_it_serves()
        port = int(process.url.rsplit(":", 1)[1])
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


@pytest.mark.real
def test_the_real_base_and_a_variant_answer_a_question(real_base, tmp_path):
    with server_process(
        f"base={real_base}", "base_name=smollm2", "port=0", "variants=none", cwd=tmp_path
    ) as process:
        process.wait_until_it_serves(300)
        said = process.client().chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
        )
        assert "Paris" in said.choices[0].message.content
        assert said.choices[0].finish_reason == "stop"
