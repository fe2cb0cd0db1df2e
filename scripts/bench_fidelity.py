"""What a one-bit delta keeps of a full fine-tune, method by method, on held-out text.

python scripts/bench_fidelity.py --work DIR VARIANT [VARIANT ...] >> scripts/results/fidelity.jsonl

For each variant: a full fine-tune at scale=quick without merging; deltas made from its weights (`matrix`: one scale a
matrix, the paper; `row`; `planes`: two bits a weight); and fine-tunes that end one-bit-aware on the same data, with as
many steps (`aware`) and with 1.3 times as many (`aware_1.3`). Training runs are the commands that a user would type;
they are kept in DIR and not repeated, so a stopped bench goes on where it was. Four minutes a run on two cores,
half a minute a method. All of them train at one rate, and it must be a good one for the full fine-tune: what a delta
keeps of a badly tuned one says little (legal, 40 steps: 2.679 at 1e-4, 2.603 at 2e-4; math, 60 steps: 0.968 and 1.042).
Per method: held-out loss, share of the full fine-tune's gain with a 95 % interval (bootstrap over records, paired), KL
divergence from the full fine-tune, and how often both would say the same token.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from configured import configured
from measure import Figures

from zen_train.base import Base, prepare_base
from zen_train.data.load import data_module
from zen_train.data.packing import model_inputs
from zen_train.delta import DeltaArtifact, iter_applied
from zen_train.delta.codec import Scale, add_delta, encode
from zen_train.loss import IGNORE, shifted
from zen_train.module import CausalLM, load_weights_
from zen_train.overrides import config_groups

TRAINED: dict[str, tuple[bool, int]] = {"full": (False, 60), "aware": (True, 60), "aware_1.3": (True, 78)}
"""Fine-tunes: one-bit-aware, and optimizer steps."""
CODED: dict[str, tuple[Scale, int]] = {"matrix": ("matrix", 1), "row": ("row", 1), "planes": ("row", 2)}
"""Deltas of the full fine-tune: scale and planes."""
BOUNDS = {"aware": 97.5, "aware_1.3": 99.0, "planes": 97.0}
RESAMPLES = 2000


def main() -> int:
    names = sorted(config_groups()["variant"])
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="none: all 14")
    parser.add_argument("--work", type=Path, required=True, help="training runs are kept here and reused")
    parser.add_argument("--methods", nargs="*", default=[*CODED, *TRAINED], choices=[*CODED, *TRAINED])
    parser.add_argument(
        "--tokens", type=int, default=16384, help="places in the held-out blocks that are scored"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--compile", action="store_true", help="torch.compile for the training runs")
    arguments = parser.parse_args()
    if unknown := set(arguments.variants) - set(names):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    figures = Figures("fidelity")
    for variant in arguments.variants or names:
        measure(variant, arguments, figures)
    figures.show()
    return 0


def measure(variant: str, arguments: argparse.Namespace, figures: Figures) -> None:
    """All figures of one variant."""
    shared = [f"optim.learning_rate={arguments.learning_rate}", f"trainer.compile={arguments.compile}"]
    work = arguments.work / f"{variant}-{arguments.learning_rate:g}"
    wanted = [method for method in TRAINED if method in {*arguments.methods, "full"}]
    runs = {method: trained(work / method, variant, method, shared) for method in wanted}
    judge = Judge(variant, arguments.tokens)
    base = judge.score()
    tuned = dict(checkpoint_weights(runs["full"]))
    load_weights_(judge.module, tuned.items())
    full = judge.score(remember=True)
    figures.add(
        f"{variant}/full loss",
        full.loss,
        "nats",
        against=f"base {base.loss:.4f}, at {arguments.learning_rate:g}",
    )
    for method in arguments.methods:
        if method == "full":
            continue
        weights = (
            coded(tuned, judge.base, *CODED[method])
            if method in CODED
            else delta_weights(runs[method], judge.base)
        )
        load_weights_(judge.module, weights)
        found = judge.score()
        low, high = bootstrap(base, full, found)
        kept = 100 * (base.loss - found.loss) / (base.loss - full.loss)
        figures.add(f"{variant}/{method} loss", found.loss, "nats")
        figures.add(
            f"{variant}/{method} kept",
            kept,
            "%",
            bound=BOUNDS.get(method),
            more_is_better=True,
            against="gain of the full fine-tune",
            spread=(low, high),
        )
        figures.add(f"{variant}/{method} KL", found.divergence, "nats", against="the full fine-tune")
        figures.add(
            f"{variant}/{method} same token", 100 * found.agreement, "%", against="the full fine-tune"
        )


# -- runs and their weights ----------


def trained(folder: Path, variant: str, method: str, words: list[str]) -> Path:
    """The folder of a finished run, trained now when it is not there."""
    aware, steps = TRAINED[method]
    # Scores are this bench's own and the best checkpoint is not wanted: validation comes once, at the end.
    words = [
        f"+variant={variant}",
        "scale=quick",
        "merge=none",
        f"export.aware={aware}",
        f"trainer.max_steps={steps}",
        f"trainer.validate_every_n_steps={steps}",
        f"trainer.checkpoint_every_n_steps={steps}",
        f"output_dir={folder}",
        "overwrite=true",
        "evaluate.sample_tokens=0",
        "logger.wandb.mode=disabled",
        *words,
    ]
    if not (folder / "metrics.json").is_file():
        subprocess.run([sys.executable, "-m", "zen_train", *words], check=True, stdout=sys.stderr)
    return folder


def checkpoint_weights(run: Path) -> Iterator[tuple[str, Tensor]]:
    """The trained weights of a run, float32, from its last checkpoint."""
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True, mmap=True, map_location="cpu")
    for name, tensor in saved["state_dict"].items():
        yield name.removeprefix("model.").replace("_orig_mod.", ""), tensor


def coded(tuned: dict[str, Tensor], base: Base, scale: Scale, planes: int) -> Iterator[tuple[str, Tensor]]:
    """`tuned` with every matrix replaced by the base and its coded delta."""
    source = base.source()
    for name, weight in tuned.items():
        if weight.dim() >= 2:
            origin = source.get(name)
            weight = add_delta(origin, encode(origin, weight, scale=scale, planes=planes).planes)
        yield name, weight


def delta_weights(run: Path, base: Base) -> Iterator[tuple[str, Tensor]]:
    """What a server would load: the base and the exported delta."""
    return iter_applied(DeltaArtifact.open(run / "delta"), base.source())


# -- scores ----------


@dataclass(frozen=True)
class Score:
    """One model on the held-out records. `nll_R` and `tokens_R` are sums by record."""

    nll_R: Tensor
    tokens_R: Tensor
    divergence: float
    agreement: float

    @property
    def loss(self) -> float:
        return float(self.nll_R.sum() / self.tokens_R.sum())


class Judge:
    """Scores whatever weights its module holds, in float32, always on the same tokens."""

    def __init__(self, variant: str, tokens: int) -> None:
        config = configured("scale=quick", f"data.eval_tokens={tokens}", variant=variant)
        self.base = prepare_base(config.base)
        data = data_module(
            config.data, config.variant, tokenizer=self.base.tokenizer(), accumulate=1, max_steps=60
        )
        data.setup()
        self.batches: list[dict[str, Any]] = [dict(batch) for batch in data.val_dataloader()]
        self.module = CausalLM(self.base, tuning=config.tuning, optim=config.optim, trainer=config.trainer)
        self.module.configure_model()
        self.module.eval()
        self.reference: list[
            Tensor
        ] = []  # log-probabilities of the full fine-tune, by batch, in half precision

    @torch.no_grad()
    def score(self, *, remember: bool = False) -> Score:
        """`remember`: this model is the one that others are compared with from now on."""
        nll, records, divergence, same = [], [], 0.0, 0
        references = [] if remember else self.reference
        head = self.module.model.get_output_embeddings()
        first = 0
        for index, batch in enumerate(self.batches):
            label_BT = shifted(batch["labels"])
            kept_BT = label_BT != IGNORE
            record_BT = first + (batch["position_ids"] == 0).flatten().cumsum(0).view_as(label_BT)
            first = int(record_BT.max())
            hidden_BTD = self.module.model.get_decoder()(**model_inputs(batch))[0]
            logp_NV = torch.log_softmax(head(hidden_BTD[kept_BT]), -1)
            nll.append(-logp_NV.gather(1, label_BT[kept_BT][:, None])[:, 0].double())
            records.append(record_BT[kept_BT])
            if remember:
                references.append(logp_NV.half())
            elif references:
                target_NV = references[index].float()
                divergence += float((target_NV.exp() * (target_NV - logp_NV)).sum())
                same += int((target_NV.argmax(1) == logp_NV.argmax(1)).sum())
        self.reference = references
        names, record_N = torch.cat(records).unique(return_inverse=True)
        nll_N = torch.cat(nll)
        tokens_R = torch.zeros(len(names), dtype=torch.float64).index_add_(
            0, record_N, torch.ones_like(nll_N)
        )
        nll_R = torch.zeros(len(names), dtype=torch.float64).index_add_(0, record_N, nll_N)
        return Score(nll_R, tokens_R, divergence / len(nll_N), same / len(nll_N))


def bootstrap(base: Score, full: Score, found: Score) -> tuple[float, float]:
    """95 % interval of the share kept, in percent: records drawn with replacement, the same ones for all three."""
    records = len(base.tokens_R)
    draw = torch.randint(records, (RESAMPLES, records), generator=torch.Generator().manual_seed(0))
    sums = [score.nll_R[draw].sum(1) for score in (base, full, found)]
    kept = 100 * (sums[0] - sums[2]) / (sums[0] - sums[1])
    low, high = torch.quantile(kept, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


if __name__ == "__main__":
    sys.exit(main())
