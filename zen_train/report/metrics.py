"""`metrics.json`: the results of a run as valid JSON, with the derived headline figures beside them.

Contract: `read_metrics(path)` gives back an object equal to the one that was written. Figures that are
missing or not finite are null. Does not render anything.
"""

import json
from pathlib import Path
from typing import Any

from zen_train.errors import OutputError
from zen_train.report.files import write_whole
from zen_train.report.results import RunResults, without_non_finite

FORMAT_VERSION = 1


def headline(results: RunResults) -> dict[str, Any]:
    """The derived figures that people compare between runs, flat, None where there is none."""
    losses, size = results.losses, results.size
    return {
        "variant": results.variant,
        "base": results.base.name,
        "loss_base": losses.base,
        "loss_fine_tune": losses.fine_tune,
        "loss_delta": losses.delta,
        "perplexity_base": losses.perplexity("base"),
        "perplexity_fine_tune": losses.perplexity("fine_tune"),
        "perplexity_delta": losses.perplexity("delta"),
        "share_kept": losses.share_kept,
        "share_kept_reason": losses.share_kept_reason,
        "delta_bytes": size.stored_bytes,
        "bf16_model_bytes": size.bf16_model_bytes,
        "size_ratio": size.ratio,
        "bits_per_compressed_weight": size.bits_per_compressed_weight,
        "zeros_share": results.zeros_share(),
        "seconds_total": results.seconds.total,
    }


def write_metrics(results: RunResults, path: str | Path) -> None:
    """Write `metrics.json` atomically. Raises OutputError when the path cannot be written."""
    document = {
        "format": "zen_train.metrics",
        "format_version": FORMAT_VERSION,
        "headline": headline(results),
        "results": results.to_dict(),
    }
    text = json.dumps(without_non_finite(document), indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(Path(path), (text + "\n").encode())


def read_metrics(path: str | Path) -> RunResults:
    """Read `write_metrics` back. Raises OutputError for a file that is missing, not ours, or newer."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(
            f"cannot read metrics from {path}: {error}. Expected a metrics.json that a run wrote"
        ) from error
    if not isinstance(document, dict) or document.get("format") != "zen_train.metrics":
        raise OutputError(
            f"{path} is not a metrics.json of zen_train: its key 'format' is not 'zen_train.metrics'"
        )
    if document.get("format_version") != FORMAT_VERSION:
        raise OutputError(
            f"{path} has format_version {document.get('format_version')!r}, this version "
            f"reads {FORMAT_VERSION}. Use the zen_train version that wrote it"
        )
    return RunResults.from_dict(document.get("results", {}))
