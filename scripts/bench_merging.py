"""Merging rules on the same runs: held-out loss at the end and smoothness of its curve, against no merging.

python scripts/bench_merging.py --work DIR [--variants math legal coder] [--seeds 0 1 2] [--rules none ...] [--always]
    [--schedule constant] [--beside 2]

Runs of 120 steps at scale=quick with a merge every 20 and a validation every 5, the upper six blocks trained (the rest,
embedding and head frozen, to afford it). `--beside N` shares the cores among N runs at a time: on two cores two runs of
one thread each need less than two of two threads after one another. Each rule has the gate that runs have by default
(a merge that makes validation worse is taken back) and, as `RULE always`, none. `RULE constant` is on runs whose
learning rate stays at its peak instead of decaying. Runs are kept in DIR and not repeated; the summary is over all
pairs of variant and seed that have the rule and `none` at the same schedule, with 95 % intervals (bootstrap over
pairs). Roughness of a curve is the mean |second difference| of its validation losses from the first merge on: zero
for a straight line.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fidelity_runs import train
from measure import Figures

from zen_train.report import read_metrics

RULES = ("none", "mean", "svd_average", "monosoup")
STEPS, EVERY, VALIDATE = 120, 20, 5
RESAMPLES = 2000


@dataclass(frozen=True)
class Method:
    """A rule with or without the gate, and how the learning rate goes. Written as `RULE [always] [constant]`."""

    rule: str
    always: bool = False
    schedule: str = "cosine"

    def __str__(self) -> str:
        constant = self.schedule == "constant"
        return " ".join([self.rule, *["always"] * self.always, *["constant"] * constant])


@dataclass(frozen=True)
class Run:
    """Validation losses by step, and how many of the run's merges were kept."""

    losses: list[tuple[int, float]]
    kept: int
    merges: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--work", type=Path, required=True, help="runs are kept here and reused")
    parser.add_argument("--variants", nargs="*", default=["math", "legal", "coder"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--rules", nargs="*", default=RULES, choices=RULES)
    parser.add_argument("--always", action="store_true", help="also without the gate")
    parser.add_argument(
        "--schedule", default="cosine", choices=("cosine", "constant"), help="of the learning rate"
    )
    parser.add_argument("--beside", type=int, default=1, metavar="N", help="runs at a time")
    arguments = parser.parse_args()
    methods = [Method(rule, schedule=arguments.schedule) for rule in arguments.rules]
    if arguments.always:
        methods += [replace(method, always=True) for method in methods if method.rule != "none"]
    runs = list(product(arguments.seeds, arguments.variants, methods))
    threads = max(1, torch.get_num_threads() // arguments.beside)
    with ThreadPoolExecutor(arguments.beside) as pool:
        done = list(pool.map(lambda run: made(arguments.work, *run, threads=threads), runs))
    found: dict[Method, dict[tuple[str, int], Run]] = {method: {} for method in methods}
    for (seed, variant, method), run in zip(runs, done, strict=True):
        found[method][variant, seed] = run
    report(found)
    return 0


def made(work: Path, seed: int, variant: str, method: Method, *, threads: int) -> Run:
    """A run, trained now when it is not there."""
    folder = work / f"{variant}-{seed}-{str(method).replace(' ', '-')}"
    done = folder / "metrics.json"
    if not done.is_file():
        words = [
            f"merge={method.rule}",
            f"merge.every_n_steps={EVERY}",
            f"merge.accept={'always' if method.always else 'if_not_worse'}",
            f"optim.schedule={method.schedule}",
            f"trainer.max_steps={STEPS}",
            f"trainer.validate_every_n_steps={VALIDATE}",
            f"trainer.checkpoint_every_n_steps={STEPS}",
            "tuning.freeze_layers=24",
            "tuning.freeze_embeddings=true",
            "data.eval_tokens=2048",
            f"seed={seed}",
            f"data.seed={seed}",
        ]
        train(folder, variant, words, threads=threads)
        shutil.rmtree(folder / "checkpoints")
    with (folder / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [(int(row["step"]), float(row["val/loss"])) for row in rows if row.get("val/loss")]
    merges = read_metrics(done).curves.merges
    return Run(losses, sum(merge.accepted for merge in merges), len(merges))


def roughness(run: Run) -> float:
    """Mean |second difference| from the first merge on."""
    losses = torch.tensor([loss for step, loss in run.losses if step >= EVERY], dtype=torch.float64)
    return float(losses.diff(n=2).abs().mean())


def report(found: dict[Method, dict[tuple[str, int], Run]]) -> None:
    figures = Figures("merging")
    for method, runs in found.items():
        plain = found.get(Method("none", schedule=method.schedule), {})
        for (variant, seed), run in runs.items():
            figures.add(f"{variant}, seed {seed}, {method}: loss", run.losses[-1][1], "nats")
        pairs = [key for key in runs if key in plain]
        if method.rule == "none" or not pairs:
            continue
        for what, values in (
            ("loss over none", [runs[key].losses[-1][1] - plain[key].losses[-1][1] for key in pairs]),
            ("roughness over none", [roughness(runs[key]) / roughness(plain[key]) for key in pairs]),
        ):
            unit = "nats" if what.startswith("loss") else "x"
            mean, spread = interval(values)
            figures.add(f"{method}: {what}", mean, unit, against=f"{len(pairs)} runs", spread=spread)
        kept, merges = (sum(getattr(runs[key], what) for key in pairs) for what in ("kept", "merges"))
        figures.add(f"{method}: merges kept", kept, f"of {merges}", against=f"{len(pairs)} runs")
    figures.show()


def interval(values: list[float]) -> tuple[float, tuple[float, float]]:
    """Mean and its 95 % bootstrap interval."""
    given = torch.tensor(values, dtype=torch.float64)
    draw = torch.randint(len(given), (RESAMPLES, len(given)), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(
        given[draw].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)
    ).tolist()
    return float(given.mean()), (low, high)


if __name__ == "__main__":
    sys.exit(main())
