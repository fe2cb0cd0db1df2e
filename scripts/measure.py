"""One measured figure as one JSON line, with what it takes to believe it: bound, commit, versions, device."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_PACKAGES = ("torch", "lightning", "transformers", "safetensors", "triton")


class Figures:
    """Prints a JSON line for each figure on standard output as it comes, and a table on standard error at the end.

    The lines are appended to `out` too, where one is given. `under`: conditions to be told beside the device.
    """

    def __init__(self, bench: str, out: Path | None = None, *, under: str = "") -> None:
        self.bench, self._out, self.missed = bench, out, 0
        where = f"{device()}, {under}" if under else device()
        self._common = {"commit": commit(), "versions": versions(), "device": where}
        self._table = Table("case", "value", "bound", "holds", "against", title=bench)

    def add(
        self,
        case: str,
        value: float,
        unit: str,
        *,
        bound: float | None = None,
        more_is_better: bool = False,
        against: str | None = None,
        spread: tuple[float, float] | None = None,
        outcomes: str | None = None,
    ) -> None:
        """Record a figure; it holds when it is at most `bound`, or at least where more is better. `spread` is the 20th
        and 80th percentile, of scores a 95 % interval. `outcomes`: of each problem, 1 right, 0 wrong."""
        holds = None if bound is None else bool(value >= bound if more_is_better else value <= bound)
        self.missed += holds is False
        line: dict[str, Any] = {
            "bench": self.bench,
            "case": case,
            "value": value,
            "unit": unit,
            "bound": bound,
        }
        line |= {"holds": holds, "against": against, "spread": spread, **self._common}
        if outcomes is not None:
            line["outcomes"] = outcomes
        print(json.dumps(line), flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        shown = {None: "", True: "yes", False: "NO"}[holds]
        limit = "" if bound is None else f"{'>=' if more_is_better else '<='} {bound:g} {unit}"
        self._table.add_row(case, f"{value:.4g} {unit}", limit, shown, against or "")

    def show(self) -> None:
        """The table for people."""
        Console(stderr=True).print(self._table)


def timed(work: Callable[[], object], *, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> tuple[float, float]:
    """20th and 80th percentile."""
    ordered = sorted(values)
    return ordered[int(0.2 * (len(ordered) - 1))], ordered[round(0.8 * (len(ordered) - 1))]


def commit() -> str:
    root = Path(__file__).resolve().parents[1]
    answer = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def device() -> str:
    """The GPU, else the processor and how many threads torch uses."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.machine(),
    )
    return f"{model}, {torch.get_num_threads()} threads"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


if __name__ == "__main__":
    sys.exit("measure.py is imported by the benchmarks; run scripts/bench_*.py")
