"""security: weaknesses of the CWE list, explained, recognised and mitigated. A document is a weakness.

Source: the tables of the package `cwe2` (MIT; CWE is used under MITRE's terms of use). A passage that is
repeated under several weaknesses is taken once.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from zen_train.data.corpora.text import bullets, pick, tidy, whole_sentences
from zen_train.data.records import Record, ask

_ANSWER_CHARACTERS = 620


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """Up to five records for each weakness."""
    table = folders["cwe2"] / "cwe2" / "database_v49" / "helpful_views" / "2000.csv"
    seen: set[str] = set()
    with open(table, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["Status"] in {"Deprecated", "Obsolete"} or row["Name"].startswith("DEPRECATED"):
                continue
            document = f"CWE-{row['CWE-ID']}"
            for kind, prompt, answer in _tasks(row, document, seed):
                if len(answer) >= 30 and answer not in seen:
                    seen.add(answer)
                    yield ask(document, prompt, answer, origin=f"{document} {kind}")


def _tasks(row: dict[str, str], document: str, seed: int) -> Iterator[tuple[str, str, str]]:
    name = f"{row['Name']} ({document})"
    description = whole_sentences(row["Description"], most_characters=_ANSWER_CHARACTERS)
    forms = (
        f"Explain the weakness {name}.",
        f"What is meant by {name}?",
        f"Describe {name} to a developer.",
    )
    yield "description", pick(forms, document, seed), description
    yield "name", f"Which weakness is this?\n\n{description}", f"This is {name}."
    extended = whole_sentences(row["Extended Description"], most_characters=_ANSWER_CHARACTERS)
    yield "details", f"How does {name} come about, and what can go wrong?", extended
    mitigations = []
    for entry in _entries(row["Potential Mitigations"]):
        text = whole_sentences(_field(entry, "DESCRIPTION"), most_characters=300)
        if text:
            mitigations.append(f"{_phase(entry)}{text}")
    yield "mitigations", f"How can {name} be prevented?", _fitting(mitigations)
    consequences = []
    for entry in _entries(row["Common Consequences"]):
        impact = ", ".join(re.findall(r"IMPACT:([^:]+)", entry))
        scope = ", ".join(re.findall(r"SCOPE:([^:]+)", entry))
        note = whole_sentences(_field(entry, "NOTE"), most_characters=240)
        if impact and scope:
            consequences.append(tidy(f"{scope}: {impact}. {note}"))
    yield "consequences", f"What are the consequences of {name}?", _fitting(consequences)


def _entries(cell: str) -> list[str]:
    return [part for part in re.split(r"::(?=[A-Z])", cell.strip(":")) if part]


def _field(entry: str, name: str) -> str:
    match = re.search(rf"(?:^|:){name}:(.*?)(?=:[A-Z][A-Z ]+:|$)", entry, flags=re.DOTALL)
    return re.sub(r"\s*\[REF-\d+\]", "", match.group(1)).strip(": ") if match else ""


def _phase(entry: str) -> str:
    phase = _field(entry, "PHASE")
    return f"{phase}: " if phase else ""


def _fitting(items: list[str]) -> str:
    taken: list[str] = []
    for item in items:
        if sum(map(len, taken)) + len(item) > _ANSWER_CHARACTERS:
            break
        taken.append(item)
    return bullets(taken) if len(taken) > 1 else "".join(taken)
