"""What the generated parts of README.md are made from: recorded figures, and Markdown tables of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"


@cache
def lines_of(bench: str) -> dict[str, dict[str, Any]]:
    """The last JSON line of each case of a bench."""
    path = RESULTS / f"{bench}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {row["case"]: row for row in rows}


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: first column left, the others right."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ruler, *rows])
