"""Records and the split by document."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zen_train.data.records import Corpus, Record, ask, split_by_document, unit_hash
from zen_train.errors import DataError


def _records(documents: int, each: int = 3) -> list[Record]:
    return [
        ask(f"doc {d}", f"question {i}", "answer", origin=f"file:{d}.{i}")
        for d in range(documents)
        for i in range(each)
    ]


@given(st.integers(2, 40), st.floats(0.01, 0.99), st.integers(0, 5))
def test_no_document_is_on_both_sides_and_none_is_lost(documents, share, seed):
    corpus = split_by_document(_records(documents), name="c", heldout_share=share, seed=seed)
    train, heldout = ({r.document for r in part} for part in (corpus.train, corpus.heldout))
    assert not train & heldout
    assert train
    assert heldout
    assert len(corpus.train) + len(corpus.heldout) == 3 * documents


def test_the_side_of_a_document_does_not_depend_on_the_other_documents():
    few = split_by_document(_records(60), name="c", heldout_share=0.3, seed=0)
    many = split_by_document(_records(90), name="c", heldout_share=0.3, seed=0)
    known = {f"doc {d}" for d in range(60)}
    assert {r.document for r in few.heldout} == {r.document for r in many.heldout} & known


def test_the_share_is_about_what_was_asked_for():
    corpus = split_by_document(_records(2000, each=1), name="c", heldout_share=0.1, seed=0)
    # Binomial with 2000 draws: a deviation of 6 standard deviations is 0.04.
    assert abs(len(corpus.heldout) / 2000 - 0.1) < 0.04


def test_one_document_cannot_be_split():
    with pytest.raises(DataError, match=r"book\.txt: only one document \(doc 0\).*data\.heldout_path"):
        split_by_document(_records(1), name="book.txt", heldout_share=0.5, seed=0)


def test_a_corpus_with_a_shared_document_is_refused():
    with pytest.raises(DataError, match="'doc 1'"):
        Corpus(name="c", train=_records(2), heldout=_records(2)[3:])


def test_a_record_is_a_chat_or_a_text():
    with pytest.raises(DataError, match=r"a\.txt: a record holds either"):
        Record(document="a.txt")
    with pytest.raises(DataError, match="either"):
        Record(document="a", text="t", messages=())


def test_hashes_are_the_same_on_every_machine():
    assert unit_hash("document", 0) == 0.09698321055430881
    assert unit_hash("document", 0) != unit_hash("document", 1)
