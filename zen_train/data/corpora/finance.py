"""finance: ratios, models, risk measures, and words of payments. A document is a measure or a resource.

Sources: the documentation strings of the packages `financetoolkit` (MIT) and `stripe` (MIT). They are read
from the source files; nothing is imported. A text that occurs several times is taken once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from zen_train.data.corpora.text import pick, sentences, tidy, whole_sentences
from zen_train.data.records import Record, ask

_ANSWER_CHARACTERS = (60, 620)
_TOOLKIT_PARTS = {
    "econometrics", "economics", "fixedincome", "models", "options", "performance",
    "ratios", "risk", "technicals",
}  # fmt: skip
_END = re.compile(
    r"^\s*(?:Args|Returns|Raises|Notes?|Examples?|As an example|For more information|Also known as)\b",
    flags=re.MULTILINE,
)
_FORMULA = re.compile(r"The formulas? (?:is|are) as follows:\s*\n(.+?)(?=\n\s*\n|\Z)", flags=re.DOTALL)
_ABOUT_CODE = re.compile(
    r"`|\bToolkit\b|\bDataFrame\b|\bpd\.|\binstance\b|\btickers?\b|\bNaN|https?:|\bparameter\b|\bhere\b|\babove\b"
    r"|\bbelow\b|\bfunction\b|\bargument\b|\bFMP\b|\bAPI\b|[A-Za-z]_[A-Za-z]"
)
_REFERS_BACK = re.compile(
    r"(?:It|Its|This|These|They|Their|Both|That|Such|However|Unlike|Here|Thus|Therefore)\b"
)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_POINTER = re.compile(r"\bhere\b|[Ll]earn more|[Ss]ee the|[Rr]efer to|For more")
_SKIPPED_FIELDS = {"id", "object", "livemode", "metadata", "created", "expand", "url", "deleted", "limit"}


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """Definitions and formulas of measures, then descriptions of payment resources and of their fields."""
    seen: set[str] = set()
    for document, prompt, answer, origin in (
        *_measures(folders["financetoolkit"] / "financetoolkit", seed),
        *_resources(folders["stripe"] / "stripe", seed),
    ):
        if answer not in seen:
            seen.add(answer)
            yield ask(document, prompt, answer, origin=origin)


_Task = tuple[str, str, str, str]  # document, prompt, answer, origin


def _measures(root: Path, seed: int) -> Iterator[_Task]:
    for path in sorted(root.rglob("*.py")):
        part = path.relative_to(root).parts[0]
        if part not in _TOOLKIT_PARTS or path.stem in {"helpers", "__init__"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith(("get_", "collect_")):
                name = node.name.split("_", 1)[1].replace("_", " ")
                yield from _measure(
                    name, ast.get_docstring(node) or "", f"{part}/{path.stem}.{node.name}", seed
                )


def _measure(name: str, docstring: str, origin: str, seed: int) -> Iterator[_Task]:
    text = _END.split(docstring)[0]
    definition = _definition(name, _FORMULA.sub("", text))
    if len(definition) >= _ANSWER_CHARACTERS[0]:
        forms = (
            f"What is the {name} in finance?",
            f"Explain the {name} to an investor.",
            f"What does the {name} tell an analyst?",
        )
        yield name, pick(forms, origin, seed), definition, origin
    if match := _FORMULA.search(docstring):
        lines = [line.strip() for line in match.group(1).split("\n") if line.strip()]
        joined = re.sub(r"\n(?![-*•] |[A-Z][^=\n]{2,60}=)", " ", "\n".join(lines))
        if "=" in joined and len(joined) <= 400 and "_" not in joined:
            yield name, f"Give the formula of the {name}.", joined, f"{origin} formula"


def _definition(name: str, text: str) -> str:
    """The prose of a documentation string as an answer, without sentences about the code."""
    prose = " ".join(p for p in re.split(r"\n\s*\n", text) if not re.match(r"\s*[-*•] |\s{4,}", p))
    kept: list[str] = []
    for number, sentence in enumerate(sentences(prose)):
        if number == 0:
            apposition = re.match(
                r"Calculates? (the .+?|an? .+?)(?: \(.*?\))?, ((?:an?|the|which is) .+)$", sentence
            )
            if apposition:
                sentence = (
                    f"{apposition.group(1).capitalize()} is {apposition.group(2).removeprefix('which is ')}"
                )
            elif re.match(
                r"(?:Calculate|Compute|Retrieve|Obtain|Get|Collect|Determine|Estimate|Return|Perform)s?\b",
                sentence,
            ):
                continue
        if not _ABOUT_CODE.search(sentence) and sentence.endswith((".", ")")) and ":" not in sentence[-2:]:
            kept.append(sentence)
    while kept and _REFERS_BACK.match(kept[0]):
        kept.pop(0)
    return whole_sentences(" ".join(kept), most_characters=_ANSWER_CHARACTERS[1])


def _resources(root: Path, seed: int) -> Iterator[_Task]:
    for path in sorted(root.rglob("_*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] in {"params", "events", "v2", "terminal", "test_helpers"}:
            continue
        if "stripe_object" in path.stem or "resource" in path.stem:
            continue  # the machinery of the client library
        document = "payments " + relative.with_suffix("").as_posix().replace("/_", " ").lstrip("_").replace(
            "_", " "
        )
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.ClassDef)
                and ast.get_docstring(node)
                and not path.stem.endswith("_service")
            ):
                name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", node.name).lower()
                article = "an" if name[0] in "aeiou" else "a"
                description = _prose(ast.get_docstring(node) or "")
                if len(description) >= _ANSWER_CHARACTERS[0]:
                    forms = (
                        f"What is {article} {name} in online payments?",
                        f"Explain the payment term {name}.",
                    )
                    yield document, pick(forms, document, seed), description, document
                for field, text in _fields(node, ""):
                    origin = f"{document}: {field}"
                    questions = (
                        f"What does the field `{field}` of {article} {name} mean?",
                        f"In a payment system, what is `{field}` of {article} {name} for?",
                        f"Explain the field `{field}` ({name}).",
                    )
                    yield document, pick(questions, origin, seed), text, origin


def _fields(node: ast.ClassDef, path: str) -> Iterator[tuple[str, str]]:
    """The documented attributes of a class and of the classes directly inside it, with dotted names."""
    for target, documentation in zip(node.body, node.body[1:], strict=False):
        if isinstance(target, ast.AnnAssign) and isinstance(target.target, ast.Name):
            field = target.target.id
            text = _prose(_string(documentation))
            if field not in _SKIPPED_FIELDS and len(text) >= _ANSWER_CHARACTERS[0]:
                yield path + field, text
    for inner in node.body:
        if isinstance(inner, ast.ClassDef) and not path:
            yield from _fields(inner, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", inner.name).lower() + ".")


def _string(node: ast.stmt) -> str:
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return node.value.value
    return ""


def _prose(text: str) -> str:
    """Whole sentences without links; sentences that only point to a guide are dropped."""
    text = re.sub(r"<[^>]+>", "", _LINK.sub(r"\1", text))
    paragraphs = [
        p for p in re.split(r"\n\s*\n", text) if not p.strip().startswith(("Related guide", "-", "*"))
    ]
    kept = [sentence for sentence in sentences(tidy(" ".join(paragraphs))) if not _POINTER.search(sentence)]
    return whole_sentences(" ".join(kept), most_characters=_ANSWER_CHARACTERS[1])
