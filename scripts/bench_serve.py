"""Serving, measured over HTTP: speed, first tokens, memory, cold loads, and traffic that wants more variants than fit.

python scripts/bench_serve.py VARIANTS [--peer PYTHON] [--plot FILE] >> scripts/results/serve.jsonl

VARIANTS is a folder of exported deltas of the default base (14 for the table of the README). `--peer` is the Python of
an environment made by scripts/vllm_peer.sh; its base and its LoRA path are then measured in turns with ours. All
prompts are 37 tokens; answers are greedy and of fixed length. JSON lines on standard output, tables on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import Figures, median, spread
from serve_client import Answer, complete
from serve_peer import peer_base, peer_lora
from serve_process import ServerProcess, ours

PROMPT_TOKENS = 37
BASE = "smollm2"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("variants", type=Path, metavar="VARIANTS")
    parser.add_argument("--peer", type=Path, metavar="PYTHON", help="python of the vLLM environment")
    parser.add_argument("--plot", type=Path, help="write the latency picture here")
    parser.add_argument("--seconds", type=float, default=60, help="length of each open-loop run")
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0, 2.0], help="requests a second")
    parser.add_argument(
        "--only", nargs="*", choices=["speed", "memory", "cold", "traffic"], help="some parts"
    )
    arguments = parser.parse_args()
    if not arguments.variants.is_dir():
        parser.error(f"{arguments.variants} is no folder; give the folder that holds the exported deltas")
    files = sorted(arguments.variants.glob("**/delta.safetensors"))  # of artifacts, or of whole runs
    if not files:
        parser.error(
            f"{arguments.variants} holds no delta.safetensors; give the folder of the exported deltas"
        )
    names = [f"zen4-{path.name}" for path in sorted(arguments.variants.iterdir()) if path.is_dir()]
    figures = Figures("serve")
    parts = arguments.only or ["speed", "memory", "cold", "traffic"]
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch)
        if "speed" in parts:
            asyncio.run(speed(arguments, names, figures, logs))
        if "memory" in parts:
            asyncio.run(memory(arguments.variants, names, figures, logs))
        if "cold" in parts:
            asyncio.run(cold_loads(arguments.variants, files, names, figures, logs))
        if "traffic" in parts:
            asyncio.run(traffic(arguments, names, figures, logs))
    figures.show()
    return 0


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Token numbers of a prompt that no other seed shares."""
    chooser = random.Random(seed)
    return [chooser.randrange(1000, 40000) for _ in range(tokens)]


async def together(asked: Iterable[Awaitable[Answer]]) -> tuple[list[Answer], float]:
    """Answers of requests sent at once, and the tokens a second of all of them from send to end."""
    started = time.perf_counter()
    answers = list(await asyncio.gather(*asked))
    seconds = time.perf_counter() - started
    for answer in answers:
        if answer.error or answer.status != 200:
            raise RuntimeError(f"{answer.model}: status {answer.status} {answer.error}")
    return answers, sum(answer.tokens for answer in answers) / seconds


async def rates(
    url: str, singles: list[str], batches: dict[str, list[str]], *, rounds: int
) -> dict[str, list[float]]:
    """Tokens a second: of one stream of each model of `singles`, and of each batch; first tokens of the singles."""
    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for model in singles:
            answers, _ = await together([complete(url, model, prompt(turn), max_tokens=96)])
            if turn > 0:  # the first round warms up
                found.setdefault(f"{model} one", []).append(answers[0].decode_rate)
        for label, models in batches.items():
            asked = (complete(url, m, prompt(100 * turn + i), max_tokens=96) for i, m in enumerate(models))
            _, rate = await together(asked)
            if turn > 0:
                found.setdefault(label, []).append(rate)
    for turn in range(12):
        for model in singles:
            answers, _ = await together([complete(url, model, prompt(1000 + turn), max_tokens=2)])
            if turn > 1:
                found.setdefault(f"{model} first", []).append(answers[0].first_s * 1e3)
    return found


async def speed(arguments: argparse.Namespace, names: list[str], figures: Figures, logs: Path) -> None:
    """Ours and the peer, each server alone on the machine, in turns."""
    one = names[0]
    batches = {"base x14": [BASE] * 14, "distinct x14": (names * 14)[:14]}

    def add(label: str, found: dict[str, list[float]]) -> dict[str, list[float]]:
        for key, values in found.items():  # as they come, so that an interrupted run keeps what it measured
            unit = "ms" if key.endswith("first") else "tokens/s"
            figures.add(f"{label}, {key}", median(values), unit, spread=spread(values))
        return found

    with ours(arguments.variants, logs / "ours.log") as found:
        mine = add("ours", await rates(found.url, [BASE, one], batches, rounds=3))
    theirs: dict[str, list[float]] = {}
    lora: dict[str, list[float]] = {}
    if arguments.peer:
        with peer_base(arguments.peer, logs / "peer.log") as found:
            theirs = add("vLLM", await rates(found.url, [BASE], {"base x14": [BASE] * 14}, rounds=3))
        with peer_lora(arguments.peer, logs / "lora.log", adapters=14) as found:
            adapters = [f"lora{number}" for number in range(14)]
            lora = add(
                "vLLM LoRA", await rates(found.url, [adapters[0]], {"distinct x14": adapters}, rounds=2)
            )
        with ours(arguments.variants, logs / "again.log") as found:
            again = add("ours again", await rates(found.url, [BASE, one], batches, rounds=3))
        mine = {key: mine[key] + again[key] for key in mine}

    def ratio(
        case: str, top: list[float], bottom: list[float], bound: float, more: bool, against: str
    ) -> None:
        value = median(top) / median(bottom)
        figures.add(f"{case} / {against}", value, "x", bound=bound, more_is_better=more)

    ratio("one variant, one stream", mine[f"{one} one"], mine[f"{BASE} one"], 0.93, True, "our base")
    ratio("first token of a variant", mine[f"{one} first"], mine[f"{BASE} first"], 1.10, False, "our base")
    if theirs:
        ratio("one variant, one stream", mine[f"{one} one"], theirs[f"{BASE} one"], 3.1, True, "vLLM base")
        ratio("14 variants, 14 streams", mine["distinct x14"], theirs["base x14"], 1.1, True, "vLLM base")
        ratio("14 variants, 14 streams", mine["distinct x14"], lora["distinct x14"], 3.6, True, "vLLM LoRA")
        ratio(
            "first token of a variant", mine[f"{one} first"], theirs[f"{BASE} first"], 1.0, False, "vLLM base"
        )


async def memory(variants: Path, names: list[str], figures: Figures, logs: Path) -> None:
    """Proportional set size after the same work: the base alone, and with every variant resident."""
    sizes = {}
    empty = logs / "none"
    empty.mkdir()
    for label, folder, models in (("base alone", empty, [BASE] * 14), ("base and variants", variants, names)):
        slots = "engine.slots=1" if folder == empty else f"engine.slots={len(names)}"
        with ours(folder, logs / "memory.log", slots) as found:
            await together(complete(found.url, m, prompt(i), max_tokens=32) for i, m in enumerate(models))
            sizes[label] = found.memory_bytes()
            figures.add(
                f"memory, {label}", sizes[label] / 1e6, "MB", against=f"{len(set(models))} models asked"
            )
    figures.add(
        f"memory of base and {len(names)} variants", sizes["base and variants"] / sizes["base alone"], "x",
        bound=1.9, against="the base alone, whole processes",
    )  # fmt: skip


async def cold_loads(
    variants: Path, files: list[Path], names: list[str], figures: Figures, logs: Path
) -> None:
    """Loads of cold variants beside running streams: their rate, and the longest gap of the others."""
    running = names[:2]
    bytes_each = sum(path.stat().st_size for path in files) / len(files)
    with ours(variants, logs / "cold.log", "engine.slots=8") as found:

        async def streams() -> list[Answer]:
            asked = (complete(found.url, running[i % 2], prompt(i), max_tokens=200) for i in range(4))
            return (await together(asked))[0]

        async def ask(models: list[str]) -> None:
            for model in models:
                await together([complete(found.url, model, prompt(7), max_tokens=1)])

        def loaded() -> tuple[float, float]:
            return found.metric("zen_variant_load_seconds_sum"), found.metric(
                "zen_variant_load_seconds_count"
            )

        await streams()
        before = loaded()
        await ask(names[2:])
        alone = loaded()
        quiet = [max(answer.gaps_s) for answer in await streams()]
        start = loaded()
        task = asyncio.create_task(streams())
        await asyncio.sleep(0.5)
        for model in [*names[2:], *names[2:8]]:
            if not task.done():
                await ask([model])
        loading = [max(answer.gaps_s) for answer in await task]
        beside = loaded()
    cache = page_cache_rate(files)
    for label, (seconds, loads), (seconds_before, loads_before) in (
        ("cold load", alone, before),
        ("cold load beside 4 streams", beside, start),
    ):
        each, count = (seconds - seconds_before) / (loads - loads_before), loads - loads_before
        figures.add(label, each * 1e3, "ms", against=f"{bytes_each / 1e6:.1f} MB, mean of {count:g}")
        figures.add(
            f"{label}, bytes a second",
            bytes_each / each / cache,
            "x",
            bound=0.7,
            more_is_better=True,
            against="page cache",
        )
    figures.add("longest gap of others, quiet", max(quiet) * 1e3, "ms", against="4 streams")
    figures.add("longest gap of others, loading", max(loading) / max(quiet), "x", bound=1.05, against="quiet")


def page_cache_rate(files: list[Path]) -> float:
    """Bytes a second of reading files that are in the page cache into a buffer."""
    buffer = bytearray(max(path.stat().st_size for path in files))
    best = 0.0
    for _ in range(3):
        for path in files:
            with path.open("rb", buffering=0) as file:
                started = time.perf_counter()
                count = file.readinto(buffer)
                best = max(best, count / (time.perf_counter() - started))
    return best


async def traffic(arguments: argparse.Namespace, names: list[str], figures: Figures, logs: Path) -> None:
    """Open loop: zipf over base and variants on 8 slots, at fixed rates, 32 tokens an answer."""
    for rate in arguments.rates:
        with ours(arguments.variants, logs / "traffic.log", "engine.slots=8") as found:
            await together([complete(found.url, BASE, prompt(0), max_tokens=8)])
            answers = await open_loop(found, names, rate=rate, seconds=arguments.seconds)
            label = f"zipf, 8 slots, {rate:g} requests/s"
            report_traffic(label, answers, found, figures)
        if arguments.plot and rate == arguments.rates[-1]:
            from serve_plot import latency_picture

            latency_picture(answers, arguments.plot, title=label)


async def open_loop(found: ServerProcess, names: list[str], *, rate: float, seconds: float) -> list[Answer]:
    """Requests at exponential intervals, whether earlier ones are done or not."""
    chooser = random.Random(0)
    models = [BASE, *names]
    weights = [1 / (place + 1) for place in range(len(models))]
    tasks: list[asyncio.Task[Answer]] = []
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        model = chooser.choices(models, weights)[0]
        tasks.append(asyncio.create_task(complete(found.url, model, prompt(len(tasks)), max_tokens=32)))
        await asyncio.sleep(chooser.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def report_traffic(label: str, answers: list[Answer], found: ServerProcess, figures: Figures) -> None:
    """First tokens, gaps, throughput, loads and hits of one run."""
    lost = [answer for answer in answers if answer.error or answer.status != 200]
    good = [answer for answer in answers if answer not in lost]
    firsts = sorted(answer.first_s * 1e3 for answer in good)
    gaps = sorted(gap * 1e3 for answer in good for gap in answer.gaps_s)
    base = sorted(answer.first_s * 1e3 for answer in good if answer.model == BASE)
    span = max(answer.ended for answer in good) - min(answer.started for answer in good)
    figures.add(f"{label}: lost", len(lost), "requests", bound=0, against=f"{len(answers)} sent")
    for name, values in (("first token", firsts), ("first token of the base", base), ("gap", gaps)):
        figures.add(f"{label}: {name}, P50", quantile(values, 0.5), "ms")
        figures.add(f"{label}: {name}, P99", quantile(values, 0.99), "ms")
    for model in sorted({answer.model for answer in good}):
        own = sorted(answer.first_s * 1e3 for answer in good if answer.model == model)
        figures.add(f"{label}: {model}, P50", quantile(own, 0.5), "ms", against=f"{len(own)} requests")
        figures.add(f"{label}: {model}, P99", quantile(own, 0.99), "ms", against=f"{len(own)} requests")
    figures.add(f"{label}: throughput", sum(answer.tokens for answer in good) / span, "tokens/s")
    hits, lookups = (found.metric(f"zen_variant_cache_{what}_total") for what in ("hits", "lookups"))
    figures.add(f"{label}: hit rate", 100 * hits / max(lookups, 1), "%", against=f"{lookups:g} look-ups")
    figures.add(f"{label}: cold loads", found.metric("zen_variant_load_seconds_count"), "loads")
    figures.add(f"{label}: memory", found.memory_bytes() / 1e6, "MB")


def quantile(ordered: list[float], share: float) -> float:
    """The value below which `share` of them lie."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


if __name__ == "__main__":
    sys.exit(main())
