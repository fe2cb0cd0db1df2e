"""report.html: one file that opens from disk, offline, in light and dark.

Contract: no request leaves the page (its Content-Security-Policy forbids it); no text from outside is read
as HTML or script: the template escapes everything, and the one script runs by its hash. Does not compute
figures: they come from `RunResults` and the geometry modules.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from zen_train.report import units
from zen_train.report.commands import next_commands
from zen_train.report.files import write_whole
from zen_train.report.layers import GAUSSIAN_RELATIVE_ERROR, ErrorGrid, error_grid
from zen_train.report.loss_chart import loss_chart
from zen_train.report.results import RunResults

MOST_TENSOR_ROWS = 800
"""Rows of the per-tensor table; the largest errors come first and all rows are in metrics.json."""

MOST_TEXT_LETTERS = 8000
"""Longest prompt or generation shown."""


def write_html(results: RunResults, path: str | Path) -> None:
    """Write the report atomically. Raises OutputError when the path cannot be written."""
    write_whole(Path(path), render_html(results).encode())


def render_html(results: RunResults) -> str:
    """The whole page as text."""
    environment = Environment(
        loader=PackageLoader("zen_train.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        loss=units.loss_text,
        perplexity=units.perplexity_text,
        bytes=units.bytes_text,
        seconds=units.seconds_text,
        count=units.count_text,
        share=units.share_text,
        ratio=units.ratio_text,
        bits=units.bits_text,
        significant=lambda value: units.DASH if value is None else f"{value:.3g}",
        shortened=_shortened,
    )
    script = _source(environment, "report.js.jinja")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    grid = error_grid(results.tensors)
    return environment.get_template(
        "report.html.jinja"
    ).render(
        r=results,
        style=Markup(_source(environment, "report.css.jinja")),  # ours, not from outside
        script=Markup(script),
        script_digest=digest,
        warnings=results.all_warnings(),
        commands=next_commands(results),
        chart=loss_chart(results.curves),
        grid=grid if grid.values() else None,
        heat=_heat(grid),
        gaussian=GAUSSIAN_RELATIVE_ERROR,
        settings=list(flat_settings(results.config)),
        tensors=sorted(results.tensors, key=lambda row: -(row.relative_error or 0.0))[:MOST_TENSOR_ROWS],
    )


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The configuration as `optim.learning_rate`, `0.0002`: as it can be typed as an override."""
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            rows.extend(flat_settings(value, f"{prefix}{key}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            rows.append((f"{prefix}{key}", text))
    return rows


def _heat(grid: ErrorGrid) -> tuple[float, float]:
    """Lowest and highest error of the colour scale; never an empty range."""
    values = grid.values() or [0.0]
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + 1.0)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT_LETTERS else text[:MOST_TEXT_LETTERS] + " …"


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]
