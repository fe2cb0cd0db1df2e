"""The generated parts of README.md: `python scripts/readme.py` writes them, `--check` fails when they are out of date.

Each part stands between `<!-- generated: NAME -->` and `<!-- end -->`, and is made from the configuration or from the
JSON lines in scripts/results/. Of figures measured more than once, the last line counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from zen_train.data.table import variant_configs

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"


def lines_of(bench: str) -> dict[str, dict[str, Any]]:
    """The last JSON line of each case of a bench."""
    path = RESULTS / f"{bench}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {row["case"]: row for row in rows}


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: first column left, the others right."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ruler, *rows])


def quick() -> str:
    """Base, fine-tune and delta of every variant."""
    found = lines_of("variants_quick")
    names = sorted({case.split("/")[0] for case in found})

    def value(name: str, what: str) -> float:
        row = found.get(f"{name}/{what}")
        return row["value"] if row else float("nan")

    rows = [
        [
            name,
            f"{value(name, 'base_loss'):.3f}",
            f"{value(name, 'fine_tune_loss'):.3f}",
            f"{value(name, 'delta_loss'):.3f}",
            f"{value(name, 'share_kept'):.1f} %",
            f"{value(name, 'delta_bytes') / 1e6:.1f} MB",
            f"{value(name, 'merges_accepted'):.0f} {found[f'{name}/merges_accepted']['unit']}",
            f"{value(name, 'seconds'):.0f} s",
        ]
        for name in names
    ]
    return table(["variant", "base", "fine-tune", "delta", "kept", "size", "merges kept", "whole run"], rows)


def variants() -> str:
    """What each variant is trained on."""
    rows = []
    for variant in variant_configs().values():
        found = [f"{source.package} {source.version} ({source.licence})" for source in variant.sources]
        rows.append(
            [f"`{variant.name}`", ", ".join(found) if len(found) <= 4 else "a mixture of all the others"]
        )
    return table(["variant", "sources"], rows).replace("---:", "---")


def figures(bench: str, *, left_out: str = "$^") -> str:
    """Every case of a bench with its bound; `left_out` is a pattern of cases that would make the table too long."""
    rows = []
    for case, row in lines_of(bench).items():
        if re.search(left_out, case):
            continue
        sign = (
            "at most"
            if row["holds"] is None or row["holds"] == (row["value"] <= row["bound"])
            else "at least"
        )
        bound = "" if row["bound"] is None else f"{sign} {row['bound']:g} {row['unit']}"
        holds = {None: "", True: "yes", False: "**no**"}[row["holds"]]
        rows.append([case, f"{row['value']:.4g} {row['unit']}", bound, holds, row["against"] or ""])
    return table(["figure", "measured", "bound", "holds", "against"], rows)


KEPT_OF_ALL = ["matrix", "row", "pushed", "two_bits", "distilled", "aware", "aware_1.3"]
KEPT_OF_SOME = [
    "pushed",
    "spread_1",
    "spread_1.25",
    "low_rank_and_signs",
    "two_bits",
    "low_rank",
    "delta_come",
    "directions",
    "directions_0.5",
    "ternary",
]


def kept(methods: list[str], *, only: str | None = None) -> str:
    """What each method keeps of a full fine-tune's gain, with its interval; for variants measured with `only`."""
    found = lines_of("fidelity")
    names = sorted({case.split("/")[0] for case in found if only is None or case.endswith(f"/{only} kept")})

    def share(name: str, method: str) -> str:
        row = found.get(f"{name}/{method} kept")
        if row is None:
            return "–"
        low, high = row["spread"]
        return f"{row['value']:.1f} ({low:.1f} to {high:.1f})"

    def loss(name: str) -> str:
        full = [row["value"] for case, row in found.items() if re.match(rf"{name}/full \S+ loss", case)]
        return f"{found[f'{name}/base loss']['value']:.3f} → {min(full):.3f}"

    def mean(method: str) -> str:
        values = [found[case]["value"] for name in names if (case := f"{name}/{method} kept") in found]
        return f"**{sum(values) / len(values):.1f}**" if values else "–"

    def bits(method: str) -> str:
        values = [found[case]["value"] for name in names if (case := f"{name}/{method} bits") in found]
        return f"{sum(values) / len(values):.2f}" if values else "–"

    rows = [[name, loss(name), *(share(name, method) for method in methods)] for name in names]
    rows.append([f"mean of {len(names)}", "", *map(mean, methods)])
    rows.append(["bits a weight", "", *map(bits, methods)])
    return table(["variant", "loss: base → full", *methods], rows)


def tasks() -> str:
    """Problems solved by base and delta, with 95 % intervals."""
    found = lines_of("tasks")

    def value(case: str) -> str:
        low, high = found[case]["spread"]
        return f"{found[case]['value']:.1f} ({low:.1f} to {high:.1f})"

    rows = []
    for case, row in found.items():
        name, _, what = case.partition("/")
        if what.startswith("base "):
            delta, gain = (
                value(f"{name}/delta {what.removeprefix('base ')}"),
                value(f"{name}/delta over base"),
            )
            problems = row["against"].split(" problems ")[0]
            rows.append([f"{name}, {what.removeprefix('base ')}", problems, value(case), delta, gain])
    return table(["task", "problems", "base, %", "delta, %", "delta over base, points"], rows)


PARTS: dict[str, Callable[[], str]] = {
    "quick": quick,
    "variants": variants,
    "train": partial(figures, "train"),
    "serve": partial(figures, "serve", left_out=r": (zen4-\w+|smollm2), P"),
    "soak": partial(figures, "soak"),
    "fidelity": partial(kept, KEPT_OF_ALL),
    "fidelity_codes": partial(kept, KEPT_OF_SOME, only="delta_come"),
    "rounding": partial(figures, "rounding"),
    "tasks": tasks,
}


def generated(text: str) -> str:
    """README text with every part made anew."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"<!-- generated: {name} -->\n.*?<!-- end -->", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"README.md must have exactly one part `<!-- generated: {name} -->`")
        made = f"<!-- generated: {name} -->\n{make()}\n<!-- end -->"
        start, end = pattern.search(text).span()  # type: ignore[union-attr]  # counted above
        text = text[:start] + made + text[end:]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a part is out of date"
    )
    check = parser.parse_args().check
    path = ROOT / "README.md"
    before = path.read_text()
    after = generated(before)
    if check and after != before:
        print("README.md is out of date: run python scripts/readme.py", file=sys.stderr)
        return 1
    if not check:
        path.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
