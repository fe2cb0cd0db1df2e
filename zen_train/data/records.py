"""What training data is before any tokenizer has seen it: records, and a corpus split by document.

A record is a chat or a plain text. It names the document it was taken from, because the split into training
and held-out parts is by document: two rows of one document never end up on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from zen_train.errors import DataError

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Record:
    """One unit of training data: either `messages` or `text`, never both.

    `document` identifies the source document (a file, a play, a licence). `origin` says where a person finds
    the record (`data.jsonl:17`); errors name it.
    """

    document: str
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.text is None):
            raise DataError(
                f"{self.name}: a record holds either messages or text; this one has both or neither"
            )

    @property
    def name(self) -> str:
        """What errors and logs call this record."""
        return self.origin or self.document


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and held-out records that share no document."""

    name: str
    train: Sequence[Record]
    heldout: Sequence[Record]

    def __post_init__(self) -> None:
        for part, records in (("training", self.train), ("held-out", self.heldout)):
            if not records:
                raise DataError(
                    f"{self.name}: no {part} records; give more documents, held-out data of its own "
                    "(data.heldout_path), or another data.heldout_share"
                )
        shared = {r.document for r in self.train} & {r.document for r in self.heldout}
        if shared:
            raise DataError(
                f"{self.name}: {len(shared)} documents are in the training and the held-out part, "
                f"for example {sorted(shared)[0]!r}; a document belongs to one of them"
            )


def ask(document: str, prompt: str, answer: str, *, origin: str = "", system: str | None = None) -> Record:
    """A record of one question and one answer, optionally under a system message."""
    messages = [Message("user", prompt), Message("assistant", answer)]
    if system is not None:
        messages.insert(0, Message("system", system))
    return Record(document=document, messages=tuple(messages), origin=origin)


def unit_hash(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on nothing but `text` and `seed`: the same on every machine."""
    digest = hashlib.sha256(f"{seed}\x00{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_by_document(records: Iterable[Record], *, name: str, heldout_share: float, seed: int) -> Corpus:
    """Give each document to one side by a hash of its name; about `heldout_share` of them are held out.

    When the hash holds out no document at all (few documents), the one with the smallest hash is held out;
    when it holds out all of them, the one with the largest hash is trained on.

    Raises:
        DataError: there is only one document, or none.
    """
    records = list(records)
    if len({r.document for r in records}) == 1:
        raise DataError(
            f"{name}: only one document ({records[0].document}), and the rows of one document are not split "
            "between training and held-out. Give several documents, or data.heldout_path."
        )
    position = {r.document: unit_hash(r.document, seed) for r in records}
    held = {document for document, value in position.items() if value < heldout_share}
    if position and not held:
        held = {min(position, key=position.__getitem__)}
    if position and len(held) == len(position):
        held.remove(max(position, key=position.__getitem__))
    return Corpus(
        name=name,
        train=[r for r in records if r.document not in held],
        heldout=[r for r in records if r.document in held],
    )
