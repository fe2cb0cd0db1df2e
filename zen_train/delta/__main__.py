"""`python -m zen_train.delta export|inspect|verify|apply|distill|evaluate`: delta artifacts on the command line.

Exit codes: 0 done, 2 refused (the reason is on stderr, nothing was written), 130 interrupted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from zen_train.delta import tables
from zen_train.delta.apply import apply_delta
from zen_train.delta.artifact import DeltaArtifact
from zen_train.delta.distill_command import add_distill
from zen_train.delta.evaluate_command import add_evaluate
from zen_train.delta.export_command import add_export
from zen_train.delta.options import add_folder, positive
from zen_train.delta.shard_writer import DEFAULT_SHARD_BYTES
from zen_train.delta.sources import FolderSource
from zen_train.delta.verify import verify_artifact
from zen_train.errors import ZenTrainError

_ROUNDING_NOTE = 0.01
_WORST_SHOWN = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ZenTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zen_train.delta",
        description="Read one-bit delta artifacts: what a fine-tuned model adds to its base model.",
        epilog="The format is specified in zen_train/delta/FORMAT.md.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_export(commands)
    inspect = commands.add_parser(
        "inspect",
        help="show what an artifact holds",
        description="Show base, sizes and errors of an artifact, from its headers; `verify` reads all bytes.",
    )
    add_folder(inspect)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor, not only the worst ones")
    _add_json(inspect)
    inspect.set_defaults(run=_inspect)
    verify = commands.add_parser(
        "verify",
        help="check every byte of an artifact",
        description="Check structure, digests, padding bits and values. With --base, every byte of the base "
        "model against the recorded fingerprint; with --tuned as well, the recorded errors, computed anew.",
    )
    add_folder(verify)
    verify.add_argument("--base", metavar="DIR", help="folder of the base model (safetensors)")
    verify.add_argument("--tuned", metavar="DIR", help="folder of the fine-tuned model; needs --base")
    _add_json(verify)
    verify.set_defaults(run=_verify)
    apply = commands.add_parser(
        "apply",
        help="write the full model that base and delta make",
        description="Write a Hugging Face model folder, base plus delta, that transformers loads. The base "
        "is checked against the fingerprint; the folder appears only when it is complete.",
    )
    add_folder(apply)
    apply.add_argument("base", metavar="BASE", help="folder of the base model (safetensors)")
    apply.add_argument(
        "out", metavar="OUT", help="folder to write; must not exist unless --overwrite is given"
    )
    apply.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="element type to store; auto keeps the base's (default), float32 keeps the delta exactly",
    )
    apply.add_argument(
        "--max-shard-bytes",
        type=positive,
        default=DEFAULT_SHARD_BYTES,
        metavar="N",
        help="largest size of one weight file in bytes (default: %(default)s)",
    )
    apply.add_argument("--overwrite", action="store_true", help="replace OUT when it exists")
    apply.set_defaults(run=_apply)
    add_distill(commands)
    add_evaluate(commands)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of tables")


def _inspect(options: argparse.Namespace) -> None:
    artifact = DeltaArtifact.open(options.delta)
    summary, rows = tables.artifact_summary(artifact), artifact.tensor_report()
    if options.json:
        listed = {"tensors": [tables.row_json(row) for row in rows]} if options.tensors else {}
        print(json.dumps(summary | listed, indent=2, ensure_ascii=False))
        return
    console = Console()
    console.print(tables.summary_view(summary))
    if options.tensors:
        console.print(tables.rows_view(rows, "All tensors"))
    elif worst := tables.worst_rows(rows, _WORST_SHOWN):
        console.print(tables.rows_view(worst, "Largest relative errors (--tensors lists all)"))


def _verify(options: argparse.Namespace) -> None:
    report = verify_artifact(
        options.delta,
        base=FolderSource(options.base) if options.base else None,
        tuned=FolderSource(options.tuned) if options.tuned else None,
    )
    if options.json:
        print(json.dumps(asdict(report) | {"folder": str(report.folder), "verified": True}, indent=2))
        return
    print(f"{report.folder} is intact: {report.tensors} tensors, {report.bytes_checked:,} bytes")
    print(f"content hash: {report.content_hash}")
    print(f"base: {'every byte matches' if report.base_checked else 'not checked, give --base DIR'}")
    if report.relative_error is not None:
        print(f"recorded errors: confirmed; relative error of the whole delta {report.relative_error:.4f}")
    else:
        print("recorded errors: not checked, give --base DIR and --tuned DIR")


def _apply(options: argparse.Namespace) -> None:
    report = apply_delta(
        DeltaArtifact.open(options.delta),
        options.base,
        options.out,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        overwrite=options.overwrite,
    )
    print(f"{report.folder}: {report.tensors} tensors as {report.dtype}, {report.bytes_total:,} bytes")
    if report.rounding_loss > _ROUNDING_NOTE:
        how = (
            "each matrix is dithered, so that products keep the delta on average"
            if report.dtype == "bfloat16"
            else "small changes vanish beside large weights"
        )
        print(
            f"note: single weights in {report.dtype} are off by {report.rounding_loss:.0%} of the delta's size; "
            f"{how}; --dtype float32 keeps it exactly",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
