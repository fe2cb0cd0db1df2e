"""Which tokens carry loss, and what happens to records that cannot be trained on."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.data.support import SYSTEM_DEFAULT_TEMPLATE, byte_tokenizer, chat, merging_tokenizer, scored
from zen_train.data.records import Record, ask
from zen_train.data.tokenise import FALLBACK_TEMPLATE, IGNORE, Counts, prompt_text, tokenise, tokenise_all
from zen_train.errors import DataError


def test_only_the_assistant_carries_loss_and_the_end_of_turn_token_is_inside():
    """TRL PR#4201: a model that is never trained on the end of its turn does not stop."""
    tokenizer = byte_tokenizer(SYSTEM_DEFAULT_TEMPLATE)
    (example,) = tokenise(ask("d", "Two plus two?", "Four."), tokenizer, max_tokens=200)
    assert scored(example, tokenizer) == "Four.<|im_end|>"
    assert tokenizer.decode(example.input_ids).startswith(
        "<|im_start|>system\nBe helpful<|im_end|>\n<|im_start|>user"
    )
    assert example.labels[-1] == IGNORE, "the newline after the end of turn is never generated"


def test_every_assistant_turn_of_a_long_chat_carries_loss():
    tokenizer = byte_tokenizer()
    record = chat(
        ("system", "Be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")
    )
    (example,) = tokenise(record, tokenizer, max_tokens=200)
    assert scored(example, tokenizer) == "b<|im_end|>d<|im_end|>"


def test_a_chat_that_ends_with_the_user_is_trained_on_its_earlier_answer():
    tokenizer = byte_tokenizer()
    (example,) = tokenise(chat(("user", "a"), ("assistant", "b"), ("user", "c")), tokenizer, max_tokens=200)
    assert scored(example, tokenizer) == "b<|im_end|>"


@pytest.mark.parametrize(
    "turns", [(("user", "hello"),), (("system", "x"), ("user", "y"))], ids=["user", "system"]
)
def test_a_record_without_any_answer_is_an_error_that_names_it(turns):
    """TRL PR#5988: an all-masked row is an error, not a training run."""
    with pytest.raises(DataError, match=r"talk\.jsonl:7: nothing in this record carries loss"):
        tokenise(chat(*turns, origin="talk.jsonl:7"), byte_tokenizer(), max_tokens=200)


def test_an_empty_answer_teaches_only_the_end_of_turn():
    tokenizer = byte_tokenizer()
    (example,) = tokenise(ask("d", "Say nothing.", ""), tokenizer, max_tokens=200)
    assert scored(example, tokenizer) == "<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused():
    rewriting = (
        "{% for m in messages %}{% if loop.last %}LAST {% endif %}"
        "{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}LAST assistant: {% endif %}"
    )
    record = chat(
        ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), document="two answers"
    )
    with pytest.raises(DataError, match=r"two answers: the chat template .* differently"):
        tokenise(record, byte_tokenizer(rewriting), max_tokens=200)


def test_a_template_that_raises_names_the_record_and_its_roles():
    refusing = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    records = [
        ask("fine", "a", "b"),
        chat(("system", "s"), ("user", "u"), ("assistant", "a"), document="bad one"),
    ]
    with pytest.raises(DataError, match=r"bad one: .*roles: system.*no system"):
        list(
            tokenise_all(records, byte_tokenizer(refusing), max_tokens=99, too_long="error", counts=Counts())
        )


def test_a_tokenizer_without_a_chat_template_gets_the_documented_one():
    tokenizer = byte_tokenizer(None)
    (example,) = tokenise(chat(("system", "S"), ("user", "Q"), ("assistant", "A")), tokenizer, max_tokens=200)
    assert tokenizer.decode(example.input_ids) == "S\n\nUser: Q\nAssistant: A<|im_end|>\n"
    assert scored(example, tokenizer) == "A<|im_end|>"
    assert prompt_text("Q", tokenizer) == "User: Q\nAssistant: "
    assert "generation" not in FALLBACK_TEMPLATE.replace("add_generation_prompt", "")


def test_a_template_without_an_end_of_turn_token_gets_the_end_token():
    plain = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = byte_tokenizer(plain)
    (example,) = tokenise(ask("d", "Q", "A"), tokenizer, max_tokens=200)
    assert scored(example, tokenizer) == "A <|im_end|>"


def test_the_prompt_has_the_tokens_that_generation_starts_from():
    """An answer that begins with spaces must not merge with the newline that ends the prompt."""
    tokenizer = merging_tokenizer()
    record = ask("d", "Indent it.", "    return value")
    joined = tokenizer(tokenizer.apply_chat_template([{"role": "user", "content": "Indent it."},
        {"role": "assistant", "content": "    return value"}], tokenize=False))["input_ids"]  # fmt: skip
    prompt = tokenizer(prompt_text("Indent it.", tokenizer))["input_ids"]
    assert joined[: len(prompt)] != prompt, "this tokenizer does join them, or the test shows nothing"
    (example,) = tokenise(record, tokenizer, max_tokens=200)
    assert example.input_ids[: len(prompt)].tolist() == prompt
    assert (example.labels[: len(prompt)] == IGNORE).all()
    assert scored(example, tokenizer) == "    return value<|im_end|>"


def test_a_text_is_trained_on_throughout_and_ends_once():
    tokenizer = byte_tokenizer()
    (example,) = tokenise(Record(document="t", text="Once upon"), tokenizer, max_tokens=50)
    assert tokenizer.decode(example.input_ids) == "Once upon<|im_end|>"
    assert (example.labels == example.input_ids).all()
    (example,) = tokenise(Record(document="t", text="Once<|im_end|>"), tokenizer, max_tokens=50)
    assert tokenizer.decode(example.input_ids) == "Once<|im_end|>"


def test_a_record_longer_than_the_context_is_an_error_that_names_the_options():
    with pytest.raises(DataError, match=r"book:3: 101 tokens, longer than .*=40.*truncate, skip or split"):
        tokenise(Record(document="b", text="x" * 100, origin="book:3"), byte_tokenizer(), max_tokens=40)


@pytest.mark.parametrize(("too_long", "lengths"), [("truncate", [40]), ("skip", []), ("split", [40, 40, 21])])
def test_long_records_are_cut_as_asked_and_counted(too_long, lengths, caplog):
    counts = Counts()
    records = [Record(document="long", text="x" * 100), Record(document="short", text="y")]
    rows = tokenise_all(records, byte_tokenizer(), max_tokens=40, too_long=too_long, counts=counts)
    assert [len(row) for row in rows] == [*lengths, 2]
    assert (counts.truncated, counts.skipped, counts.split) == tuple(
        int(too_long == kind) for kind in ("truncate", "skip", "split")
    )
    with caplog.at_level(logging.WARNING):
        counts.warn(max_tokens=40)
    assert "1 of 2 records are longer than 40 tokens" in caplog.text
    assert "long" in caplog.text
    assert "101 tokens" in caplog.text


def test_split_pieces_together_are_the_whole():
    tokenizer = byte_tokenizer()
    record = Record(document="t", text="".join(chr(97 + i % 26) for i in range(100)))
    (whole,) = tokenise(record, tokenizer, max_tokens=200)
    pieces = tokenise(record, tokenizer, max_tokens=7, too_long="split")
    assert np.concatenate([piece.input_ids for piece in pieces]).tolist() == whole.input_ids.tolist()


def test_a_prompt_that_fills_the_context_is_an_error_under_truncate():
    with pytest.raises(DataError, match="no assistant text is left"):
        tokenise(ask("d", "q" * 100, "a"), byte_tokenizer(), max_tokens=50, too_long="truncate")


def test_many_records_give_the_same_as_one_at_a_time():
    tokenizer = byte_tokenizer()
    records = [ask(str(i), "q" * i, "a" * (30 - i)) for i in range(30)] + [Record(document="t", text="plain")]
    together = list(tokenise_all(records, tokenizer, max_tokens=99, too_long="error", counts=Counts()))
    for record, row in zip(records, together, strict=True):
        (alone,) = tokenise(record, tokenizer, max_tokens=99)
        assert alone.name == row.name
        assert alone.input_ids.tolist() == row.input_ids.tolist()
        assert alone.labels.tolist() == row.labels.tolist()


@pytest.mark.real
def test_the_real_tokenizer_masks_its_default_system_prompt_and_keeps_the_end_of_turn(real_base):
    """TRL PR#4201 on SmolLM2: its template has no generation marks and adds a system message."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_base)
    (example,) = tokenise(ask("d", "Write f.", "    return 1"), tokenizer, max_tokens=200)
    assert scored(example, tokenizer) == "    return 1<|im_end|>"
    prompt = tokenizer(prompt_text("Write f.", tokenizer), add_special_tokens=False)["input_ids"]
    assert example.input_ids[: len(prompt)].tolist() == prompt
