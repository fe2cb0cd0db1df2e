"""finance: payments, invoices, taxes and bank transfers, explained field by field. A document is a resource.

Source: the documentation strings of the package `stripe` (MIT). They are read from the source files, nothing is
imported. A text that several resources share is taken once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from zen_train.data.corpora.text import pick, tidy, whole_sentences
from zen_train.data.records import Record, ask

_ANSWER_CHARACTERS = (60, 600)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SKIPPED_FIELDS = {"id", "object", "livemode", "metadata", "created", "expand", "url", "deleted", "limit"}


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """One record for each resource with a description and for each of its documented fields."""
    root = folders["stripe"] / "stripe"
    seen: set[str] = set()
    for path in sorted(root.rglob("_*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in {"params", "events", "v2"} or path.stem.endswith(("_service", "__")):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        document = relative.with_suffix("").as_posix().replace("/_", ".").lstrip("_")
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and ast.get_docstring(node):
                for prompt, answer, origin in _resource(node, seed):
                    if answer not in seen:
                        seen.add(answer)
                        yield ask(document, prompt, answer, origin=f"{document}: {origin}")


def _resource(node: ast.ClassDef, seed: int) -> Iterator[tuple[str, str, str]]:
    name = _words(node.name)
    description = _prose(ast.get_docstring(node) or "")
    if len(description) >= _ANSWER_CHARACTERS[0]:
        forms = (
            f"What is {_article(name)} in a payment system?",
            f"Explain the term {name} for online payments.",
        )
        yield pick(forms, node.name, seed), description, node.name
    yield from _fields(node, name, node.name, seed)


def _fields(node: ast.ClassDef, path: str, origin: str, seed: int) -> Iterator[tuple[str, str, str]]:
    """The documented attributes of a class and of the classes inside it, which describe nested objects."""
    for target, documentation in zip(node.body, node.body[1:], strict=False):
        if isinstance(target, ast.AnnAssign) and isinstance(target.target, ast.Name):
            field = target.target.id
            text = _docstring(documentation)
            if text is None or field in _SKIPPED_FIELDS:
                continue
            answer = _prose(text)
            if len(answer) >= _ANSWER_CHARACTERS[0]:
                where = f"{origin}.{field}"
                forms = (
                    f"What does the field `{field}` of {_article(path)} mean?",
                    f"In a payment system, what is `{field}` of {_article(path)} for?",
                    f"Explain `{field}` ({path}).",
                )
                yield pick(forms, where, seed), answer, where
    for inner in node.body:
        if isinstance(inner, ast.ClassDef):
            yield from _fields(
                inner, f"{_words(inner.name)} of {_article(path)}", f"{origin}.{inner.name}", seed
            )


def _docstring(node: ast.stmt) -> str | None:
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return node.value.value
    return None


def _prose(text: str) -> str:
    """Whole sentences without links; those that only point to a guide are dropped."""
    text = re.sub(r"<[^>]+>", "", _LINK.sub(r"\1", text))
    text = " ".join(
        p for p in re.split(r"\n\s*\n", text) if not p.strip().startswith(("Related guide", "-", "*"))
    )
    kept = [
        s
        for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", tidy(text))
        if not re.search(r"\bhere\b|[Ll]earn more|[Ss]ee the|refer to|For more", s)
    ]
    return whole_sentences(" ".join(kept), most_characters=_ANSWER_CHARACTERS[1])


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()


def _article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words
