"""Mixed load with cancels, reloads and evictions: no request may be lost, and no memory may leak.

python scripts/soak_serve.py VARIANTS [--minutes 10] >> scripts/results/soak.jsonl

Twelve clients ask base and variants (zipf) on eight slots without pause; one request in eight is cut off by its client;
every two seconds a variant is loaded anew under its name. A request is lost when it ends without its tokens and without
an error that names a reason. JSON lines on standard output, a table on standard error; exit code 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_serve import BASE, prompt
from measure import Figures
from serve_client import Answer, complete
from serve_process import ServerProcess, ours

CLIENTS, SLOTS, CUT_OFF = 12, 8, 1 / 8
RELOAD_S = 2.0
MEMORY_GROWTH = 1.03
"""Allowed from the third quarter of the run to the last: the allocator's noise is below it, a leak is not."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("variants", type=Path, metavar="VARIANTS")
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    if not arguments.variants.is_dir():
        parser.error(f"{arguments.variants} is no folder; give the folder that holds the exported deltas")
    figures = Figures("soak")
    with (
        tempfile.TemporaryDirectory() as scratch,
        ours(arguments.variants, Path(scratch) / "soak.log", f"engine.slots={SLOTS}") as found,
    ):
        soak = Soak(found, arguments.variants)
        asyncio.run(soak.run(arguments.minutes * 60))
        soak.report(figures)
    figures.show()
    return 0 if soak.held else 1


class Soak:
    """One run against one server."""

    def __init__(self, found: ServerProcess, variants: Path) -> None:
        self.found, self.variants = found, variants
        self.names = [path.name for path in sorted(variants.iterdir()) if path.is_dir()]
        self.ends: Counter[str] = Counter()
        self.lost: list[Answer] = []
        self.memory_bytes: list[int] = []
        self.held = True

    async def run(self, seconds: float) -> None:
        """Load the server for that long, then let it come to rest."""
        deadline = time.monotonic() + seconds
        clients = [self._client(random.Random(number), deadline) for number in range(CLIENTS)]
        await asyncio.gather(*clients, self._reload(deadline), self._watch(deadline))

    async def _client(self, chooser: random.Random, deadline: float) -> None:
        models = [BASE, *(f"zen4-{name}" for name in self.names)]
        weights = [1 / (place + 1) for place in range(len(models))]
        while time.monotonic() < deadline:
            model = chooser.choices(models, weights)[0]
            tokens = chooser.randrange(1, 48)
            asked = asyncio.create_task(
                complete(self.found.url, model, prompt(chooser.randrange(10**6)), max_tokens=tokens)
            )
            if chooser.random() < CUT_OFF:
                await asyncio.sleep(chooser.random() * 0.5)
                self.ends["cut off by the client"] += 1
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                continue
            self._count(await asked, tokens)

    def _count(self, answer: Answer, tokens: int) -> None:
        if answer.status == 200 and not answer.error and answer.tokens == tokens:
            self.ends["answered"] += 1
        elif answer.status in (429, 503) and answer.error:
            self.ends[f"refused with {answer.status}"] += 1
        else:
            self.lost.append(answer)

    async def _reload(self, deadline: float) -> None:
        chooser = random.Random(0)
        while time.monotonic() < deadline:
            await asyncio.sleep(RELOAD_S)
            name = chooser.choice(self.names)
            body = {"lora_name": f"zen4-{name}", "lora_path": name, "load_inplace": True}
            await asyncio.to_thread(self.found.post, "/v1/load_lora_adapter", body)
            self.ends["reloads"] += 1

    async def _watch(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self.memory_bytes.append(await asyncio.to_thread(self.found.memory_bytes))
            await asyncio.sleep(1.0)

    def report(self, figures: Figures) -> None:
        """What happened, against its bounds."""
        for what, count in sorted(self.ends.items()):
            figures.add(what, count, "requests")
        for answer in self.lost[:5]:
            print(
                f"lost: {answer.model} status {answer.status} {answer.tokens} tokens {answer.error}",
                file=sys.stderr,
            )
        figures.add("lost", len(self.lost), "requests", bound=0)
        quarter = max(1, len(self.memory_bytes) // 4)
        before, after = self.memory_bytes[2 * quarter : 3 * quarter], self.memory_bytes[3 * quarter :]
        growth = statistics.median(after) / statistics.median(before)
        figures.add("memory", statistics.median(after) / 1e6, "MB")
        figures.add("memory, last quarter", growth, "x", bound=MEMORY_GROWTH, against="the quarter before")
        figures.add("evictions", self.found.metric("zen_variant_evictions_total"), "variants")
        self.held = not self.lost and growth <= MEMORY_GROWTH


if __name__ == "__main__":
    sys.exit(main())
