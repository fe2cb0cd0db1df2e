"""Users' own files: what is read, and that everything wrong is named with file and line."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from zen_train.data.config import DataConfig
from zen_train.data.load import load_corpus
from zen_train.data.sources import Fields, read_jsonl, read_parquet, read_text
from zen_train.data.table import variant_configs
from zen_train.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
PAIR = {"prompt": "hi", "completion": "yo"}


def _jsonl(folder, *rows):
    path = folder / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def _turns(record):
    return [(m.role, m.content) for m in record.messages]


def test_chats_pairs_and_texts_may_be_mixed(tmp_path):
    path = _jsonl(tmp_path, CHAT, PAIR, "", {"text": "plain"})
    chat, pair, text = read_jsonl(path, Fields())
    assert _turns(chat) == _turns(pair) == [("user", "hi"), ("assistant", "yo")]
    assert text.text == "plain"
    assert (chat.origin, pair.origin, text.origin) == tuple(f"{path}:{line}" for line in (1, 2, 4))
    assert chat.document == pair.document, "equal content stays on one side of the split"


def test_columns_can_be_renamed(tmp_path):
    row = {"q": "hi", "a": "yo", "rules": "be kind", "book": 7}
    fields = Fields(prompt="q", completion="a", system="rules", document="book")
    (record,) = read_jsonl(_jsonl(tmp_path, row), fields)
    assert _turns(record) == [("system", "be kind"), ("user", "hi"), ("assistant", "yo")]
    assert record.document == "7"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"prompt": "a", "completion" "b"}', "not JSON: Expecting ':' delimiter at column 30"),
        ("[1, 2]", "a JSON list, but each line must be one JSON object"),
        (
            {"question": "a"},
            "the row has the fields question, but needs 'messages', or 'prompt' and 'completion'",
        ),
        ({"prompt": "a", "completion": 3}, "the field 'completion' must be a string, not int"),
        ({"messages": []}, "must be a list of messages that is not empty"),
        ({"messages": [{"role": "user"}]}, "message 1 must be an object with 'role' and 'content'"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "message 1 has the role 'bot'; allowed are system, user",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "message 1: 'content' must be a string, not NoneType",
        ),
    ],
    ids=["comma", "list", "fields", "type", "empty", "content", "role", "null"],
)
def test_a_bad_line_is_named_with_file_and_line(tmp_path, row, complaint):
    path = _jsonl(tmp_path, PAIR, "", row)
    with pytest.raises(DataError) as caught:
        list(read_jsonl(path, Fields()))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert complaint in str(caught.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(PAIR).encode() + b'\n{"prompt": "caf\xe9", "completion": "x"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        list(read_jsonl(path, Fields()))


def test_a_missing_and_an_empty_file_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        list(read_jsonl(tmp_path / "none.jsonl", Fields()))
    with pytest.raises(DataError, match="a folder, but a file is needed"):
        list(read_jsonl(tmp_path, Fields()))
    with pytest.raises(DataError, match=r"data\.jsonl: the file has no records"):
        list(read_jsonl(_jsonl(tmp_path, "", ""), Fields()))


def test_parquet_reads_the_same_rows_as_json_lines(tmp_path):
    rows = [{**CHAT, "prompt": None, "completion": None}, {"messages": None, **PAIR}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "part.parquet")
    chat, pair = read_parquet(tmp_path, Fields())
    assert _turns(chat) == _turns(pair) == [("user", "hi"), ("assistant", "yo")]
    assert pair.origin.endswith("part.parquet:row 1")


def test_parquet_problems_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no \*\.parquet files"):
        list(read_parquet(tmp_path, Fields()))
    path = tmp_path / "x.parquet"
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"x\.parquet: not a readable parquet file"):
        list(read_parquet(path, Fields()))
    pq.write_table(pa.table({"question": ["a"]}), path)
    with pytest.raises(DataError, match=r"none of the columns messages, .*it has question"):
        list(read_parquet(path, Fields()))
    pq.write_table(pa.table({"prompt": ["a", "b"], "completion": ["x", None]}), path)
    with pytest.raises(DataError, match=r"x\.parquet:row 1: the row has the fields prompt"):
        list(read_parquet(path, Fields()))


def test_each_text_file_is_a_document(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "sub" / "b.txt").write_text("two")
    (tmp_path / "c.md").write_text("three")
    assert [(r.document, r.text) for r in read_text(tmp_path, pattern="**/*.txt")] == [
        ("a.txt", "one"),
        ("sub/b.txt", "two"),
    ]


def test_text_problems_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no file matches data\.pattern='\*\*/\*\.txt'"):
        list(read_text(tmp_path, pattern="**/*.txt"))
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"a\.txt: the file is empty"):
        list(read_text(tmp_path, pattern="**/*.txt"))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 text"):
        list(read_text(tmp_path, pattern="**/*.txt"))


def _load(**settings):
    return load_corpus(TypeAdapter(DataConfig).validate_python(settings), variant_configs()["coder"])


def test_a_heldout_file_is_used_as_it_is_and_leaves_training(tmp_path):
    train = _jsonl(tmp_path, PAIR, {"prompt": "b", "completion": "c"})
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps(PAIR))
    corpus = _load(kind="jsonl", path=str(train), heldout_path=str(heldout))
    assert [r.messages[0].content for r in corpus.train] == ["b"]
    assert [r.messages[0].content for r in corpus.heldout] == ["hi"]


def test_rows_of_one_document_stay_together(tmp_path):
    rows = [
        {"prompt": f"{d} {i}", "completion": "x", "book": f"book {d}"} for d in range(30) for i in range(4)
    ]
    corpus = _load(kind="jsonl", path=str(_jsonl(tmp_path, *rows)), document_field="book", heldout_share=0.2)
    assert len(corpus.heldout) % 4 == 0
    assert not {r.document for r in corpus.train} & {r.document for r in corpus.heldout}
