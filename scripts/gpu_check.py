"""Check and time the Triton kernels and the engine on a GPU: one command, no network, under six minutes.

    python scripts/gpu_check.py [--out results.jsonl] [--dry-run]

Needs torch 2.11 or newer, Triton 3.6 or newer, Python 3.11 or newer, and this repository (installed or not).
1. The named cases of tests/kernels on the device, reference against Triton, integer inputs bit for bit.
2. `compute-sanitizer` (memcheck, then racecheck) over a short run of both kernels, where the tool exists.
3. The engine on a random base and three variants, with and without CUDA graphs: a mixed batch against each variant as
   a dense float32 model, variants evicted and reloaded through pinned memory, ms of a decode step, GB/s of a cold load.
   It needs transformers and pydantic too, and is skipped without them.
4. Decode and prefill on Llama 8B and 70B layer shapes against `torch.nn.functional.linear` on the base alone, with the
   second-level cache flushed before every call: ratio, bytes moved, share of a measured copy bandwidth.
The table goes to stderr, JSON lines to stdout and to --out. Shapes are left out, and said so, once the time is spent.
`--dry-run` goes through the same code on the CPU under Triton's interpreter, with tiny shapes and no bounds.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from gpu_check_engine import check_engine
from gpu_check_kernels import time_kernels

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 330.0


@dataclass(kw_only=True)
class Check:
    """One run: where it runs, where lines go, when it must end."""

    dry: bool
    out: TextIO | None
    started: float
    failed: int = 0
    missed: int = 0
    provenance: dict[str, object] | None = None

    @property
    def left_s(self) -> float:
        """Seconds left of the budget."""
        return BUDGET_S - (time.monotonic() - self.started)

    def line(self, case: str, value: float, unit: str, against: str, bound: float | None = None) -> None:
        """Print one measurement as a row and as JSON."""
        holds = None if bound is None or self.dry else value <= bound
        self.missed += holds is False
        record = {
            "bench": "gpu_check",
            "case": case,
            "value": round(value, 4),
            "unit": unit,
            "bound": bound,
            "holds": holds,
            "against": against,
            **(self.provenance or {}),
        }
        text = json.dumps(record)
        print(text, flush=True)
        if self.out:
            print(text, file=self.out, flush=True)
        verdict = "" if holds is None else f"  bound <= {bound:.3f}  {'holds' if holds else 'MISSED'}"
        self.say(f"{case:36s} {against:34s} {value:10.3f} {unit:6s}{verdict}")

    def say(self, text: str) -> None:
        """One line for people."""
        print(text, file=sys.stderr, flush=True)


def environment(dry: bool) -> dict[str, str]:
    """For child processes: the interpreter in a dry run, and this repository importable."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if dry:
        env["TRITON_INTERPRET"] = "1"
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def run_cases(check: Check) -> None:
    """The named cases, in a process of their own so that a crash is one failed check."""
    command = [sys.executable, "-m", "tests.kernels.interpreter", "--device", "cpu" if check.dry else "cuda"]
    if check.dry:
        command.append("--few")
    try:
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(check.dry),
            capture_output=True,
            text=True,
            timeout=check.left_s * 0.6,
        )
    except subprocess.TimeoutExpired:
        check.failed += 1
        check.say("named cases: no end within the time")
        return
    if run.returncode != 0:
        check.failed += 1
        check.say(f"named cases: exit status {run.returncode}\n{run.stderr[-3000:]}")
        return
    verdicts = json.loads(run.stdout.splitlines()[-1])
    bad = sorted(name for name, passed in verdicts.items() if not passed)
    check.failed += bool(bad)
    check.line("named cases", float(len(bad)), "failed", f"of {len(verdicts)} cases", 0.0)
    for name in bad:
        check.say(f"  failed: {name}")


SANITISED = """
import torch
from tests.kernels.cases import Case, build, run_add, run_linear
for m in (3, 70):
    inputs = build(Case(m=m, n=70, k=72, mix="uniform"), torch.bfloat16, device="cuda")
    run_linear(inputs, "triton"), run_add(inputs, "triton")
torch.cuda.synchronize()
"""


def sanitize(check: Check) -> None:
    """Races and bad accesses, where NVIDIA's tool is installed."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if check.dry or tool is None:
        check.say(
            "compute-sanitizer: not here, skipped"
            if not check.dry
            else "compute-sanitizer: skipped in a dry run"
        )
        return
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, "-c", SANITISED]
        try:
            run = subprocess.run(
                command,
                cwd=ROOT,
                env=environment(False),
                capture_output=True,
                text=True,
                timeout=min(60, check.left_s / 3),
            )
        except subprocess.TimeoutExpired:
            check.say(f"compute-sanitizer {kind}: no end within a minute, no verdict")
            continue
        if run.returncode not in (0, 9):
            check.say(
                f"compute-sanitizer {kind}: could not run here: {run.stdout[-300:]} {run.stderr[-300:]}"
            )
            continue
        check.failed += run.returncode == 9
        check.line(
            f"compute-sanitizer {kind}",
            float(run.returncode == 9),
            "failed",
            "both kernels, both entries",
            0.0,
        )
        if run.returncode == 9:
            check.say(run.stdout[-2000:])


def provenance(dry: bool) -> dict[str, object]:
    """Where and with what a line was measured."""
    import torch
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "device": "interpreter" if dry else torch.cuda.get_device_name(0),
    }


def make_importable() -> None:
    """Allow a run from a plain clone: map `zen_train.kernels` to kernels/ and so on, as pyproject.toml does."""
    sys.path.insert(0, str(ROOT))
    if find_spec("zen_train.kernels") is None:
        import zen_train

        zen_train.__path__.append(str(ROOT))


def main() -> int:
    """Entry point: 0 when every check passed and no bound was missed, 1 when a bound was, 2 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also append JSON lines to this file")
    parser.add_argument(
        "--dry-run", action="store_true", help="the same code on the CPU, tiny shapes, no bounds"
    )
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    make_importable()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device here. --dry-run goes through the code without one.", file=sys.stderr)
        return 2
    out = options.out.open("a") if options.out else None
    check = Check(
        dry=options.dry_run, out=out, started=time.monotonic(), provenance=provenance(options.dry_run)
    )
    run_cases(check)
    sanitize(check)
    check_engine(check)
    time_kernels(check)
    check.say(
        f"{check.failed} checks failed, {check.missed} bounds missed, {time.monotonic() - check.started:.0f} s"
    )
    if out:
        out.close()
    return 2 if check.failed else int(check.missed > 0)


if __name__ == "__main__":
    sys.exit(main())
