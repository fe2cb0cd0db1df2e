"""`python -m zen_train.delta distill`: better scales for an artifact that exists. Its options, and what it prints.

The work is `zen_train.distill_artifact`'s, imported when the command runs: it needs transformers, which the other
commands and this package do without.
"""

import argparse
import sys
from typing import Any

from zen_train.delta.options import add_folder, positive


def add_distill(commands: Any) -> None:
    """Add the command to the subparsers of `python -m zen_train.delta`."""
    distill = commands.add_parser(
        "distill",
        help="fit the scales of an artifact to its fine-tune's logits",
        description="Write an artifact with the same signs and better scales (BitDelta, section 3): the logits of the "
        "fine-tune on some text are the target. Minutes on a CPU for a small model; the artifact itself stays.",
    )
    add_folder(distill)
    distill.add_argument(
        "out", metavar="OUT", help="folder to write; must not exist unless --overwrite is given"
    )
    distill.add_argument(
        "--base", metavar="DIR", required=True, help="folder of the base model (safetensors)"
    )
    distill.add_argument("--tuned", metavar="DIR", required=True, help="folder of the fine-tuned model")
    distill.add_argument(
        "--text",
        metavar="FILE",
        required=True,
        nargs="+",
        help="text like that of the fine-tune: JSON lines (.jsonl: messages, prompt and completion, or text) or plain",
    )
    distill.add_argument("--steps", type=positive, default=24, metavar="N", help="default: %(default)s")
    distill.add_argument(
        "--learning-rate",
        type=float,
        default=0.002,
        metavar="R",
        help="of the scales' logarithms; 0.002 is about 0.2 percent a step (default: %(default)s)",
    )
    distill.add_argument("--overwrite", action="store_true", help="replace OUT when it exists")
    distill.set_defaults(run=_distill)


def _distill(options: argparse.Namespace) -> None:
    from zen_train.distill_artifact import Settings, distill_artifact

    report = distill_artifact(
        options.delta,
        options.out,
        base=options.base,
        tuned=options.tuned,
        text=options.text,
        settings=Settings(steps=options.steps, learning_rate=options.learning_rate),
        overwrite=options.overwrite,
        on_step=lambda step, loss: print(f"step {step}/{options.steps}  loss {loss:.5g}", file=sys.stderr),
    )
    first, last = report.losses[0], report.losses[-1]
    print(
        f"{report.folder}: scales of {report.matrices} matrices fitted in {report.seconds:.0f} s; "
        f"squared difference of the logits {first:.4g} before, {last:.4g} in the last step"
    )
