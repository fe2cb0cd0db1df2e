"""Chat completions and completions through the official client: whole and streamed."""

import openai
import pytest

from tests.serve.api.stage import END, ScriptEngine, serving, tokens

ASK = [{"role": "user", "content": "tell me"}]


def streamed(chunks) -> tuple[str, list]:
    chunks = list(chunks)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


def test_a_variant_answers_under_its_own_name(client):
    answer = client.chat.completions.create(model="zen4-coder", messages=ASK)
    assert answer.choices[0].message.content.startswith("hash-of-zen4-coder heard")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "zen4-coder"
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint == "fp_hash-of-zen4-cod"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_base_answers_too(client):
    answer = client.chat.completions.create(model="tiny", messages=ASK)
    assert answer.choices[0].message.content.startswith("base heard")
    assert answer.system_fingerprint == "fp_" + "ba5e" * 4


def test_a_stream_says_the_same_and_every_chunk_names_the_variant(client):
    whole = client.chat.completions.create(model="zen4-math", messages=ASK)
    text, chunks = streamed(client.chat.completions.create(model="zen4-math", messages=ASK, stream=True))
    assert text == whole.choices[0].message.content
    assert {chunk.model for chunk in chunks} == {"zen4-math"}
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_include_usage_adds_one_last_chunk(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    whole = client.chat.completions.create(model="tiny", messages=ASK)
    _, chunks = streamed(client.chat.completions.create(model="tiny", messages=ASK, **options))
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_prompt_is_what_the_chat_template_writes(client, stage):
    client.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hé"}],
    )
    written = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(stage.engine.jobs_seen[-1].prompt_tokens) == tokens(written)


def test_a_variant_is_asked_with_its_own_template(tmp_path):
    with serving(tmp_path) as stage:
        folder = stage.catalogue.variants["zen4-coder"].folder
        (folder / "chat_template.jinja").write_text("CODE:{{ messages[-1]['content'] }}")
        for model, written in [
            ("zen4-coder", "CODE:tell me"),
            ("zen4-math", "<|im_start|>user\ntell me<|im_end|>"),
        ]:
            stage.client().chat.completions.create(model=model, messages=ASK)
            start = tokens(written)
            assert list(stage.engine.jobs_seen[-1].prompt_tokens[: len(start)]) == start


def test_a_template_that_refuses_is_a_bad_request(tmp_path):
    with serving(tmp_path) as stage:
        folder = stage.catalogue.variants["zen4-coder"].folder
        (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            stage.client().chat.completions.create(model="zen4-coder", messages=ASK)


def test_max_tokens_ends_with_length_in_both_spellings(client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="tiny", messages=ASK, **{name: 3})
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "bas"
        assert answer.usage.completion_tokens == 3


def test_ignore_eos_and_min_tokens_go_past_the_end(client, stage):
    extra = {"ignore_eos": True}
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=60, extra_body=extra)
    assert answer.usage.completion_tokens == 60
    assert stage.engine.jobs_seen[-1].stop_tokens == frozenset()
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=60, extra_body={"min_tokens": 50}
    )
    assert answer.usage.completion_tokens >= 50


def test_sampling_reaches_the_engine_and_defaults_are_openais(client, stage):
    client.chat.completions.create(model="tiny", messages=ASK)
    plain = stage.engine.jobs_seen[-1].sampling
    assert (plain.temperature, plain.top_p, plain.top_k, plain.seed, plain.logprobs) == (
        1.0,
        1.0,
        0,
        None,
        None,
    )
    assert plain.repetition_penalty == 1.0
    client.chat.completions.create(
        model="tiny", messages=ASK, temperature=0, top_p=0.5, seed=7, presence_penalty=1, frequency_penalty=-1,
        logit_bias={"65": 5, "66": -100},
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [70]},
    )  # fmt: skip
    job = stage.engine.jobs_seen[-1]
    assert job.stop_tokens == {END, 70}
    s = job.sampling
    assert (s.temperature, s.top_p, s.seed, s.presence_penalty, s.frequency_penalty) == (0, 0.5, 7, 1, -1)
    assert (s.top_k, s.min_p, s.repetition_penalty, s.logit_bias) == (3, 0.1, 1.2, {65: 5, 66: -100})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_several_choices_each_have_their_own_index_and_seed(client, stage, stream):
    answer = client.chat.completions.create(model="tiny", messages=ASK, n=3, seed=5, stream=stream)
    assert sorted(job.sampling.seed for job in stage.engine.jobs_seen[-3:]) == [5, 6, 7]
    if not stream:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 3 * len(tokens(answer.choices[0].message.content)) + 3
        return
    texts, ends = ["", "", ""], []
    for chunk in answer:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert sorted(ends) == [0, 1, 2]
    assert len(set(texts)) == 1
    assert texts[0].startswith("base heard")


def test_logprobs_of_a_chat_give_bytes_and_alternatives(client):
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=2, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["b", "a"]
    assert content[0].bytes == [ord("b")]
    assert content[0].logprob == -0.5
    assert [top.logprob for top in content[0].top_logprobs] == [0.0, -1.0]


def test_logprobs_come_with_every_token_of_a_stream(client):
    chunks = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=4, logprobs=True, stream=True
    )
    entries = [
        entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in entries] == list("base")
    assert all(entry.top_logprobs == [] for entry in entries)


def test_half_of_a_character_has_its_byte_in_the_logprobs(tmp_path):
    with serving(tmp_path, engine=ScriptEngine(reply=lambda _: "🙂")) as stage:
        answer = stage.client().chat.completions.create(model="tiny", messages=ASK, logprobs=True)
        entries = answer.choices[0].logprobs.content
        assert [entry.bytes for entry in entries[:4]] == [[byte] for byte in "🙂".encode()]


def test_unicode_is_never_cut_in_a_stream(tmp_path):
    said = "naïve 🙂🇩🇪 日本語 \u0000 \U0010ffff e\u0301"
    with serving(tmp_path, engine=ScriptEngine(reply=lambda _: said)) as stage:
        text, chunks = streamed(
            stage.client().chat.completions.create(model="tiny", messages=ASK, stream=True)
        )
        assert text == said
        assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_across_tokens_is_not_part_of_the_answer_and_frees_the_engine(client, stage, stream):
    before = len(stage.engine.cancelled)
    answer = client.chat.completions.create(model="tiny", messages=ASK, stop=[" hear", "xyz"], stream=stream)
    if stream:
        text, chunks = streamed(answer)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == ("base", "stop")
    stage.until(lambda: len(stage.engine.cancelled) == before + 1, "the job was cancelled")


def test_a_stop_string_that_never_completes_is_given_out_at_the_end(tmp_path):
    with serving(tmp_path, engine=ScriptEngine(reply=lambda _: "abc EN")) as stage:
        answer = stage.client().chat.completions.create(model="tiny", messages=ASK, stop="END")
        assert answer.choices[0].message.content == "abc EN"


def test_a_completion_continues_text_tokens_and_lists_of_both(client):
    for prompt, count in [
        ("hello", 1),
        (["a", "b"], 2),
        (tokens("hello"), 1),
        ([tokens("a"), tokens("b")], 2),
    ]:
        answer = client.completions.create(model="tiny", prompt=prompt)
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert all(choice.text.startswith("base heard") for choice in answer.choices)
        assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)


def test_a_completion_has_sixteen_tokens_unless_told_otherwise(client):
    answer = client.completions.create(model="tiny", prompt="hello there you")
    assert answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens == len("hello there you")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_echo_puts_the_prompt_in_front(client, stream):
    answer = client.completions.create(
        model="tiny", prompt=["ab", tokens("cd")][0], echo=True, max_tokens=4, stream=stream
    )
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    assert text == "abbase"


def test_completion_logprobs_line_up_with_the_text(client):
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=4, logprobs=2)
    found = answer.choices[0].logprobs
    assert found.tokens == list("base")
    assert found.text_offset == [0, 1, 2, 3]
    assert found.token_logprobs == [-0.5] * 4
    assert all(token in top for token, top in zip(found.tokens, found.top_logprobs, strict=True))


def test_text_offsets_go_on_through_a_stream(client):
    chunks = client.completions.create(model="tiny", prompt="x", max_tokens=4, logprobs=0, stream=True)
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_tokens": 513}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"prompt": "x" * 512}, "prompt"),
        ({"prompt": [1] * 50_000}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [10**15]}, "prompt"),
        ({"prompt": ["x"] * 9}, "prompt"),
        ({"n": 9}, "prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"extra_body": {"min_tokens": 17}}, "min_tokens"),
        ({"extra_body": {"stop_token_ids": [10**9]}}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    ids=lambda value: repr(value)[:36],
)
def test_what_this_model_cannot_do_is_refused_with_the_field(client, settings, field):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "x"} | settings)
    assert caught.value.param == field


def test_a_chat_beyond_the_context_has_openais_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 600}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, max_tokens=500)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_404_and_never_the_base(client, stage):
    """text-generation-inference#2505, vllm#34186."""
    before = len(stage.engine.jobs_seen)
    for name in ("zen4-codr", "coder", "../zen4-coder", "Tiny", "zen4-coder ", "tiny\u0000"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model=name, messages=ASK)
        assert caught.value.code == "model_not_found"
    assert len(stage.engine.jobs_seen) == before
