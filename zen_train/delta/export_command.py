"""`python -m zen_train.delta export`: the delta of a fine-tune made elsewhere. Its options, and what it prints."""

import argparse
import sys
from pathlib import Path
from typing import Any

from zen_train.delta.export_options import CODES, EMBEDDING_RULES
from zen_train.delta.manifest import BaseInfo
from zen_train.delta.options import positive
from zen_train.delta.report import ArtifactReport
from zen_train.delta.sidecars import sidecars_in
from zen_train.delta.sources import FolderSource
from zen_train.delta.verify import verify_artifact
from zen_train.delta.writer import write_artifact
from zen_train.errors import DeltaError
from zen_train.kernels.common.along import ALONG_WEIGHT

_MEGA = 1_000_000


def add_export(commands: Any) -> None:
    """Add the command to the subparsers of `python -m zen_train.delta`."""
    export = commands.add_parser(
        "export",
        help="write the delta of a model that was fine-tuned elsewhere",
        description="Write, and verify, what a fine-tuned model adds to its base. Both are Hugging Face folders with "
        "safetensors; tensors are read one at a time, so that memory is near that of the largest few.",
    )
    export.add_argument("tuned", metavar="TUNED", help="folder of the fine-tuned model")
    export.add_argument(
        "out", metavar="OUT", help="folder to write; must not exist unless --overwrite is given"
    )
    export.add_argument("--base", metavar="DIR", required=True, help="folder of the base model (safetensors)")
    export.add_argument("--variant", metavar="NAME", help="what it is called (default: the name of TUNED)")
    export.add_argument(
        "--code",
        choices=CODES,
        default="directions",
        help="directions keep more (default); signs are BitDelta's, faster to make and to serve",
    )
    export.add_argument(
        "--bits",
        type=float,
        metavar="B",
        help="directions: bits a weight; above 1 the server refuses the delta (default: 1)",
    )
    export.add_argument(
        "--planes",
        type=positive,
        default=1,
        metavar="N",
        help="signs: planes of one bit a weight (default: 1)",
    )
    export.add_argument(
        "--along-weight",
        type=float,
        metavar="W",
        help=f"signs: how much an error along the delta counts; 1: the paper's scales (default: {ALONG_WEIGHT:g})",
    )
    export.add_argument(
        "--embedding",
        choices=EMBEDDING_RULES,
        default="auto",
        help="embedding and head: packed within a bound of error (auto, default), always (sign), never (dense)",
    )
    export.add_argument("--overwrite", action="store_true", help="replace OUT when it exists")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    _refuse_settings_of_another_code(options)
    base, tuned = FolderSource(options.base), FolderSource(options.tuned)
    report = write_artifact(
        options.out,
        base=base,
        tuned=tuned,
        base_info=BaseInfo.from_folder(options.base),
        variant=options.variant or Path(options.tuned).resolve().name,
        step=0,
        code=options.code,
        direction_bits=1.0 if options.bits is None else options.bits,
        planes=options.planes,
        along_weight=ALONG_WEIGHT if options.along_weight is None else options.along_weight,
        embedding=options.embedding,
        sidecars=sidecars_in(options.tuned) or sidecars_in(options.base),
        overwrite=options.overwrite,
    )
    verify_artifact(options.out, base=base, tuned=tuned)
    print(_summary(report))
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _refuse_settings_of_another_code(options: argparse.Namespace) -> None:
    if options.code == "signs" and options.bits is not None:
        raise DeltaError(
            f"--bits {options.bits:g} is for --code directions; with --code signs, --planes N gives N bits"
        )
    if options.code == "directions" and options.along_weight is not None:
        raise DeltaError(
            f"--along-weight {options.along_weight:g} is for --code signs; directions have no such scales, leave it out"
        )


def _summary(report: ArtifactReport) -> str:
    return (
        f"{report.folder}: {report.bytes_weights / _MEGA:.1f} MB of weights, {report.ratio_bf16:.1f} times smaller "
        f"than bf16, verified; relative error of the delta {report.relative_error:.3f}"
    )
