"""What rounding `W0 + alpha S` to bf16 takes from a fine-tune: to nearest, and dithered.

python scripts/bench_rounding.py DELTA [DELTA ...] >> scripts/results/rounding.jsonl

Each DELTA is the `delta` folder of a run on the default base. Held-out loss of its variant in float32 arithmetic, with
the weights exact, rounded to nearest and dithered (`zen_train.kernels.common.dither`); the figure is the share of the
exact gain over the base that stays. About two minutes a variant on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from configured import configured
from measure import Figures

from zen_train.base import prepare_base
from zen_train.data.load import data_module
from zen_train.delta import DeltaArtifact, TensorSource, iter_applied
from zen_train.kernels.common.dither import dither_bf16
from zen_train.loss import IGNORE
from zen_train.module import CausalLM, load_weights_


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("deltas", nargs="+", metavar="DELTA")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="places in the held-out blocks that are scored"
    )
    arguments = parser.parse_args()
    figures = Figures("rounding")
    for folder in arguments.deltas:
        measure(DeltaArtifact.open(folder), arguments.tokens, figures)
    figures.show()
    return 0


def measure(artifact: DeltaArtifact, tokens: int, figures: Figures) -> None:
    """Losses of one artifact under three roundings."""
    config = configured("scale=quick", f"data.eval_tokens={tokens}", variant=artifact.config.variant)
    base = prepare_base(config.base)
    data = data_module(
        config.data,
        config.variant,
        tokenizer=base.tokenizer(),
        accumulate=1,
        max_steps=config.trainer.max_steps,
    )
    data.setup()
    module = CausalLM(base, tuning=config.tuning, optim=config.optim, trainer=config.trainer)
    module.configure_model()
    module.eval()

    @torch.no_grad()
    def loss() -> float:
        total, count = 0.0, 0
        for batch in data.val_dataloader():
            total += float(module.nll(batch))
            count += int((batch["labels"] != IGNORE).sum())
        return total / count

    def loss_with(change: Callable[[Tensor], Tensor]) -> float:
        load_weights_(module, changed(artifact, base.source(), change))
        return loss()

    without = loss()
    exact = loss_with(lambda weight: weight)
    for name, change in (("nearest", nearest), ("dithered", dithered)):
        kept = (without - loss_with(change)) / (without - exact)
        figures.add(
            f"{artifact.config.variant}, {name}", 100 * kept, "%", against="gain of the exact base + delta"
        )


def changed(
    artifact: DeltaArtifact, source: TensorSource, change: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The variant's parameters, matrices passed through `change`."""
    for name, weight in iter_applied(artifact, source):
        yield name, change(weight) if weight.dim() >= 2 else weight


def nearest(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16).float()


def dithered(weight: Tensor) -> Tensor:
    return dither_bf16(weight).float()


if __name__ == "__main__":
    sys.exit(main())
