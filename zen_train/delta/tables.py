"""Tables and JSON for the command line. Formatting only: the figures come from `DeltaArtifact` and
`VerifyReport`.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zen_train.delta.artifact import DeltaArtifact
from zen_train.delta.manifest import KINDS
from zen_train.delta.report import TensorRow, is_weight_file


def artifact_summary(artifact: DeltaArtifact) -> dict[str, Any]:
    """What `inspect --json` prints: identity, base, sizes in bytes, ratios."""
    config, rows = artifact.config, artifact.tensor_report()
    numel = sum(prod(entry.shape) for entry in config.tensors.values() if entry.target is None)
    sizes = {path.name: path.stat().st_size for path in artifact.folder.iterdir() if path.is_file()}
    weight_bytes = sum(size for name, size in sizes.items() if is_weight_file(name))
    base = config.base
    return {
        "folder": str(artifact.folder),
        "format_version": config.format_version,
        "variant": config.variant,
        "step": config.step,
        "content_hash": artifact.content_hash,
        "created_by": dict(config.created_by),
        "base": {
            "name": base.name,
            "revision": base.revision,
            "fingerprint": base.fingerprint.root,
            "dtype": base.dtype,
            "architecture": base.architecture,
            "licence": base.licence,
        },
        "parameters": numel,
        "vocab_size": config.vocab_size,
        "tied": config.tied,
        "bytes_total": sum(sizes.values()),
        "bytes_weights": weight_bytes,
        "ratio_bf16": round(2 * numel / weight_bytes, 2),
        "ratio_fp32": round(4 * numel / weight_bytes, 2),
        "kinds": {kind: _kind_summary(row for row in rows if row.kind == kind) for kind in KINDS},
        "files": sorted(config.files),
        "provenance": dict(config.provenance),
    }


def row_json(row: TensorRow) -> dict[str, Any]:
    """One tensor for `--json --tensors`."""
    return {
        "name": row.name,
        "kind": row.kind,
        "shape": list(row.shape),
        "bytes": row.size_bytes,
        "zeros": row.zeros,
        "relative_error": row.relative_error,
    }


def summary_view(summary: dict[str, Any]) -> RenderableType:
    """The head of `inspect`: identity, then one line for each kind."""
    base = summary["base"]
    head = Table.grid(padding=(0, 2))
    revision = f" at {base['revision']}" if base["revision"] else ""
    size = f"{_size(summary['bytes_weights'])}, {summary['ratio_bf16']} x smaller than bf16"
    lines = {
        "variant": f"{summary['variant']}, step {summary['step']}",
        "base": f"{base['name']}{revision} ({base['architecture'] or 'not named'}, {base['dtype']})",
        "fingerprint": base["fingerprint"],
        "licence of base": base["licence"] or "not recorded",
        "content hash": summary["content_hash"],
        "weights": f"{size}, {summary['ratio_fp32']} x smaller than fp32",
        "whole folder": _size(summary["bytes_total"]),
        "parameters": f"{summary['parameters']:,}, all of them accounted for",
        "files": ", ".join(summary["files"]) or "none",
    }
    for key, value in lines.items():
        head.add_row(Text(key, style="dim"), Text(value, overflow="fold"))
    kinds = Table("kind", title="How parameters are held", title_justify="left")
    for column in ("tensors", "parameters", "stored", "mean error", "zeros"):
        kinds.add_column(column, justify="right")
    for kind, item in summary["kinds"].items():
        if item["tensors"]:
            kinds.add_row(
                kind,
                str(item["tensors"]),
                f"{item['parameters']:,}",
                _size(item["bytes"]),
                _figure(item["mean_relative_error"]),
                _share(item["mean_zeros"]),
            )
    return Group(head, Text(""), kinds)


def rows_view(rows: Iterable[TensorRow], title: str) -> RenderableType:
    """One line for each tensor."""
    table = Table(title=title, title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("kind")
    for column in ("shape", "stored", "error", "zeros"):
        table.add_column(column, justify="right")
    for row in rows:
        shape = "x".join(map(str, row.shape))
        figures = (_size(row.size_bytes), _figure(row.relative_error), _share(row.zeros))
        table.add_row(row.name, row.kind, shape, *figures)
    return table


def worst_rows(rows: Iterable[TensorRow], count: int) -> list[TensorRow]:
    """The `count` tensors with the largest relative error."""
    coded = [row for row in rows if row.relative_error is not None]
    return sorted(coded, key=lambda row: row.relative_error or 0.0, reverse=True)[:count]


def _kind_summary(rows: Iterable[TensorRow]) -> dict[str, Any]:
    rows = list(rows)
    return {
        "tensors": len(rows),
        "parameters": sum(prod(row.shape) for row in rows),
        "bytes": sum(row.size_bytes for row in rows),
        "mean_relative_error": _mean(row.relative_error for row in rows),
        "mean_zeros": _mean(row.zeros for row in rows),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _size(size_bytes: int) -> str:
    value = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
