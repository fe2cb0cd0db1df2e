"""Bodies that cannot be meant are refused with the field, the value and the remedy, and cost little to refuse."""

import json
import time

import orjson
import pytest

from zen_train.serve.api.body import parse
from zen_train.serve.api.schema import NOT_OFFERED, ChatRequest, CompletionRequest, Message
from zen_train.serve.errors import BadRequestError

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "m", "prompt": "hi"}


def refused(document, schema=ChatRequest) -> BadRequestError:
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(BadRequestError) as caught:
        parse(raw, schema)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"hello",
        b"\xff\xfe{}",
        b'{"model": "\xc3"}',
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
    ids=["empty", "open", "word", "utf16", "cut", "surrogate", "nan", "infinite", "deep list", "deep object"],
)
def test_what_is_no_json_is_refused(raw):
    assert "no JSON" in str(refused(raw))


@pytest.mark.parametrize("document", [[], "x", 3, True, None], ids=repr)
def test_what_is_no_object_is_refused(document):
    assert "send a JSON object" in str(refused(document))


def test_an_unknown_field_names_the_one_that_was_meant():
    error = refused(HELLO | {"temprature": 1})
    assert error.param == "temprature"
    assert "'temperature'" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("n", 0),
        ("n", 10**30),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**25),
        ("max_tokens", "all"),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", 3),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", {"include": True}),
        ("top_logprobs", 21),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("model", ""),
        ("model", 5),
        ("model", None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_value_names_its_field(field, value):
    error = refused(HELLO | {field: value})
    assert error.param is not None
    assert error.param.startswith(field)
    assert field in str(error)


def test_a_missing_field_is_named():
    assert refused({"model": "m"}).param == "messages"
    assert "is missing" in str(refused({"messages": HELLO["messages"]}))


NEUTRAL = {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "web_search_options": None,
    "reasoning_effort": "none",
    "verbosity": "medium",
    "service_tier": "auto",
    "store": False,
}
WANTED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "modalities": ["audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "reasoning_effort": "high",
    "verbosity": "low",
    "service_tier": "priority",
    "store": True,
}


@pytest.mark.parametrize("field", sorted(NEUTRAL))
def test_a_feature_that_is_not_offered_is_refused_by_name_unless_it_is_left_alone(field):
    parse(orjson.dumps(HELLO | {field: NEUTRAL[field]}), ChatRequest)
    parse(orjson.dumps(HELLO | {field: None}), ChatRequest)
    error = refused(HELLO | {field: WANTED[field]})
    assert error.param is not None
    assert error.param.startswith(field)
    assert NOT_OFFERED[field] in str(error)


def test_every_refusal_belongs_to_a_field():
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *Message.model_fields}
    assert set(NOT_OFFERED) <= fields


def test_what_openai_clients_send_along_is_taken():
    extra = {
        "user": "u",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }
    parse(orjson.dumps(HELLO | extra), ChatRequest)


def test_an_answer_sent_back_as_history_is_taken():
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None,
              "function_call": None, "tool_calls": None}  # fmt: skip
    body = parse(orjson.dumps(HELLO | {"messages": [*HELLO["messages"], answer]}), ChatRequest)
    assert body.messages[1].text() == "x"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse(orjson.dumps(HELLO | {"messages": [{"role": "user", "content": parts}]}), ChatRequest)
    assert body.messages[0].text() == "ab"


@pytest.mark.parametrize(
    "prompt",
    ["hi", "", ["a", "b"], [1, 2], [[1], [2, 3]], []],
    ids=["text", "no text", "texts", "tokens", "lists", "none"],
)
def test_a_completion_takes_every_form_of_prompt(prompt):
    assert parse(orjson.dumps(PROMPT | {"prompt": prompt}), CompletionRequest).prompt == prompt


@pytest.mark.parametrize(
    "prompt", [3, None, {"a": 1}, ["a", 1], [1, "a"], [1.5], [-1], [[1], ["a"]], [True]], ids=repr
)
def test_a_completion_refuses_other_prompts(prompt):
    assert refused(PROMPT | {"prompt": prompt}, CompletionRequest).param.startswith("prompt")


@pytest.mark.parametrize(
    "document",
    [
        PROMPT | {"prompt": [1] * 700_000 + ["x"]},
        HELLO | {"messages": [{}] * 500_000},
        HELLO | {"messages": [{f"a{index}": 1 for index in range(100_000)}]},
        HELLO | {f"a{index}": 1 for index in range(100_000)},
        HELLO | {"logit_bias": {str(index): "x" for index in range(100_000)}},
        HELLO | {"stop": ["x"] * 400_000},
        HELLO | {"tools": [1] * 500_000},
    ],
    ids=["tokens", "messages", "message fields", "fields", "biases", "stops", "tools"],
)
def test_two_megabytes_of_nonsense_are_refused_with_one_short_error(document):
    schema = CompletionRequest if "prompt" in document else ChatRequest
    raw = orjson.dumps(document)
    before = time.process_time()
    error = refused(raw, schema)
    assert time.process_time() - before < 2.0
    assert len(str(error)) < 500


def test_a_long_value_is_shown_in_part():
    assert len(str(refused(HELLO | {"temperature": "x" * 100_000}))) < 300
    assert len(str(refused(HELLO | {"x" * 100_000: 1}))) < 300
