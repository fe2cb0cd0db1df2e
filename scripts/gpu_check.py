"""Check and time the Triton kernels on a GPU, in one command, without a network and in under six minutes.

    python scripts/gpu_check.py [--out results.jsonl] [--dry-run]

Needs torch 2.11 or newer, Triton 3.6 or newer, Python 3.11 or newer, and this repository (installed or not).
1. The named cases of tests/kernels on the device, reference against Triton, integer inputs bit for bit.
2. `compute-sanitizer` (memcheck, then racecheck) over a short run of both kernels, where the tool exists.
3. Decode and prefill on Llama 8B and 70B layer shapes against `torch.nn.functional.linear` on the base alone, with the
   second-level cache flushed before every call: ratio, bytes moved, share of a measured copy bandwidth.
The table goes to stderr, JSON lines to stdout and to --out. Shapes are left out, and said so, once the time is spent.
`--dry-run` goes through the same code on the CPU under Triton's interpreter, with tiny shapes and no bounds.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    pass

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 330.0
DECODE_TOKENS = (1, 4, 16, 64)
DECODE_VARIANTS = (1, 4, 14)
PREFILL_TOKENS = (512, 2048, 8192)
SHAPES = {  # N, K of the layers of Llama 8B and 70B
    "8B qkv": (6144, 4096),
    "8B down": (4096, 14336),
    "70B up": (57344, 8192),
    "8B out": (4096, 4096),
    "8B up": (28672, 4096),
    "70B out": (8192, 8192),
    "70B qkv": (10240, 8192),
    "70B down": (8192, 28672),
}
DRY_SHAPES = {"dry": (48, 64)}
PREFILL_BOUND = 1.10
MANY_VARIANTS_BOUND = 2.2
FLOOR_SHARE = 1.15


def byte_floor(variants: int) -> float:
    """Bytes of a decode step over those of the base: (2 + V/8) / 2 for bf16 (serving arithmetic)."""
    return (2 + variants / 8) / 2


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


class Timer:
    """Median seconds of calls timed in turn, with the second-level cache flushed before each."""

    def __init__(self, dry: bool) -> None:
        import torch

        self.torch, self.dry = torch, dry
        size_bytes = 1 << 16 if dry else 4 * torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(size_bytes, dtype=torch.uint8, device="cpu" if dry else "cuda")

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call on the device."""
        self.flush.zero_()
        if self.dry:
            before = time.perf_counter()
            call()
            return time.perf_counter() - before
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Some work in front keeps the device busy while the host queues the call, so that launch gaps do not count.
        self.torch.cuda._sleep(200_000)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def in_turn(self, calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Median of `rounds` for each call, A and B alternating."""
        for call in calls.values():  # compiles and tunes
            call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(self.once(call))
        return {name: statistics.median(values) for name, values in times.items()}


def copy_bandwidth(check: Check, timer: Timer) -> float:
    """Bytes per second (read plus written) of a large device copy."""
    import torch

    size_bytes = 1 << 16 if check.dry else 1 << 30
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=timer.flush.device)
    target = torch.empty_like(source)
    seconds = timer.in_turn({"copy": lambda: target.copy_(source)}, 10)["copy"]
    check.line("copy", 2 * size_bytes / seconds / 1e9, "GB/s", "device copy, read plus write")
    return 2 * size_bytes / seconds


def graphed(call: Callable[[], object], dry: bool) -> Callable[[], object]:
    """The call as a CUDA graph, as an engine runs decode: shows that nothing in it needs the host."""
    if dry:
        return call
    import torch

    call()  # tuning must not happen during capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def time_shape(
    check: Check, timer: Timer, name: str, shape: tuple[int, int], copy_rate: float, prefill: bool
) -> None:
    """Decode or prefill of one layer shape."""
    import torch

    from zen_train.kernels.bitdelta_linear import DeltaBank, bitdelta_linear

    n, k = shape
    device = timer.flush.device
    dtype = torch.float32 if check.dry else torch.bfloat16
    slots = max(DECODE_VARIANTS)
    weight = torch.randn(n, k, dtype=dtype, device=device)
    bank = DeltaBank.zeros(variants=slots, out_features=n, in_features=k, device=device)
    bank.sign_VPNB.random_(0, 256)
    bank.row_scale_VPN.uniform_(0.001, 0.01)
    mixes = (
        [(tokens, 1) for tokens in PREFILL_TOKENS]
        if prefill
        else [
            (tokens, variants)
            for tokens in DECODE_TOKENS
            for variants in DECODE_VARIANTS
            if variants <= tokens
        ]
    )
    if check.dry:
        mixes = [(70, 1)] if prefill else [(1, 1), (16, 14)]
    for tokens, variants in mixes:
        if check.left_s < 15:
            check.say(f"{name}: left out from {tokens} tokens on, the time is spent")
            return
        x = torch.randn(tokens, k, dtype=dtype, device=device)
        variant = (torch.arange(tokens, device=device) % variants).to(torch.int32)

        def base(x: torch.Tensor = x) -> object:
            return torch.nn.functional.linear(x, weight)

        def fused(x: torch.Tensor = x, variant: torch.Tensor = variant) -> object:
            return bitdelta_linear(x, weight, bank, variant, backend="triton")

        calls = {
            "base": graphed(base, check.dry),
            "fused": graphed(fused, check.dry),
        }
        seconds = timer.in_turn(calls, 3 if check.dry else 15)
        case = f"{'prefill' if prefill else 'decode'} {name} M{tokens} V{variants}"
        floor = byte_floor(variants)
        bound = PREFILL_BOUND if prefill else (MANY_VARIANTS_BOUND if variants == 14 else FLOOR_SHARE * floor)
        check.line(case, seconds["fused"] / seconds["base"], "ratio", "fused / linear on the base", bound)
        moved = n * k * 2 * floor + variants * n * 4 + tokens * (n + k) * 2
        check.line(case, moved / 1e6, "MB", "bytes that must move")
        check.line(case, moved / seconds["fused"] / copy_rate, "share", "of the copy bandwidth")
        check.line(case, seconds["fused"] * 1e6, "us", f"median; base {seconds['base'] * 1e6:.1f} us")


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
    """Allow a run from a plain clone: map `zen_train.kernels` to kernels/ as pyproject.toml does."""
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
    timer = Timer(check.dry)
    copy_rate = copy_bandwidth(check, timer)
    shapes = DRY_SHAPES if check.dry else SHAPES
    for name, shape in shapes.items():
        for prefill in (False, True):
            time_shape(check, timer, name, shape, copy_rate, prefill)
    check.say(
        f"{check.failed} checks failed, {check.missed} bounds missed, {time.monotonic() - check.started:.0f} s"
    )
    if out:
        out.close()
    return 2 if check.failed else int(check.missed > 0)


if __name__ == "__main__":
    sys.exit(main())
