"""medical: coding with ICD-10-CM, the classification of diseases. A document is a chapter of it.

Source: the tabular list inside the package `simple-icd-10-cm` (MIT; the list is the work of US federal
agencies). The tasks can be answered from the question and from knowledge of medicine: pick the code for a
term among those of its category, say how a category is divided, and say what a category includes or
excludes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

from zen_train.data.corpora.text import bullets, pick
from zen_train.data.records import Record, ask
from zen_train.errors import DataError

_LISTED = (3, 9)  # codes in a list
_LIST_CHARACTERS = 520
_TERMS = 2  # of those that one code includes


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """Records for every category and subcategory with a list of moderate length."""
    files = sorted((folders["simple-icd-10-cm"] / "simple_icd_10_cm" / "data").glob("*.xml"))
    if not files:
        raise DataError("simple-icd-10-cm: the package has no tabular list (*.xml); pin version 1.5.0")
    for chapter in ElementTree.parse(files[0]).getroot().iter("chapter"):
        document = "chapter " + (chapter.findtext("name") or "")
        for section in chapter.iter("section"):
            block = section.findtext("desc") or ""
            for category in section.iter("diag"):
                yield from _category(category, document, block, seed)


def _category(category: ElementTree.Element, document: str, block: str, seed: int) -> Iterator[Record]:
    code, name = _code(category), _description(category)
    children = [(_code(c), _description(c), c) for c in category.findall("diag")]
    listed = "\n".join(f"{child}: {text}" for child, text, _ in children)
    if _LISTED[0] <= len(children) <= _LISTED[1] and len(listed) <= _LIST_CHARACTERS:
        forms = (
            f"How is {code}, {name}, divided in ICD-10-CM?",
            f"List the ICD-10-CM codes directly below {code} ({name}).",
            f"Which subcategories does {name} ({code}) have in ICD-10-CM?",
        )
        yield ask(document, pick(forms, code, seed), listed, origin=f"{code} divided")
        for child, text, element in children:
            for term in _notes(element, "inclusionTerm")[:_TERMS]:
                yield ask(
                    document,
                    f"Pick the ICD-10-CM code for this diagnosis: {term}\n\n"
                    f"Codes of {code}, {name}:\n{listed}",
                    f"{child}: {text}",
                    origin=f"{child} term",
                )
    for tag, question in (
        ("includes", "Which conditions does {code}, {name}, include in ICD-10-CM?"),
        ("excludes1", "Which conditions must not be coded together with {code}, {name}, in ICD-10-CM?"),
        (
            "excludes2",
            "Which conditions are not part of {code}, {name}, but may be coded with it in ICD-10-CM?",
        ),
        ("useAdditionalCode", "Which additional code does ICD-10-CM ask for with {code}, {name}?"),
        ("codeFirst", "What is coded first with {code}, {name}, in ICD-10-CM?"),
    ):
        notes = _notes(category, tag)
        if notes and sum(map(len, notes)) <= _LIST_CHARACTERS:
            answer = bullets(notes) if len(notes) > 1 else notes[0]
            yield ask(document, question.format(code=code, name=name), answer, origin=f"{code} {tag}")
    if not children and name:
        naming = (
            f"What does the ICD-10-CM code {code} stand for? It belongs to the block {block}.",
            f"Name the condition with the ICD-10-CM code {code}, in the block {block}.",
        )
        if len(code) == 3:  # a category without subcategories; longer codes are in the lists above
            yield ask(document, pick(naming, code, seed), f"{code} is {name}.", origin=f"{code} name")


def _code(element: ElementTree.Element) -> str:
    return element.findtext("name") or ""


def _description(element: ElementTree.Element) -> str:
    return re.sub(r"\s+", " ", element.findtext("desc") or "").strip()


def _notes(element: ElementTree.Element, tag: str) -> list[str]:
    return [
        re.sub(r"\s+", " ", note.text or "").strip()
        for part in element.findall(tag)
        for note in part.iter("note")
    ]
