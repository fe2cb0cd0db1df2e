"""Text while tokens arrive: never half a character, never part of a stop string, and in all what the tokenizer says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from zen_train.serve.api.detokenise import Detokeniser, StopStrings
from zen_train.tiny import tiny_tokenizer

BYTES = tiny_tokenizer().backend_tokenizer
SPECIAL = BYTES.token_to_id("<|im_start|>")


def byte_fallback() -> Tokenizer:
    """A tokenizer in Llama 2's manner: spaces as a prefix, bytes as <0xNN>, the first space stripped."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁world", "lo", "▁", "é"]
    inner = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


FALLBACK = byte_fallback()


def decoder(tokenizer):
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def ids(text: str) -> list[int]:
    return BYTES.encode(text).ids


def stream(tokenizer, tokens, context=()):
    detokeniser = Detokeniser(decoder(tokenizer), context)
    return [*(detokeniser.push(token) for token in tokens), detokeniser.finish()]


def test_a_character_of_four_bytes_comes_whole_with_its_last_byte():
    assert stream(BYTES, ids("a🙂b")) == ["a", "", "", "", "🙂", "b", ""]


def test_broken_bytes_are_shown_once_they_cannot_become_a_character():
    smile = ids("🙂")
    assert "".join(stream(BYTES, [*smile[:2], *ids("x")])) == "\ufffdx"
    assert stream(BYTES, smile[:3])[-1] == "\ufffd"


@given(st.text(max_size=40))
def test_any_text_comes_back_and_every_piece_is_complete(text):
    pieces = stream(BYTES, ids(text))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=200))
def test_any_bytes_give_what_the_tokenizer_gives_for_the_whole(tokens):
    assert "".join(stream(BYTES, tokens)) == BYTES.decode(tokens)


@given(st.lists(st.integers(257, FALLBACK.get_vocab_size() - 1), min_size=1, max_size=30))
def test_a_tokenizer_that_writes_spaces_as_prefixes_keeps_them(tokens):
    assert "".join(stream(FALLBACK, tokens)) == FALLBACK.decode(tokens)


def test_bytes_of_a_fallback_tokenizer_come_as_one_character():
    tokens = [FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in "é🙂".encode()]
    assert [piece for piece in stream(FALLBACK, tokens) if piece] == ["é", "🙂"]


def test_the_first_token_keeps_its_space_after_a_prompt():
    hello, world = FALLBACK.token_to_id("▁hello"), FALLBACK.token_to_id("▁world")
    assert "".join(stream(FALLBACK, [world], context=[hello])) == " world"
    assert "".join(stream(FALLBACK, [world])) == "world"


def test_special_tokens_leave_no_text():
    assert "".join(stream(BYTES, [*ids("a"), SPECIAL, *ids("b")])) == "ab"


def test_endless_broken_bytes_cost_a_bounded_window_each():
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return BYTES.decode(tokens)

    detokeniser = Detokeniser(decode)
    lead = ids("🙂")[0]
    text = "".join(detokeniser.push(lead) for _ in range(2000)) + detokeniser.finish()
    assert set(text) == {"\ufffd"}
    assert longest <= 200


def passed(stops, pieces):
    """(text passed on, whether a stop string ended it)."""
    matcher = StopStrings(stops)
    out = []
    for piece in pieces:
        out.append(matcher.push(piece))
        if matcher.stopped:
            return "".join(out), True
    return "".join([*out, matcher.finish()]), False


def test_a_stop_string_across_tokens_is_cut_with_all_its_parts():
    assert passed(["END"], ["one E", "N", "D two"]) == ("one ", True)


def test_what_only_looked_like_a_stop_string_is_passed_on():
    assert passed(["END"], ["one E", "N", "Ough"]) == ("one ENOugh", False)
    assert passed(["END"], ["one EN"]) == ("one EN", False)


def test_the_earliest_of_several_stop_strings_wins():
    assert passed(["world", "lo"], ["hello world"]) == ("hel", True)


def test_a_held_tail_is_no_longer_than_it_must_be():
    matcher = StopStrings(["aab"])
    assert matcher.push("xaaa") == "xa"
    assert matcher.push("b") == ""
    assert matcher.stopped


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_any_split_stops_where_the_whole_text_does(pieces, stops):
    text, stopped = passed(stops, pieces)
    whole = "".join(pieces)
    if not stopped:
        assert text == whole
        assert not any(stop in whole for stop in stops)
        return
    assert not any(stop in text for stop in stops)
    assert any(whole[len(text) :].startswith(stop) for stop in stops)


@pytest.mark.parametrize("stops", [[], ["x"]], ids=["none", "one"])
def test_an_empty_piece_is_nothing(stops):
    assert passed(stops, ["", "a", ""]) == ("a", False)
