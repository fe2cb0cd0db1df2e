"""legal: clauses of software and content licences, to be drafted from a heading or continued.

Source: the licence texts of the package `spdx` (CC0). A document is a family of licences (all GNU licences,
all Creative Commons licences, ...), because the versions of one licence share most of their text. A clause
whose beginning occurs in several licences is taken once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from zen_train.data.corpora.text import pick, sentences, tidy, whole_sentences
from zen_train.data.records import Record, ask

_FAMILIES = {
    "agpl": "gnu",
    "gpl": "gnu",
    "lgpl": "gnu",
    "gfdl": "gnu",
    "npl": "mpl",
    "0bsd": "bsd",
    "w": "w3c",
}
_HEADING = re.compile(
    r"^(?:section\s+)?(?:\d+(?:\.\d+)*[.)]?|[a-z][.)]|\([a-z0-9]+\)|[IVX]+\.)?\s*"
    r"([A-Z][A-Za-z/&,'’ -]{5,60}?)\s*[.:—]\s+(?=[A-Z\"“])(.+)$"
)
_NUMBER = re.compile(r"^(?:\(?(?:\d+(?:\.\d+)*|[a-zA-Z]|[ivxIVX]+)[.)]\s*)+")
_ANSWER_CHARACTERS = (120, 700)


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """One record for each clause that has a heading, or that is long enough to be continued."""
    data = folders["spdx"] / "spdx" / "data"
    names = {entry["id"]: entry["name"] for entry in json.loads((data / "db.json").read_text())["licenses"]}
    seen: set[str] = set()
    for path in sorted(data.glob("*.txt")):
        if path.stem.startswith("deprecated_") or path.stem not in names:
            continue
        family = _family(path.stem)
        for number, clause in enumerate(_clauses(path.read_text(encoding="utf-8", errors="replace"))):
            record = _record(clause, names[path.stem], family, f"{path.stem}:{number}", seed)
            if record is None or record.messages is None:
                continue
            beginning = re.sub(r"\W", "", record.messages[-1].content.lower())[:80]
            if beginning not in seen:
                seen.add(beginning)
                yield record


def _record(clause: str, name: str, family: str, origin: str, seed: int) -> Record | None:
    heading = _HEADING.match(clause)
    if heading:
        title, body = heading.groups()
        answer = whole_sentences(body, most_characters=_ANSWER_CHARACTERS[1])
        title = title.title() if title.isupper() else title
        forms = (
            f'Draft the clause "{title}" of a licence agreement.',
            f'How does the {name} word its clause "{title}"?',
            f'Write a licence clause with the heading "{title}".',
        )
        prompt = pick(forms, origin, seed)
    else:
        parts = sentences(_NUMBER.sub("", clause))
        if len(parts) < 2:
            return None
        answer = whole_sentences(" ".join(parts[1:]), most_characters=_ANSWER_CHARACTERS[1])
        forms = (
            f"Continue this clause of the {name}:\n\n{parts[0]}",
            f"A licence says:\n\n{parts[0]}\n\nHow does the clause go on?",
            f"Complete the following legal text.\n\n{parts[0]}",
        )
        prompt = pick(forms, origin, seed)
    if len(answer) < _ANSWER_CHARACTERS[0] or len(prompt) > 500 or not _is_prose(answer):
        return None
    return ask(family, prompt, answer, origin=origin)


def _clauses(text: str) -> list[str]:
    clauses = [tidy(paragraph) for paragraph in re.split(r"\n\s*\n", text.replace("\r", ""))]
    return [clause for clause in clauses if len(clause) >= 160]


def _is_prose(text: str) -> bool:
    """English sentences, not a table, a template or another language."""
    letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in text)
    words = set(re.findall(r"[a-z]+", text.lower()))
    return (
        letters > 0.9 * len(text)
        and len(words & {"the", "of", "to", "and", "any", "or"}) >= 3
        and "<" not in text
    )


def _family(identifier: str) -> str:
    first = re.split(r"[-\d.+]", identifier.lower())[0] or identifier.lower()
    return _FAMILIES.get(first, first)
