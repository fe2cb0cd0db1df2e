"""Small helpers that several corpora share: whole sentences, tidy spaces, and choices that never change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from zen_train.data.records import unit_hash

T = TypeVar("T")

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[A-Z\"'(\[0-9])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|vs|cf|et al|al|Dr|Mr|Mrs|St|No|Inc|Ltd|U\.S|Sec|Fig|Eq)\.)$"
)


def pick(options: Sequence[T], key: str, seed: int) -> T:
    """One of `options`, always the same for the same key and seed."""
    return options[int(unit_hash(key, seed) * len(options))]


def tidy(text: str) -> str:
    """Runs of white space as one space, none at the ends."""
    return " ".join(text.split())


def sentences(text: str) -> list[str]:
    """The sentences of `text`, each with its full stop. Common abbreviations do not end one."""
    parts: list[str] = []
    for part in _SENTENCE_END.split(tidy(text)):
        if parts and _ABBREVIATION.search(parts[-1]):
            parts[-1] += " " + part
        else:
            parts.append(part)
    return [part for part in parts if part]


def whole_sentences(text: str, *, most_characters: int) -> str:
    """As many sentences from the front of `text` as fit; empty when not even the first one does."""
    taken: list[str] = []
    for sentence in sentences(text):
        if sum(map(len, taken)) + len(taken) + len(sentence) > most_characters:
            break
        taken.append(sentence)
    return " ".join(taken)


def lower_first(text: str) -> str:
    """`Restart the server` as `restart the server`; acronyms such as `IAM` stay."""
    return text[:1].lower() + text[1:] if len(text) > 1 and text[1:2].islower() else text


def bullets(items: Sequence[str]) -> str:
    """A list with one dash a line."""
    return "\n".join(f"- {item}" for item in items)
