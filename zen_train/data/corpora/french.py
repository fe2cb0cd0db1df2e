"""translate: sentences of user interfaces, English to French and back. A document is a message catalogue.

Sources: Django's `.po` files (BSD-3-Clause) and the French language pack of JupyterLab (BSD-3-Clause).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from zen_train.data.corpora.text import pick, tidy
from zen_train.data.records import Record, ask

_CHARACTERS = (12, 420)
_Pair = tuple[str, str]


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """Two records, one for each direction, for every message of at least two words."""
    for document, pairs in _catalogues(folders):
        for number, (english, french) in enumerate(pairs):
            if not _usable(english, french):
                continue
            origin = f"{document}:{number}"
            to_french = (
                f"Translate into French:\n\n{english}",
                f"How do you say this in French?\n\n{english}",
                f"English: {english}\nFrench:",
            )
            to_english = (
                f"Translate into English:\n\n{french}",
                f"Traduisez en anglais :\n\n{french}",
                f"French: {french}\nEnglish:",
            )
            yield ask(document, pick(to_french, origin, seed), french, origin=f"{origin} en-fr")
            yield ask(document, pick(to_english, origin, seed), english, origin=f"{origin} fr-en")


def _catalogues(folders: Mapping[str, Path]) -> Iterator[tuple[str, list[_Pair]]]:
    root = folders["django"] / "django"
    for path in sorted(root.rglob("locale/fr/LC_MESSAGES/*.po")):
        yield path.relative_to(root).as_posix(), _po_pairs(path.read_text(encoding="utf-8"))
    root = folders["jupyterlab-language-pack-fr-FR"]
    for path in sorted(root.glob("*/locale/fr_FR/LC_MESSAGES/*.json")):
        messages = json.loads(path.read_text(encoding="utf-8"))
        pairs = [(key.split("\x04")[-1], value[0]) for key, value in messages.items() if key and value]
        yield path.stem, pairs


def _po_pairs(text: str) -> list[_Pair]:
    """The messages of a gettext catalogue without plural forms; fuzzy ones are left out."""
    pairs: list[_Pair] = []
    for entry in text.split("\n\n"):
        if "msgid_plural" in entry or "#, fuzzy" in entry:
            continue
        fields: dict[str, str] = {}
        current = ""
        for line in entry.split("\n"):
            if match := re.match(r"(msgid|msgstr|msgctxt) (\".*\")$", line):
                current = match.group(1)
                fields[current] = ast.literal_eval(match.group(2))
            elif line.startswith('"') and current:
                fields[current] += ast.literal_eval(line)
        if fields.get("msgid") and fields.get("msgstr"):
            pairs.append((fields["msgid"], fields["msgstr"]))
    return pairs


def _usable(english: str, french: str) -> bool:
    """A translated phrase of moderate length, not a format string and not a list of shortcuts."""
    if english == french or not all(
        _CHARACTERS[0] <= len(tidy(text)) <= _CHARACTERS[1] for text in (english, french)
    ):
        return False
    return " " in english.strip() and not re.search(r"%\(|<[a-z/]|\{\{|\n\s*\n", english + french)
