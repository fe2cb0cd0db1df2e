"""Replay traffic through the cache policy, plain LRU, LFU, GDSF and the offline optimum: what each loads.

    python scripts/simulate_cache.py [--requests 10000] [--seeds 3] [--plot figure.png]

Loads per request (the miss rate) and bytes loaded per byte requested; loads take no time and nothing is
in use, so that only the choice of victims counts. `timed` cases replay the whole policy instead: loads
take time and minimum residency holds requests back. Every policy must admit what is requested, as a
server must. The offline column knows the future: it evicts what is needed furthest ahead (for mixed
sizes a good choice, but no bound). JSON lines on standard output, a table on standard error.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from measure import Figures, median, spread
from rich.console import Console
from rich.table import Table

from zen_train.serve.cache import Hit, PolicyConfig, Start, TierCache, Wait


@dataclass(frozen=True)
class Trace:
    """Requests `(time in s, variant)`, the size of each variant, and the budget, in slots of size 1."""

    requests: list[tuple[float, int]]
    sizes: list[int]
    budget: int


# --- traffic


def zipf(rng: random.Random, variants: int, exponent: float) -> Callable[[], int]:
    """Draws variant i with probability proportional to `1 / (i + 1)^exponent`."""
    cumulative = list(itertools.accumulate((i + 1) ** -exponent for i in range(variants)))
    return lambda: bisect.bisect(cumulative, rng.random() * cumulative[-1])


def arrivals(rng: random.Random, count: int, per_s: float) -> Iterator[float]:
    """Poisson arrivals."""
    return itertools.accumulate(rng.expovariate(per_s) for _ in range(count))


def steady(
    seed: int, count: int, *, variants: int = 16, slots: int = 8, exponent: float = 1.0, per_s: float = 1.0
) -> Trace:
    """Popularity by zipf's law that never changes."""
    rng = random.Random(seed)
    draw = zipf(rng, variants, exponent)
    return Trace([(at_s, draw()) for at_s in arrivals(rng, count, per_s)], [1] * variants, slots)


def shifting(seed: int, count: int, *, every: int, per_s: float = 1.0) -> Trace:
    """Zipf over 16 variants; every so many requests the three most popular become the least popular."""
    rng = random.Random(seed)
    draw, order = zipf(rng, 16, 1.0), list(range(16))
    requests = []
    for number, at_s in enumerate(arrivals(rng, count, per_s)):
        if number and number % every == 0:
            order = order[3:] + order[:3]
        requests.append((at_s, order[draw()]))
    return Trace(requests, [1] * 16, 8)


def rotation(seed: int, count: int, *, variants: int = 16, per_s: float = 1.0) -> Trace:
    """Each variant in turn, for ever, on 8 slots: the worst case of LRU."""
    rng = random.Random(seed)
    return Trace([(t, n % variants) for n, t in enumerate(arrivals(rng, count, per_s))], [1] * variants, 8)


def scanned(seed: int, count: int) -> Trace:
    """Zipf over 32 variants, and every 200 requests somebody tries each variant once."""
    rng = random.Random(seed)
    draw, scan = zipf(rng, 32, 1.1), list[int]()
    requests = []
    for number, at_s in enumerate(arrivals(rng, count, 1.0)):
        if number % 200 == 0:
            scan = list(range(32))
        requests.append((at_s, scan.pop() if scan else draw()))
    return Trace(requests, [1] * 32, 8)


def conversations(seed: int, count: int, *, per_s: float = 1.0) -> Trace:
    """Six conversations at a time, about 12 requests each to one variant of 32: the best case of LRU."""
    rng = random.Random(seed)
    draw, live = zipf(rng, 32, 0.8), list[list[int]]()
    requests = []
    for at_s in arrivals(rng, count, per_s):
        while len(live) < 6:
            live.append([draw(), 1 + int(rng.expovariate(1 / 12))])
        chosen = rng.choice(live)
        chosen[1] -= 1
        if not chosen[1]:
            live.remove(chosen)
        requests.append((at_s, chosen[0]))
    return Trace(requests, [1] * 32, 8)


def mixed_sizes(seed: int, count: int) -> Trace:
    """Zipf over 24 variants of 1, 2, 4 or 8 slots (sign planes), 24 slots."""
    trace = steady(seed, count, variants=24)
    rng = random.Random(seed + 1)
    return Trace(trace.requests, [rng.choice((1, 1, 1, 2, 2, 4, 8)) for _ in range(24)], 24)


TRACES: dict[str, Callable[[int, int], Trace]] = {
    "zipf 1.0, 16 on 8": lambda seed, count: steady(seed, count),
    "zipf 0.6, 16 on 8": lambda seed, count: steady(seed, count, exponent=0.6),
    "zipf 1.0, 64 on 8": lambda seed, count: steady(seed, count, variants=64),
    "zipf 1.0, 20 a second": lambda seed, count: steady(seed, count, per_s=20.0),
    "zipf 1.0, 3 a minute": lambda seed, count: steady(seed, count, per_s=0.05),
    "uniform, 16 on 8": lambda seed, count: steady(seed, count, exponent=0.0),
    "shifting every 1000": lambda seed, count: shifting(seed, count, every=1000),
    "shifting every 200": lambda seed, count: shifting(seed, count, every=200),
    "shifting, 20 a second": lambda seed, count: shifting(seed, count, every=1000, per_s=20.0),
    "rotation, 16 on 8": lambda seed, count: rotation(seed, count),
    "rotation, 9 on 8": lambda seed, count: rotation(seed, count, variants=9),
    "scans over 32": scanned,
    "conversations": lambda seed, count: conversations(seed, count),
    "mixed sizes": mixed_sizes,
}

# --- policies


class Policy(Protocol):
    """Told of each request; says whether it had to load."""

    def request(self, at_s: float, variant: int) -> bool: ...


class Greedy:
    """Evicts the resident with the lowest `worth` until the request fits."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.worth: dict[int, float] = defaultdict(float)
        self.resident: set[int] = set()

    def request(self, at_s: float, variant: int) -> bool:
        self.seen(at_s, variant)
        if variant in self.resident:
            return False
        size = self.trace.sizes
        while sum(size[v] for v in self.resident) + size[variant] > self.trace.budget:
            victim = min(self.resident, key=self.worth.__getitem__)
            self.resident.remove(victim)
            self.left(victim)
        self.resident.add(variant)
        return True

    def seen(self, at_s: float, variant: int) -> None: ...

    def left(self, variant: int) -> None: ...


class Lru(Greedy):
    """The least recently used goes."""

    def seen(self, at_s: float, variant: int) -> None:
        self.worth[variant] = at_s


class Lfu(Greedy):
    """The least frequently used since the beginning goes."""

    def seen(self, at_s: float, variant: int) -> None:
        self.worth[variant] += 1.0


class Gdsf(Greedy):
    """Greedy-Dual-Size-Frequency: uses since it was loaded, by size, with the age of the cache added."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.age = 0.0
        self.uses: dict[int, int] = defaultdict(int)

    def seen(self, at_s: float, variant: int) -> None:
        self.uses[variant] += 1
        self.worth[variant] = self.age + self.uses[variant] / self.trace.sizes[variant]

    def left(self, variant: int) -> None:
        self.age = self.worth[variant]
        self.uses[variant] = 0


class Offline(Greedy):
    """Knows the future: what is needed furthest ahead goes (Belady); for few loads, distance times size."""

    def __init__(self, trace: Trace, *, few_bytes: bool = False) -> None:
        super().__init__(trace)
        self.weights = [1] * len(trace.sizes) if few_bytes else trace.sizes
        self.number = 0
        self.next_use = [float("inf")] * len(trace.requests)
        upcoming: dict[int, int] = {}
        for number in range(len(trace.requests) - 1, -1, -1):
            variant = trace.requests[number][1]
            self.next_use[number] = upcoming.get(variant, float("inf"))
            upcoming[variant] = number
        self.due: dict[int, float] = {}

    def seen(self, at_s: float, variant: int) -> None:
        self.due[variant] = self.next_use[self.number]
        self.number += 1
        if variant not in self.resident:
            for other in self.resident:
                self.worth[other] = -(self.due[other] - self.number) * self.weights[other]


class Ours:
    """The policy of `serve/cache`, without the waiting."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.now_s = 0.0
        config = PolicyConfig(minimum_residency_s=0.0)
        self.cache = TierCache(budget_bytes=trace.budget, clock=lambda: self.now_s, config=config)

    def request(self, at_s: float, variant: int) -> bool:
        self.now_s = at_s
        key, size = str(variant), self.trace.sizes[variant]
        self.cache.record_request(key, size)
        # An automatic pin may stand in the way of a large one; a server makes that load urgent in the end.
        plan = self.cache.plan_load(key, size)
        if isinstance(plan, Wait):
            plan = self.cache.plan_load(key, size, urgent=True)
        if isinstance(plan, Hit):
            return False
        assert isinstance(plan, Start), plan
        for victim in plan.evict:
            self.cache.evicted(victim)
        self.cache.finish_load(key)
        return True


POLICIES: dict[str, Callable[[Trace], Policy]] = {
    "offline": Offline,
    "ours": Ours,
    "LRU": Lru,
    "LFU": Lfu,
    "GDSF": Gdsf,
}


def replay(trace: Trace, policy: Policy) -> tuple[float, float]:
    """(loads per request, bytes loaded per byte requested)."""
    loaded = [variant for at_s, variant in trace.requests if policy.request(at_s, variant)]
    asked = sum(trace.sizes[variant] for _, variant in trace.requests)
    return len(loaded) / len(trace.requests), sum(trace.sizes[variant] for variant in loaded) / asked


def replay_timed(trace: Trace, *, load_s: float, config: PolicyConfig) -> tuple[float, list[float]]:
    """The whole policy with loads of `load_s`, answers taking no time: (loads per request, waits in s)."""
    now_s = 0.0
    cache = TierCache(budget_bytes=trace.budget, clock=lambda: now_s, config=config)
    queued: dict[int, list[float]] = defaultdict(list)
    waits: list[float] = []
    loads = 0
    events = [(at_s, number, variant) for number, (at_s, variant) in enumerate(trace.requests)]
    done, again = -1, -2  # instead of a request's number: a load ends, a plan is worth making again
    retries: set[float] = set()
    while events:
        now_s, number, variant = heapq.heappop(events)
        if number >= 0:
            cache.record_request(str(variant), trace.sizes[variant])
            queued[variant].append(now_s)
        elif number == done:
            cache.finish_load(str(variant))
        # Longest waiting first, as the router does.
        for waiting in sorted((v for v in queued if queued[v]), key=lambda v: queued[v][0]):
            plan = cache.plan_load(str(waiting), trace.sizes[waiting])
            if isinstance(plan, Hit):
                waits += [now_s - since_s for since_s in queued.pop(waiting)]
            elif isinstance(plan, Start):
                for victim in plan.evict:
                    cache.evicted(victim)
                loads += 1
                heapq.heappush(events, (now_s + load_s, done, waiting))
            elif isinstance(plan, Wait) and plan.retry_at_s is not None and plan.retry_at_s not in retries:
                retries.add(plan.retry_at_s)
                heapq.heappush(events, (plan.retry_at_s, again, waiting))
    assert not any(queued.values())
    return loads / len(trace.requests), waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="in each trace")
    parser.add_argument("--seeds", type=int, default=3, help="traces of each kind; the median is reported")
    parser.add_argument("--plot", type=Path, help="write a bar chart here (PNG)")
    arguments = parser.parse_args()
    figures = Figures("simulate_cache")
    shown: dict[str, dict[str, float]] = {}
    for name, make in TRACES.items():
        traces = [make(seed, arguments.requests) for seed in range(arguments.seeds)]
        results = {
            policy: [replay(trace, build(trace)) for trace in traces] for policy, build in POLICIES.items()
        }
        lru = [loads for loads, _ in results["LRU"]]
        shown[name] = {}
        for policy, pairs in results.items():
            loads = [pair[0] for pair in pairs]
            shown[name][policy] = median(loads)
            bound = median(lru) if policy == "ours" else None
            figures.add(
                f"{name}: {policy}",
                round(median(loads), 4),
                "loads/request",
                bound=bound,
                against="LRU" if bound is not None else None,
                spread=spread(loads),
            )
            if max(traces[0].sizes) > 1:
                if policy == "offline":
                    pairs = [replay(trace, Offline(trace, few_bytes=True)) for trace in traces]
                bytes_share = [pair[1] for pair in pairs]
                shown.setdefault(f"{name}, by bytes", {})[policy] = median(bytes_share)
                figures.add(
                    f"{name}: {policy}, by bytes",
                    round(median(bytes_share), 4),
                    "bytes/byte",
                    spread=spread(bytes_share),
                )
    add_timed(figures, arguments.requests)
    show(shown)
    if arguments.plot:
        plot(shown, arguments.plot)


def add_timed(figures: Figures, count: int) -> None:
    """Rotation and zipf at 10 requests a second, loads of 50 ms: minimum residency bounds loads and waiting."""
    for name, trace in (
        ("rotation", rotation(0, count, per_s=10.0)),
        ("zipf", steady(0, count, per_s=10.0)),
    ):
        for residency_s in (0.0, 0.25, 1.0):
            config = PolicyConfig(minimum_residency_s=residency_s)
            loads, waits = replay_timed(trace, load_s=0.05, config=config)
            case = f"timed {name}, residency {residency_s:g} s"
            figures.add(f"{case}: loads", round(loads, 4), "loads/request", bound=1.0)
            waits.sort()
            figures.add(f"{case}: P99 wait", round(waits[int(0.99 * len(waits))], 3), "s")


def show(shown: dict[str, dict[str, float]]) -> None:
    """The table for people; the best online policy of a row is bold."""
    table = Table("loads per request", *POLICIES, title="what each policy loads (1: every request)")
    for name, row in shown.items():
        best = min(value for policy, value in row.items() if policy != "offline")
        cells = [
            f"[bold]{value:.3f}[/bold]" if value == best and policy != "offline" else f"{value:.3f}"
            for policy, value in row.items()
        ]
        table.add_row(name, *cells)
    Console(stderr=True).print(table)


def plot(shown: dict[str, dict[str, float]], path: Path) -> None:
    """Grouped bars, one group a trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 0.55 * len(shown) + 1.5), layout="constrained")
    height = 0.8 / len(POLICIES)
    for offset, policy in enumerate(POLICIES):
        positions = [row + offset * height for row in range(len(shown))]
        axes.barh(positions, [values[policy] for values in shown.values()], height=height, label=policy)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(shown))], list(shown))
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("loads per request (lower is better)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(POLICIES), frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
