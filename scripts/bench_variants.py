"""Train every variant at scale=quick and record what came out: the table of the README.

python scripts/bench_variants.py [NAME ...] >> scripts/results/variants_quick.jsonl

About four minutes a variant on two cores; the variants named on the command line, or all 14. Each is a process of its
own, as a user would start it. JSON lines on standard output, a table on standard error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import Figures

from zen_train.overrides import config_groups
from zen_train.report import RunResults, read_metrics


def main() -> int:
    names = sorted(config_groups()["variant"])
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; none: all")
    parser.add_argument("--out", type=Path, help="keep the run folders here")
    parser.add_argument(
        "--set", nargs="*", default=[], help="further settings, as on the command line of zen_train"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    figures = Figures("variants_quick")
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.names or names:
            folder = (arguments.out or Path(temporary)) / name
            command = [
                sys.executable,
                "-m",
                "zen_train",
                f"+variant={name}",
                "scale=quick",
                f"output_dir={folder}",
            ]
            started = time.perf_counter()
            done = subprocess.run(
                [*command, "overwrite=true", *arguments.set],
                stdout=sys.stderr,
                check=False,
                env={"WANDB_MODE": "offline", **os.environ},
            )
            seconds = time.perf_counter() - started
            if done.returncode != 0:
                failed.append(name)
                continue
            record(figures, name, read_metrics(folder / "metrics.json"), seconds)
    figures.show()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def record(figures: Figures, name: str, results: RunResults, seconds: float) -> None:
    """The figures of one variant, under case names that the README's table is made from."""
    losses, merges = results.losses, results.curves.merges
    against = f"{losses.tokens} held-out tokens"
    for model in ("base", "fine_tune", "delta"):
        figures.add(f"{name}/{model}_loss", getattr(losses, model), "nats per token", against=against)
    if losses.share_kept is not None:
        figures.add(f"{name}/share_kept", 100 * losses.share_kept, "%", against="gain of the fine-tune")
    figures.add(f"{name}/delta_bytes", results.size.stored_bytes, "bytes", against="files of the artifact")
    figures.add(f"{name}/merges_accepted", sum(merge.accepted for merge in merges), f"of {len(merges)}")
    figures.add(f"{name}/seconds", seconds, "s", bound=300.0, against="whole command, start to report")


if __name__ == "__main__":
    sys.exit(main())
