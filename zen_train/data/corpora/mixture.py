"""ultra: an even mixture of all the other corpora, documents and their side of the split as in those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from zen_train.data.records import Record, unit_hash

RECORDS_EACH = 1500
"""At most this many records of each corpus, those with the smallest hashes: an even and repeatable draw."""

Builder = Callable[[Mapping[str, Path], int], Iterable[Record]]


def records(parts: Mapping[str, Builder], folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """The records of every part, thinned to `RECORDS_EACH`."""
    for builder in parts.values():
        drawn = sorted(builder(folders, seed), key=lambda record: unit_hash(record.name, seed))
        yield from drawn[:RECORDS_EACH]
