"""The generated parts of README.md: `python scripts/readme.py` writes them, `--check` fails when they are out of date.

Each part stands between `<!-- generated: NAME -->` and `<!-- end -->`, and is made from the configuration or from the
JSON lines in scripts/results/. Of figures measured more than once, the last line counts.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import readme_fidelity
from readme_tables import ROOT, lines_of, table

from zen_train.data.table import variant_configs


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
            f"{value(name, 'seconds'):.0f} s",
        ]
        for name in names
    ]
    return table(["variant", "base", "fine-tune", "delta", "kept", "size", "whole run"], rows)


def processors() -> str:
    """A step of the decoder by instruction set, in milliseconds: the base, a variant as directions, one as signs."""
    found = lines_of("decoder")
    steps = {
        "decode1": "1 token",
        "decode14": "14 tokens of 14",
        "prefill37": "prompt of 37",
        "prefill256": "chunk of 256",
    }
    paths = dict.fromkeys(case.split(":")[0] for case in found)

    def cell(path: str, step: str) -> str:
        values = [found[f"{path}: {step} {call}"]["value"] for call in ("own base", "directions", "variants")]
        return " / ".join(f"{1e3 * value:.1f}" for value in values)

    rows = [[f"`{path}`", *(cell(path, step) for step in steps)] for path in paths]
    return table(["instructions", *steps.values()], rows)


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


def tasks() -> str:
    """Problems solved by base, full fine-tune and delta, with 95 % intervals."""
    found = lines_of("tasks")

    def value(case: str | None) -> str:
        if case is None:
            return "–"
        low, high = found[case]["spread"]
        return f"{found[case]['value']:.1f} ({low:.1f} to {high:.1f})"

    rows = []
    for case, row in found.items():
        name, _, what = case.partition("/")
        if what.startswith("base "):
            metric = what.removeprefix("base ")
            full = next((each for each in found if re.fullmatch(rf"{name}/full-\S+ {metric}", each)), None)
            others = [full, f"{name}/delta {metric}", f"{name}/delta over base"]
            problems = row["against"].split(" problems ")[0]
            rows.append([f"{name}, {metric}", problems, value(case), *map(value, others)])
    return table(["task", "problems", "base, %", "full, %", "delta, %", "delta over base, points"], rows)


def merging() -> str:
    """Each rule against no merging on the same runs."""
    found = lines_of("merging")
    rows = []
    for case, kept in found.items():
        rule, _, what = case.partition(": ")
        if what == "merges kept":
            name, *how = rule.split()
            gate = "always" if "always" in how else "if not worse"
            rate = "constant" if "constant" in how else "decays"
            loss, rough = (found[f"{rule}: {which} over none"] for which in ("loss", "roughness"))
            cells = [_spread(loss, 1e3, "+.1f"), _spread(rough, 1, ".2f")]
            counts = [f"{kept['value']:.0f} {kept['unit']}", kept["against"].removesuffix(" runs")]
            rows.append([f"`{name}`", gate, rate, *cells, *counts])
    measured = ["loss over no merging, thousandths of a nat", "roughness over no merging"]
    return table(["rule", "merges are kept", "learning rate", *measured, "kept", "runs"], rows)


def _spread(row: dict[str, Any], factor: float, form: str) -> str:
    value, low, high = (format(factor * number, form) for number in (row["value"], *row["spread"]))
    return f"{value} ({low} to {high})"


PARTS: dict[str, Callable[[], str]] = {
    "quick": quick,
    "variants": variants,
    "train": partial(figures, "train"),
    "processors": processors,
    "serve": partial(figures, "serve", left_out=r": (zen4-\w+|smollm2), P"),
    "soak": partial(figures, "soak"),
    "fidelity": readme_fidelity.kept_of_all,
    "fidelity_divergence": readme_fidelity.divergence_of_all,
    "fidelity_codes": readme_fidelity.codes,
    "fidelity_over_time": readme_fidelity.over_time,
    "merging": merging,
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
