"""The latency picture of scripts/bench_serve.py: time to first token of each model, P50 and P99."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker
from serve_client import Answer


def latency_picture(answers: list[Answer], path: Path, *, title: str) -> None:
    """One row a model, most asked first: every first token as a dot, the median and the 99th percentile marked."""
    by_model: dict[str, list[float]] = {}
    for answer in answers:
        if answer.chunks:
            by_model.setdefault(answer.model, []).append(answer.first_s * 1e3)
    models = sorted(by_model, key=lambda model: len(by_model[model]))
    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(models) + 1.4), layout="constrained")
    for row, model in enumerate(models):
        values = sorted(by_model[model])
        axes.plot(
            values, [row] * len(values), "o", color="#4878a8", alpha=0.35, markersize=4, markeredgewidth=0
        )
        axes.plot(values[len(values) // 2], row, "|", color="#1d3a5c", markersize=14, markeredgewidth=2)
        axes.plot(values[min(len(values) - 1, int(0.99 * len(values)))], row, "|", color="#b5482f", markersize=14,
                  markeredgewidth=2)  # fmt: skip
    axes.set_yticks(range(len(models)), [f"{model} ({len(by_model[model])})" for model in models])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.set_xlabel("time to first token, ms (dark: P50, red: P99)")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
