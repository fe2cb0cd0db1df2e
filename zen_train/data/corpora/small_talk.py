"""chat: short conversations and questions of general interest. A document is a topic.

Source: the English files of the package `chatterbot-corpus` (BSD-3-Clause). Left out after reading them:
long lists of code, politics, gossip about other chat programs, and topics whose prompts are cut off or
meaningless. Most of the exchanges are single lines, so they are also strung together to conversations of a
few turns within their topic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from zen_train.data.corpora.text import tidy
from zen_train.data.records import Message, Record, unit_hash

_LEFT_OUT = {"coding", "gossip", "movies", "politics", "psychology", "sports"}
_DIALOGUES = {
    "conversations",
    "greetings",
    "health",
}  # here turns alternate; elsewhere the rest are other answers
_ROUNDS, _EXCHANGES = 3, 3  # how often a topic is strung together anew, and exchanges a conversation

_Exchange = tuple[str, str]


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """Single exchanges and dialogues as they are, then conversations of three exchanges each."""
    folder = folders["chatterbot-corpus"] / "chatterbot_corpus" / "data" / "english"
    for path in sorted(folder.glob("*.yml")):
        if path.stem in _LEFT_OUT:
            continue
        conversations = yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]
        exchanges: list[_Exchange] = []
        for number, turns in enumerate(conversations):
            if not isinstance(turns, list):
                continue  # a line that is no conversation
            said = [_sentence(str(turn)) for turn in turns if turn is not None]
            if path.stem in _DIALOGUES and len(said) > 3:
                pairs = list(zip(said[::2], said[1::2], strict=False))
                yield _conversation(path.stem, pairs, f"{path.stem}:{number}")
            else:
                exchanges += [(said[0], answer) for answer in said[1:]]
        exchanges = list(dict.fromkeys(exchanges))
        for number, exchange in enumerate(exchanges):
            yield _conversation(path.stem, [exchange], f"{path.stem} exchange {number}")
        for turn in range(_ROUNDS):
            order = sorted(exchanges, key=lambda pair: unit_hash(f"{turn} {pair}", seed))
            for start in range(0, len(order) - _EXCHANGES + 1, _EXCHANGES):
                origin = f"{path.stem} round {turn}, {start}"
                yield _conversation(path.stem, order[start : start + _EXCHANGES], origin)


def _conversation(topic: str, exchanges: list[_Exchange], origin: str) -> Record:
    messages = [
        message
        for question, answer in exchanges
        for message in (Message("user", question), Message("assistant", answer))
    ]
    return Record(document=topic, messages=tuple(messages), origin=origin)


def _sentence(text: str) -> str:
    """With a capital in front, and not in capitals throughout."""
    text = tidy(text)
    if text.isupper() and len(text) > 4:
        text = text.lower()
    return text[:1].upper() + text[1:]
