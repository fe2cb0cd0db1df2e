"""The tables of scripts/bench_fidelity.py."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from readme_tables import lines_of, table

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
OVER_TIME = {
    "directions": {1.0: "directions", 1.1: "directions_1.1"},
    "aware": {1.0: "aware", 1.15: "aware_1.15", 1.3: "aware_1.3"},
}
"""Methods of one code by their steps over those of the full fine-tune."""
OF_OTHERS = {"matrix", "low_rank", "delta_come", "delta_come_gptq", "ternary"}
ONLY_OF_SOME = "delta_come_gptq"
"""Variants that have this method are those that all codes were measured on."""


def kept_of_all() -> str:
    """Share of the fine-tune's gain that each method keeps, with its interval, and the mean over the variants."""
    found, names = measured()

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
    taken = [
        f"{median(times):.2f} x" if (times := values(method, "time", names)) else "" for method in OF_ALL
    ]
    rows += [["mean", "", *mean], ["lowest", "", *lowest], ["variants", "", *counted]]
    rows += [["bits a weight", "", *bits], ["training time, median", "", *taken]]
    return table(["variant", "loss: base → full", *OF_ALL], rows)


def divergence_of_all() -> str:
    """KL divergence from the fine-tune, in thousandths of a nat a token."""
    _, names = measured()
    return _divergence(OF_ALL[:-1], names)  # with more steps there is no fine-tune to be near to


def codes() -> str:
    """The same for codes of others at equal bits, on the variants that have all of them."""
    return _divergence(CODES, with_all_codes())


def with_all_codes() -> list[str]:
    """Variants that all codes were measured on."""
    found, names = measured()
    return [name for name in names if f"{name}/{ONLY_OF_SOME} KL" in found]


def over_time() -> str:
    """What longer training adds to the share kept, and with how many steps it would be the whole gain."""
    times = sorted({time for methods in OVER_TIME.values() for time in methods})
    rows = [
        [
            name,
            code,
            *(f"{shares[time]:.1f}" if time in shares else "" for time in times),
            crossing(shares, 100.0),
        ]
        for code in OVER_TIME
        for name, shares in kept_over_time(code).items()
    ]
    return table(["variant", "code", *(f"{time:g} x" for time in times), "100 % at"], rows)


def kept_over_time(code: str) -> dict[str, dict[float, float]]:
    """Share kept by steps over those of the full fine-tune, of each variant that has the fewest and the most, and its
    mean wherever all of these were measured."""
    found, names = measured()
    methods = OVER_TIME[code]
    shares = {
        name: {
            time: found[case]["value"]
            for time, method in methods.items()
            if (case := f"{name}/{method} kept") in found
        }
        for name in names
    }
    ends = {min(methods), max(methods)}
    shares = {name: each for name, each in shares.items() if ends <= each.keys()}
    if not shares:
        return {}
    common = [time for time in methods if all(time in each for each in shares.values())]
    return {**shares, "mean": {time: fmean(each[time] for each in shares.values()) for time in common}}


def crossing(points: dict[float, float], level: float) -> str:
    """Where the line through the points first reaches `level`."""
    (time, value), *rest = sorted(points.items())
    if value >= level:
        return f"{time:g} x"
    for next_time, next_value in rest:
        if next_value >= level:
            return f"{time + (next_time - time) * (level - value) / (next_value - value):.2f} x"
        time, value = next_time, next_value
    return f"not by {time:g} x"


def values(method: str, what: str, names: list[str]) -> list[float]:
    """Figures of a method, of those variants that have it."""
    found = lines_of("fidelity")
    return [found[case]["value"] for name in names if (case := f"{name}/{method} {what}") in found]


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


def measured() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The last line of each case, and the names of the variants."""
    found = lines_of("fidelity")
    return found, sorted({case.split("/")[0] for case in found})
