"""What a one-bit delta keeps of a full fine-tune, method by method, on held-out text.

python scripts/bench_fidelity.py --work DIR VARIANT [VARIANT ...] >> scripts/results/fidelity.jsonl

For each variant: full fine-tunes of 40 steps at two learning rates, of which the better one on the held-out text counts
(what a delta keeps of a badly tuned one says little); deltas made from its weights (`matrix`: one scale a matrix, the
paper; `row`; `pushed`: by row, pushed along the delta, the default; `two_bits`; `directions`: coded singular
directions in one bit a weight; `distilled`: scales fitted to its logits); and fine-tunes that end one-bit-aware on the
same data, with as many steps (`aware`) and with 1.3 times as many (`aware_1.3`). For math, coder, translate and agent
also one and 1.25 bits a weight spread over the matrices (`spread_1`, `spread_1.25`), the codes of others, and what
more time buys: `aware_1.15`, and a longer full fine-tune coded as directions (`directions_1.1`).
Training runs are commands that a user would type; they are kept in DIR and not repeated, so a stopped bench goes on
where it was. Two to three minutes a run on two cores, half a minute a method.
Per method: held-out loss, share of the full fine-tune's gain with a 95 % interval (bootstrap over records, paired), KL
divergence from the full fine-tune, how often both would say the same token, and bits a weight of the matrices; of those
that train, the time of it over the full fine-tune's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fidelity_fitted as fitted
from fidelity_calibrated import delta_come_gptq, input_squares
from fidelity_codes import CODES
from fidelity_judge import Judge, Score, bootstrap
from fidelity_runs import Run, trained
from measure import Figures

from zen_train.data.packing import model_inputs
from zen_train.delta import DeltaArtifact, iter_applied
from zen_train.module import load_weights_
from zen_train.overrides import config_groups

NamedCode = Callable[[str, Tensor], tuple[Tensor, float]]
"""The name of a matrix and its delta to what a code makes of it and the bits that it takes."""

STEPS = 40
LEARNING_RATES = (1e-4, 2e-4)
CALIBRATION_BATCHES = 16
AWARE: dict[str, float] = {"aware": 1.0, "aware_1.15": 1.15, "aware_1.3": 1.3}
"""One-bit-aware runs: their steps over those of the full fine-tune."""
LONGER: dict[str, float] = {"directions_1.1": 1.1}
"""Longer full fine-tunes, coded as directions: their steps over those of the one that all are compared with."""
SPREAD = {"spread_1": 1.0, "spread_1.25": 1.25}
"""Bits a weight."""
METHODS = ["matrix", "row", "pushed", "two_bits", "directions", "distilled", "aware", "aware_1.3"]
CALIBRATED = "delta_come_gptq"
MORE_METHODS = [
    *SPREAD,
    "low_rank_and_signs",
    "low_rank",
    "delta_come",
    CALIBRATED,
    "directions_0.5",
    "ternary",
    "aware_1.15",
    *LONGER,
]
MORE_VARIANTS = ("math", "coder", "translate", "agent")
BOUNDS = {"aware": 97.5, "aware_1.3": 99.0, "two_bits": 97.0, "distilled": 96.0}


def main() -> int:
    names = sorted(config_groups()["variant"])
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="none: all 14")
    parser.add_argument("--work", type=Path, required=True, help="training runs are kept here and reused")
    parser.add_argument("--methods", nargs="*", choices=[*METHODS, *MORE_METHODS])
    parser.add_argument(
        "--tokens", type=int, default=8192, help="places in the held-out blocks that are scored"
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        type=float,
        default=LEARNING_RATES,
        metavar="RATE",
        help="learning rates of the full fine-tunes; one, where it is known which is better",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.variants) - set(names):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    figures = Figures("fidelity")
    for variant in arguments.variants or names:
        methods = arguments.methods or METHODS + MORE_METHODS * (variant in MORE_VARIANTS)
        Bench(variant, arguments.work / variant, arguments.tokens, arguments.rates, figures).measure(methods)
    figures.show()
    return 0


class Bench:
    """All figures of one variant."""

    def __init__(
        self, variant: str, work: Path, tokens: int, rates: Sequence[float], figures: Figures
    ) -> None:
        self.variant, self.work, self.figures = variant, work, figures
        full = {rate: self._full(rate) for rate in rates}
        self.judge = Judge(variant, tokens)
        self.base = self.judge.score()
        scores = {}
        for rate, run in full.items():
            load_weights_(self.judge.module, run.weights())
            scores[rate] = self.judge.score()
        self.rate = min(scores, key=lambda rate: scores[rate].loss)
        self.full_seconds = full[self.rate].seconds
        self.tuned = dict(full[self.rate].weights())
        load_weights_(self.judge.module, self.tuned.items())
        self.full = self.judge.score(remember=True)
        self.losses: dict[str, tuple[float, ...]] = {}
        self._add("base loss", self.base.loss, "nats")
        for rate, score in scores.items():
            chosen = "the one others are compared with" if rate == self.rate else None
            self._add(f"full {rate:g} loss", score.loss, "nats", against=chosen)

    def measure(self, methods: list[str]) -> None:
        for method in methods:
            weights, bits = self._made(method)
            load_weights_(self.judge.module, weights)
            self._report(method, self.judge.score(), bits)

    def _made(self, method: str) -> tuple[Iterator[tuple[str, Tensor]], float]:
        """The weights of a method, and its bits for each weight of the matrices."""
        if method in AWARE:
            run = self._run(method, self.rate, AWARE[method], "export.aware=true")
            seconds = run.seconds / self.full_seconds
            self._add(f"{method} time", seconds, "x", against="training of the full fine-tune")
            artifact = DeltaArtifact.open(run.delta)
            return iter_applied(artifact, self.judge.base.source()), stored_bits(artifact)
        if method == "distilled":
            return fitted.distilled(self.judge, self.tuned), self._coded(
                lambda _, delta: CODES["row"](delta)
            )[1]
        if method == CALIBRATED:
            load_weights_(self.judge.module, self.tuned.items())
            batches = [model_inputs(batch) for batch in fitted.text(self.judge, CALIBRATION_BATCHES)]
            seen = input_squares(self.judge.module.model, batches)
            return self._coded(lambda name, delta: delta_come_gptq(delta, seen.get(name)))
        if method in SPREAD:
            self.losses = self.losses or fitted.losses(self.judge, self.tuned)
            return fitted.spread(self.judge, self.tuned, self.losses, SPREAD[method]), SPREAD[method]
        if method in LONGER:
            longer = dict(self._full(self.rate, LONGER[method]).weights())
            return self._coded(lambda _, delta: CODES["directions"](delta), longer)
        return self._coded(lambda _, delta: CODES[method](delta))

    def _coded(
        self, code: NamedCode, tuned: dict[str, Tensor] | None = None
    ) -> tuple[Iterator[tuple[str, Tensor]], float]:
        source = self.judge.base.source()
        weights, taken, numel = dict(self.tuned if tuned is None else tuned), 0.0, 0
        for name, weight in list(weights.items()):
            if weight.ndim == 2:
                origin = source.get(name).float()
                delta, bits = code(name, weight - origin)
                weights[name], taken, numel = origin + delta, taken + bits, numel + weight.numel()
        return iter(weights.items()), taken / numel

    def _full(self, rate: float, share: float = 1.0) -> Run:
        return self._run(f"full-{rate:g}" if share == 1 else f"full-{rate:g}-x{share:g}", rate, share)

    def _run(self, name: str, rate: float, share: float, *words: str) -> Run:
        """`share`: its steps over STEPS."""
        steps = round(share * STEPS)
        return trained(self.work / name, self.variant, steps=steps, learning_rate=rate, words=list(words))

    def _report(self, method: str, found: Score, bits: float) -> None:
        kept = 100 * (self.base.loss - found.loss) / (self.base.loss - self.full.loss)
        self._add(f"{method} loss", found.loss, "nats")
        self._add(
            f"{method} kept",
            kept,
            "%",
            bound=BOUNDS.get(method),
            more_is_better=True,
            against="gain of the full fine-tune",
            spread=bootstrap(self.base, self.full, found),
        )
        self._add(f"{method} KL", found.divergence, "nats", against="the full fine-tune")
        self._add(f"{method} same token", 100 * found.agreement, "%", against="the full fine-tune")
        self._add(f"{method} bits", bits, "bits a weight")

    def _add(self, case: str, value: float, unit: str, **more: object) -> None:
        self.figures.add(f"{self.variant}/{case}", value, unit, **more)  # type: ignore[arg-type]


def stored_bits(artifact: DeltaArtifact) -> float:
    """Signs and scales of an artifact for each weight of its packed matrices."""
    packed = [row for row in artifact.tensor_report() if row.kind == "sign"]
    return 8 * sum(row.size_bytes for row in packed) / sum(prod(row.shape) for row in packed)


if __name__ == "__main__":
    sys.exit(main())
