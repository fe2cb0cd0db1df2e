"""The tables and the picture of scripts/bench_fidelity.py: `python scripts/readme_fidelity.py` draws the picture."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from readme_tables import RESULTS, lines_of, table

OF_ALL = ["matrix", "row", "pushed", "two_bits", "directions", "distilled", "aware", "aware_1.3"]
CODES = [
    "matrix",
    "pushed",
    "spread_1",
    "spread_1.25",
    "low_rank_and_signs",
    "two_bits",
    "low_rank",
    "delta_come",
    "delta_come_gptq",
    "directions",
    "directions_0.5",
    "ternary",
]
OF_OTHERS = {"matrix", "low_rank", "delta_come", "delta_come_gptq", "ternary"}
ONLY_OF_SOME = "delta_come"
"""Variants that have this method are those that all codes were measured on."""


def kept_of_all() -> str:
    """Share of the fine-tune's gain that each method keeps, with its interval, and the mean over the variants."""
    found, names = _measured()

    def loss(name: str) -> str:
        full = [
            row["value"] for case, row in found.items() if case.startswith(f"{name}/full ") and "loss" in case
        ]
        return f"{found[f'{name}/base loss']['value']:.3f} → {min(full):.3f}"

    def share(name: str, method: str) -> str:
        row = found.get(f"{name}/{method} kept")
        return (
            "–" if row is None else f"{row['value']:.1f} ({row['spread'][0]:.1f} to {row['spread'][1]:.1f})"
        )

    rows = [[name, loss(name), *(share(name, method) for method in OF_ALL)] for name in names]
    mean = [_mean(values(method, "kept", names), "**{:.1f}**") for method in OF_ALL]
    lowest = [f"{min(shares):.1f}" if (shares := values(method, "kept", names)) else "–" for method in OF_ALL]
    counted = [str(len(values(method, "kept", names))) for method in OF_ALL]
    bits = [_mean(values(method, "bits", names), "{:.2f}") for method in OF_ALL]
    rows += [["mean", "", *mean], ["lowest", "", *lowest], ["variants", "", *counted]]
    return table(["variant", "loss: base → full", *OF_ALL], [*rows, ["bits a weight", "", *bits]])


def divergence_of_all() -> str:
    """KL divergence from the fine-tune, in thousandths of a nat a token."""
    _, names = _measured()
    return _divergence(OF_ALL[:-2], names)  # aware runs are trained by themselves: no fine-tune to be near to


def codes() -> str:
    """The same for codes of others at equal bits, on the variants that have all of them."""
    found, names = _measured()
    return _divergence(CODES, [name for name in names if f"{name}/{ONLY_OF_SOME} KL" in found])


def values(method: str, what: str, names: list[str]) -> list[float]:
    """Figures of a method, of those variants that have it."""
    found = lines_of("fidelity")
    return [found[case]["value"] for name in names if (case := f"{name}/{method} {what}") in found]


def picture(path: Path) -> None:
    """Bits against divergence: a dot for each variant, a ring for their geometric mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found, names = _measured()
    names = [name for name in names if f"{name}/{ONLY_OF_SOME} KL" in found]
    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for method in CODES:
        lost, bits = values(method, "KL", names), values(method, "bits", names)
        if not lost:
            continue
        colour = "#b5482f" if method in OF_OTHERS else "#1f6f54"
        axes.plot(bits, lost, "o", color=colour, alpha=0.35, markersize=4, markeredgewidth=0)
        centre = (fmean(bits), geometric_mean(lost))
        axes.plot(*centre, "o", color="none", markeredgecolor=colour, markersize=9, markeredgewidth=1.6)
        axes.annotate(
            method, centre, xytext=(9, 0), textcoords="offset points", va="center", color=colour, fontsize=9
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits a weight")
    axes.set_ylabel("KL from the fine-tune, nats a token")
    axes.set_title(f"What a code loses: {', '.join(names)} (green: ours)", loc="left", fontsize=10)
    axes.set_xlim(0, 2.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _divergence(methods: list[str], names: list[str]) -> str:
    found = lines_of("fidelity")

    def lost(name: str, method: str) -> str:
        row = found.get(f"{name}/{method} KL")
        return "–" if row is None else f"{1e3 * row['value']:.2f}"

    rows = [[name, *(lost(name, method) for method in methods)] for name in names]
    centre = [
        f"**{1e3 * geometric_mean(each):.2f}**" if (each := values(method, "KL", names)) else "–"
        for method in methods
    ]
    agreed = [_mean(values(method, "same token", names), "{:.1f} %") for method in methods]
    bits = [_mean(values(method, "bits", names), "{:.2f}") for method in methods]
    rows += [["geometric mean", *centre], ["same token", *agreed], ["bits a weight", *bits]]
    return table(["variant", *methods], rows)


def _mean(found: list[float], form: str) -> str:
    return form.format(fmean(found)) if found else "–"


def _measured() -> tuple[dict[str, dict[str, Any]], list[str]]:
    found = lines_of("fidelity")
    return found, sorted({case.split("/")[0] for case in found})


if __name__ == "__main__":
    picture(RESULTS / "fidelity.png")
