"""`python -m zen_train.delta evaluate`: a variant on the tasks of lm-eval. Its options, and the table it prints.

The work is `zen_train.harness`'s, imported when the command runs: it needs transformers and lm-eval, which the
other commands and this package do without.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from zen_train.delta.options import add_folder
from zen_train.errors import OutputError


def add_evaluate(commands: Any) -> None:
    """Add the command to the subparsers of `python -m zen_train.delta`. Each option also takes lm-eval's spelling."""
    evaluate = commands.add_parser(
        "evaluate",
        help="score base + delta on lm-eval's tasks",
        description="Put base and delta together in memory and score the model with lm-eval, which is an optional "
        "dependency: pip install 'zen-train[eval]'.",
    )
    add_folder(evaluate)
    evaluate.add_argument(
        "--base", required=True, metavar="DIR", help="folder of the base model (safetensors)"
    )
    evaluate.add_argument(
        "--tasks", "-t", required=True, type=_names, metavar="TASK[,TASK]", help="names or patterns of tasks"
    )
    evaluate.add_argument(
        "--include-path", "--include_path", metavar="DIR", help="folder with tasks of your own (YAML)"
    )
    evaluate.add_argument(
        "--limit", "-L", type=_limit, metavar="N", help="examples of each task; below 1: this share of them"
    )
    evaluate.add_argument(
        "--num-fewshot", "--num_fewshot", "-f", type=_count, metavar="N", help="worked examples in the prompt"
    )
    evaluate.add_argument(
        "--batch-size", "--batch_size", "-b", type=_count, default=1, metavar="N", help="(default: 1)"
    )
    evaluate.add_argument(
        "--apply-chat-template",
        "--apply_chat_template",
        action="store_true",
        help="ask in the variant's chat format",
    )
    evaluate.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N (default: cpu)")
    evaluate.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the weights; float32 keeps the delta exactly (default)",
    )
    evaluate.add_argument("--with-base", action="store_true", help="score the base too, on the same examples")
    evaluate.add_argument(
        "--out", "--output_path", "-o", type=Path, metavar="FILE", help="write lm-eval's results here as JSON"
    )
    evaluate.set_defaults(run=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    from zen_train.harness import Settings, evaluate

    if options.out and not options.out.parent.is_dir():
        raise OutputError(
            f"--out={options.out}: the folder {options.out.parent} does not exist; make it first"
        )
    results = evaluate(
        options.delta,
        options.base,
        Settings(
            tasks=options.tasks,
            include_path=options.include_path,
            limit=options.limit,
            num_fewshot=options.num_fewshot,
            batch_size=options.batch_size,
            apply_chat_template=options.apply_chat_template,
            device=options.device,
            dtype=options.dtype,
        ),
        with_base=options.with_base,
    )
    if options.out:
        options.out.write_text(json.dumps(results, indent=2, ensure_ascii=False, default=str) + "\n")
    Console(file=sys.stdout).print(_table(results))


def _table(results: dict[str, Any]) -> Table:
    """Scores side by side: lm-eval names a figure `METRIC,FILTER` and its error `METRIC_stderr,FILTER`."""
    base = results["zen_delta"]["base_results"]
    table = Table("task", "metric", *(["base"] if base else []), "delta", "standard error")
    for task, scores in results["results"].items():
        for key, value in scores.items():
            metric, _, how = key.partition(",")
            if not isinstance(value, int | float) or not how or metric.endswith("_stderr"):
                continue
            error = scores.get(f"{metric}_stderr,{how}")
            shown = [f"{base[task][key]:.4f}"] if base else []
            shown += [f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else ""]
            table.add_row(task, metric if how == "none" else key, *shown)
    return table


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not possible; a whole number from 0 on is needed")
    return int(text)


def _limit(text: str) -> float:
    value = float(text)
    if not value > 0 or (value > 1 and value != int(value)):
        raise argparse.ArgumentTypeError(
            f"{text} is not possible; a number of examples, or a share between 0 and 1"
        )
    return int(value) if value >= 1 else value
