"""science: quantities of the earth sciences and facts of the chemical elements. A document is one of either.

Sources: the CF standard name table (definitions of physical quantities with their units) as shipped in the
package `compliance-checker` (Apache-2.0), and the properties of the elements in the package `mendeleev`
(MIT). Sentences that the table repeats under many names are taken once per name but never as a whole answer
twice.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

from zen_train.data.corpora.text import pick, tidy, whole_sentences
from zen_train.data.records import Record, ask

_ANSWER_CHARACTERS = (60, 600)
_UNIT_EXPONENT = re.compile(r"([A-Za-z])(-?\d)")


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """One record for each quantity with a definition, and one for each known fact of an element."""
    table = folders["compliance-checker"] / "compliance_checker" / "data" / "cf-standard-name-table.xml"
    yield from _quantities(table, seed)
    yield from _elements(folders["mendeleev"] / "mendeleev" / "elements.db", seed)


def _quantities(table: Path, seed: int) -> Iterator[Record]:
    seen: set[str] = set()
    for entry in ElementTree.parse(table).getroot().iter("entry"):
        identifier = entry.get("id") or ""
        name = identifier.replace("_", " ")
        definition = re.sub(r"\"([a-z_]+)\"", r"'\1'", tidy(entry.findtext("description") or ""))
        answer = whole_sentences(definition, most_characters=_ANSWER_CHARACTERS[1])
        if len(answer) < _ANSWER_CHARACTERS[0] or answer in seen or "alias" in answer.lower():
            continue
        seen.add(answer)
        unit = (entry.findtext("canonical_units") or "").strip()
        if unit and unit != "1":
            answer += " It is given in " + _UNIT_EXPONENT.sub(r"\1^\2", unit) + "."
        forms = (
            f'What does the quantity "{name}" mean in the earth sciences?',
            f"Define {name}, and give its unit.",
            f"Explain the physical quantity {name}.",
        )
        yield ask(f"quantity {identifier}", pick(forms, identifier, seed), answer, origin=identifier)


def _elements(database: Path, seed: int) -> Iterator[Record]:
    columns = (
        "name, symbol, atomic_number, atomic_weight, electronic_configuration, group_id, period, block, "
        "density, en_pauling, discovery_year, discovery_location, is_radioactive"
    )
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        for row in connection.execute(f"select {columns} from elements order by atomic_number"):
            document = f"element {row['name']}"
            for kind, forms, answer in _facts(row):
                yield ask(document, pick(forms, document + kind, seed), answer, origin=f"{document}, {kind}")


def _facts(row: sqlite3.Row) -> Iterator[tuple[str, tuple[str, ...], str]]:
    name, symbol = row["name"], row["symbol"]
    yield (
        "identity",
        (f"What is the element {name}?", f"Give the symbol, atomic number and atomic weight of {name}."),
        f"{name} is the chemical element with the symbol {symbol} and atomic number "
        f"{row['atomic_number']}. Its standard atomic weight is {row['atomic_weight']:g}.",
    )
    group = f"group {row['group_id']}, " if row["group_id"] else ""
    yield (
        "place",
        (
            f"Where does {name} stand in the periodic table?",
            f"Which period and block does {name} ({symbol}) belong to?",
        ),
        f"{name} stands in {group}period {row['period']}, in the {row['block']} block of the periodic table.",
    )
    yield (
        "electrons",
        (f"What is the electron configuration of {name}?", f"Give the ground-state electrons of {symbol}."),
        f"The ground-state electron configuration of {name} is {row['electronic_configuration']}.",
    )
    if row["density"]:
        yield (
            "density",
            (f"How dense is {name}?", f"What is the density of {name} ({symbol})?"),
            f"The density of {name} is {row['density']:g} g/cm^3.",
        )
    if row["en_pauling"]:
        yield (
            "electronegativity",
            (
                f"What is the electronegativity of {name}?",
                f"How electronegative is {name} on Pauling's scale?",
            ),
            f"On Pauling's scale the electronegativity of {name} is {row['en_pauling']:g}.",
        )
    if row["discovery_year"] and row["discovery_location"]:
        yield (
            "discovery",
            (f"When and where was {name} discovered?", f"Tell me about the discovery of {name}."),
            f"{name} was discovered in {row['discovery_year']} ({row['discovery_location']}).",
        )
