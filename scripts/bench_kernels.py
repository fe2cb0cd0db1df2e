"""Benchmark of the CPU kernels: the table of ratios, and one JSON line for each.

Runs the operator's tests on the cases it times first: no number without a green check. A and B of every ratio are
timed in turn, call by call, on the same weights, which are cold in cache as in a real model (each call takes the next
of enough copies). The value is the ratio of the 20 % quantiles, because what disturbs a shared machine only ever adds
time; p20, p50 and p80 of every call are printed beside. JSON lines go to stdout, the table to stderr.

    python scripts/bench_kernels.py [--seconds 100] [--threads 2] [--shapes 576x576,2048x2048]
    python scripts/bench_kernels.py --threads 1 --clock thread     # on a busy machine: processor time of one thread
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import Figures

from zen_train.kernels.bitdelta_linear import DeltaBank, bitdelta_linear
from zen_train.kernels.common.along import ALONG_WEIGHT, along_scale
from zen_train.kernels.cpu import load, path_name
from zen_train.kernels.one_bit_code import one_bit_code_
from zen_train.kernels.sign_pack import sign_pack

SHAPES = ((576, 576), (1536, 576), (2048, 2048), (8192, 4096))
TOKENS = (1, 4, 14, 64, 512)
VARIANTS = 14
COLD_BYTES = 700 * 2**20
COLD_SIGN_BYTES = 300 * 2**20
MOST_COPIES = 1200
WARM_UP_CALLS = 2
CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A ratio of two timed calls and the most (or least) it may be; no bound when None."""

    name: str
    over: str
    under: str
    most: float | None


def bounds_of(tokens: int) -> list[Bound]:
    """The ratios of issue 3 for one token count, and those that only inform."""
    linear = "torch.nn.functional.linear"
    found = [
        Bound(name="one variant / own base", over="one", under="base", most=1.15 if tokens == 1 else None),
        Bound(
            name=f"one variant / {linear}",
            over="one",
            under="torch",
            most={1: 0.6, 64: 1.3, 512: 1.1}.get(tokens),
        ),
        Bound(name=f"own base / {linear}", over="base", under="torch", most=None),
    ]
    if tokens == VARIANTS:
        found.append(Bound(name=f"14 variants / {linear}", over="many", under="torch", most=1.6))
    return found


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long one set of calls is timed, and by which clock."""

    seconds: float
    clock: Callable[[], float]


Quantiles = tuple[float, float, float]


def in_turn(
    calls: dict[str, Callable[[int], object]], plan: Plan, least_rounds: int = 8
) -> dict[str, Quantiles]:
    """20, 50 and 80 % quantile of the seconds of each call. Every round times each call once, on the next weights."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    turn = 0
    started = time.perf_counter()
    while (
        len(times[next(iter(calls))]) < least_rounds + WARM_UP_CALLS
        or time.perf_counter() - started < plan.seconds
    ):
        for name, call in calls.items():
            turn += 1
            before = plan.clock()
            call(turn)
            times[name].append(plan.clock() - before)
    cuts = {name: statistics.quantiles(values[WARM_UP_CALLS:], n=5) for name, values in times.items()}
    return {
        name: (cut[0], statistics.median(times[name][WARM_UP_CALLS:]), cut[3]) for name, cut in cuts.items()
    }


def bench_linear(figures: Figures, n: int, k: int, plan: Plan) -> None:
    """All token counts of one weight shape."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=generator).to(torch.bfloat16)
    copies = [weight.clone() for _ in range(max(2, min(MOST_COPIES, COLD_BYTES // weight.nbytes)))]
    sign_bytes = VARIANTS * n * k // 8
    banks = []
    for _ in range(max(2, min(len(copies), COLD_SIGN_BYTES // sign_bytes))):
        bank = DeltaBank.zeros(variants=VARIANTS, out_features=n, in_features=k)
        bank.sign_VPNB.random_(0, 256, generator=generator)
        bank.row_scale_VPN.uniform_(0.001, 0.01, generator=generator)
        banks.append(bank)
    for tokens in TOKENS:
        x = torch.randn(tokens, k, generator=generator).to(torch.bfloat16)
        base = torch.full((tokens,), -1)
        one = torch.zeros(tokens, dtype=torch.int64)

        def own(variant: torch.Tensor, x: torch.Tensor = x) -> Callable[[int], object]:
            return lambda turn: bitdelta_linear(
                x, copies[turn % len(copies)], banks[turn % len(banks)], variant
            )

        def dense(turn: int, x: torch.Tensor = x) -> object:
            return torch.nn.functional.linear(x, copies[turn % len(copies)])

        check(x, weight, banks[0], torch.arange(tokens) % VARIANTS)
        calls = {
            "torch": dense,
            "base": own(base),
            "one": own(one),
        }
        if tokens == VARIANTS:
            calls["many"] = own(torch.arange(VARIANTS))
        taken = in_turn(calls, plan)
        case = f"N{n}-K{k}-M{tokens}"
        for bound in bounds_of(tokens):
            figures.add(
                case,
                taken[bound.over][0] / taken[bound.under][0],
                "ratio",
                bound=bound.most,
                against=bound.name,
            )
        for name, quantiles in taken.items():
            for label, value in zip(("p20", "p50", "p80"), quantiles, strict=True):
                figures.add(case, value * 1e6, "us", against=f"{label} of {name}")
        figures.add(case, weight.nbytes / taken["base"][0] / 1e9, "GB/s", against="base weight bytes read")


def check(x: torch.Tensor, weight: torch.Tensor, bank: DeltaBank, variant: torch.Tensor) -> None:
    """The timed operator gives the reference's result here (on some rows of a large weight)."""
    rows = slice(0, 64)
    part = DeltaBank(
        in_features=bank.in_features,
        sign_VPNB=bank.sign_VPNB[:, :, rows],
        row_scale_VPN=bank.row_scale_VPN[:, :, rows].contiguous(),
    )
    fast = bitdelta_linear(x, weight, bank, variant)[:, rows].float()
    slow = bitdelta_linear(x, weight[rows], part, variant, backend="reference").float()
    ratio = float((fast - slow).square().mean().sqrt() / slow.square().mean().sqrt())
    if not ratio <= 0.005:
        raise SystemExit(
            f"the kernel is wrong here: RMS ratio {ratio:.4g} at {tuple(weight.shape)}, {len(x)} tokens"
        )


def bench_sign_pack(figures: Figures, n: int, k: int, plan: Plan) -> None:
    """Bytes of both weights per second, against a plain read of the same bytes."""
    pairs = [(torch.randn(n, k).to(torch.bfloat16), torch.randn(n, k).to(torch.bfloat16)) for _ in range(3)]
    moved = 2 * pairs[0][0].nbytes
    case = f"sign_pack-N{n}-K{k}"
    # A sum over 64-bit words is the plainest pass over memory that torch offers.
    views = [(a.view(torch.int64), b.view(torch.int64)) for a, b in pairs]
    taken = in_turn(
        {
            "read": lambda turn: (views[turn % 3][0].sum(), views[turn % 3][1].sum()),
            "pack": lambda turn: sign_pack(*pairs[turn % 3]),
        },
        plan,
    )
    figures.add(case, moved / taken["read"][0] / 1e9, "GB/s", against="plain read (sum of 64-bit words)")
    figures.add(case, moved / taken["pack"][0] / 1e9, "GB/s", against="sign_pack")
    share = taken["read"][0] / taken["pack"][0]
    figures.add(case, share, "ratio", against="sign_pack / read bandwidth", bound=0.5, more_is_better=True)


def bench_one_bit_code(figures: Figures, n: int, k: int, plan: Plan) -> None:
    """The code of a matrix in training, against a plain copy's bandwidth and against torch's operators."""
    bases = [torch.randn(n, k).to(torch.bfloat16) for _ in range(3)]
    latents = [base + 1e-3 * torch.randn(n, k) for base in bases]
    out = torch.empty(n, k)

    def by_operators(turn: int) -> None:
        origin = bases[turn % 3].float()
        torch.sub(latents[turn % 3], origin, out=out)
        size, length = (torch.linalg.vector_norm(out, order, dim=1) for order in (1, 2))
        alpha = along_scale(size, length.square(), k, ALONG_WEIGHT, per_row=True)
        torch.copysign(alpha, out, out=out).add_(origin)

    taken = in_turn(
        {
            "copy": lambda turn: out.copy_(latents[turn % 3]),
            "code": lambda turn: one_bit_code_(
                out, latents[turn % 3], bases[turn % 3], per_row=True, along_weight=ALONG_WEIGHT, dither=False
            ),
            "operators": by_operators,
        },
        plan,
    )
    case = f"one_bit_code-N{n}-K{k}"
    copied, coded = 2 * out.nbytes / taken["copy"][0], (2 * out.nbytes + bases[0].nbytes) / taken["code"][0]
    figures.add(case, copied / 1e9, "GB/s", against="plain copy")
    figures.add(case, coded / 1e9, "GB/s", against="one_bit_code_")
    figures.add(
        case,
        coded / copied,
        "ratio",
        against="one_bit_code_ / copy bandwidth",
        bound=0.5,
        more_is_better=True,
    )
    figures.add(
        case,
        taken["code"][0] / taken["operators"][0],
        "ratio",
        against="one_bit_code_ / torch's operators",
        bound=1.0,
    )


def main() -> None:
    """Entry point. Exit status 0 whether or not the bounds hold: `holds` in the JSON lines says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=80.0, help="time for all measurements together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="thread: with --threads 1 only"
    )
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES), help="weight shapes NxK")
    options = parser.parse_args()
    if options.clock == "thread" and options.threads != 1:
        parser.error(f"--clock thread sees one thread only; --threads is {options.threads}, allowed: 1")
    if not load():
        raise SystemExit("no C++ compiler here: there is no kernel to time")
    torch.set_num_threads(options.threads)
    figures = Figures("kernels", under=f"{path_name()}, {options.clock} clock")
    shapes = [tuple(int(side) for side in shape.split("x")) for shape in options.shapes.split(",")]
    plan = Plan(seconds=options.seconds / (len(shapes) * len(TOKENS) + 2), clock=CLOCKS[options.clock])
    with torch.inference_mode():
        for n, k in shapes:
            bench_linear(figures, n, k, plan)
        n, k = max(shapes, key=lambda shape: shape[0] * shape[1])
        bench_sign_pack(figures, n, k, plan)
        bench_one_bit_code(figures, n, k, plan)
    figures.show()
    print(f"{figures.missed} bounds missed", file=sys.stderr)


if __name__ == "__main__":
    main()
