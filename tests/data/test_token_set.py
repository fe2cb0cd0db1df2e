"""The cache of tokens: it saves work, it is keyed by everything that matters, and damage is repaired."""

from __future__ import annotations

import pytest

from tests.data.support import byte_tokenizer, sums
from zen_train.cache import cache_dir
from zen_train.data import token_set
from zen_train.data.records import Record
from zen_train.data.token_set import content_key, tokenised


def _tokenise(cache: bool = True, records=None) -> token_set.TokenisedSet:
    return tokenised(
        sums(9) if records is None else records,
        byte_tokenizer(),
        what="test",
        max_tokens=200,
        too_long="truncate",
        cache=cache,
    )


def test_a_cached_set_equals_a_fresh_one_and_is_not_made_again(monkeypatch):
    fresh = _tokenise(cache=False)
    _tokenise()
    monkeypatch.setattr(token_set, "tokenise_all", None)  # calling it would now fail
    cached = _tokenise()
    assert len(cached) == 9
    for i in range(9):
        assert cached.name(i) == fresh.name(i)
        for ours, theirs in zip(cached[i], fresh[i], strict=True):
            assert ours.tolist() == theirs.tolist()
    assert cached.counts == fresh.counts


def test_a_damaged_cache_file_is_made_again():
    _tokenise()
    (path,) = cache_dir("tokens").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    assert len(_tokenise()) == 9
    assert len(_tokenise()) == 9


def test_long_records_are_reported_on_every_run_cached_or_not(caplog):
    records = [Record(document="long", text="x" * 500), Record(document="short", text="y")]
    for _ in range(2):
        caplog.clear()
        _tokenise(records=records)
        assert "1 of 2 records are longer than 200 tokens" in caplog.text


@pytest.mark.parametrize("change", ["record", "name", "length", "rule", "template", "tokenizer"])
def test_the_key_depends_on_everything_that_decides_the_tokens(change):
    def key(records=None, tokenizer=None, max_tokens=64, too_long="skip"):
        return content_key(
            records or sums(3), tokenizer or byte_tokenizer(), max_tokens=max_tokens, too_long=too_long
        )

    other = byte_tokenizer()
    other.add_tokens(["new"])
    changed = {
        "record": {"records": [*sums(2), Record(document="sum 2", text="else")]},
        "name": {"records": [*sums(2), Record(document="x", messages=sums(3)[2].messages)]},
        "length": {"max_tokens": 65},
        "rule": {"too_long": "split"},
        "template": {"tokenizer": byte_tokenizer(None)},
        "tokenizer": {"tokenizer": other},
    }
    assert key() == key()
    assert key(**changed[change]) != key()
