"""chat: short conversations and questions of general interest. A document is a topic.

Source: the English files of the package `chatterbot-corpus` (BSD-3-Clause). Left out: long lists of code and of
repeated support phrases, politics, and gossip about other chat programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from zen_train.data.corpora.text import tidy
from zen_train.data.records import Message, Record, ask

_LEFT_OUT = {"coding", "politics", "gossip"}
_DIALOGUES = {
    "conversations",
    "greetings",
    "health",
}  # here the turns alternate; elsewhere they are other answers


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """One record for each dialogue, or for each answer to a question."""
    folder = folders["chatterbot-corpus"] / "chatterbot_corpus" / "data" / "english"
    for path in sorted(folder.glob("*.yml")):
        if path.stem in _LEFT_OUT:
            continue
        conversations = yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]
        for number, turns in enumerate(conversations):
            said = [_sentence(str(turn)) for turn in turns if turn is not None]
            origin = f"{path.stem}:{number}"
            if path.stem in _DIALOGUES and len(said) >= 2:
                yield _dialogue(path.stem, said, origin)
            else:
                for other, answer in enumerate(said[1:]):
                    yield ask(path.stem, said[0], answer, origin=f"{origin}.{other}")


def _dialogue(topic: str, said: list[str], origin: str) -> Record:
    said = said[: len(said) // 2 * 2]
    messages = tuple(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(said))
    return Record(document=topic, messages=messages, origin=origin)


def _sentence(text: str) -> str:
    """With a capital in front and not in capitals throughout."""
    text = tidy(text)
    if text.isupper():
        text = text.lower()
    return text[:1].upper() + text[1:]
