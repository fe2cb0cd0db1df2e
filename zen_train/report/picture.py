"""The run as one PNG: loss curve with merges, and relative error by layer. For a README and for W&B.

Contract: draws with matplotlib's Agg canvas, without pyplot: no global state and no display is touched.
Light background only. Text from outside is drawn as plain text, never as mathtext.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from zen_train.report import units
from zen_train.report.files import write_whole
from zen_train.report.layers import GAUSSIAN_RELATIVE_ERROR, error_grid
from zen_train.report.results import Curves, RunResults, TensorRow
from zen_train.report.series import smoothed, smoothing_window, value_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, DIM, RULE = "#17191c", "#5d646e", "#e3e5e8"
TRAIN, CHECK, GOOD, BAD = "#2563c9", "#c2570c", "#157347", "#b42318"
HEAT = ("#e8f0fb", "#12376e")


def write_picture(results: RunResults, path: str | Path) -> None:
    """Write the PNG atomically, 1500 by 600 pixels. Raises OutputError when the path cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    figure = Figure(figsize=(12, 4.8), dpi=125, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_loss(left, results.curves)
    _draw_errors(figure, right, results.tensors)
    figure.suptitle(
        f"{results.variant} on {results.base.name}: {_verdict(results)}",
        x=0.01,
        ha="left",
        color=INK,
        fontsize=13,
        parse_math=False,
    )
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_whole(Path(path), image.getvalue())


def _verdict(results: RunResults) -> str:
    share, size = results.losses.share_kept, units.bytes_text(results.size.stored_bytes)
    kept = "no gain to keep" if share is None else f"{units.share_text(share)} of the gain kept"
    return f"{kept}, {size}"


def _draw_loss(axes: "Axes", curves: Curves) -> None:
    train = [(point.step, point.loss) for point in curves.train if point.loss is not None]
    checks = [(point.step, point.loss) for point in curves.validation if point.loss is not None]
    losses = [loss for _, loss in train]
    average = smoothed(losses, window=smoothing_window(len(losses)))
    for merge in curves.merges:
        colour, style = (GOOD, "-") if merge.accepted else (BAD, "--")
        label = "merge accepted" if merge.accepted else "merge rolled back"
        axes.axvline(merge.step, color=colour, linestyle=style, linewidth=1.1, alpha=0.8, label=label)
    if train:
        steps = [step for step, _ in train]
        axes.plot(steps, losses, color=TRAIN, linewidth=0.8, alpha=0.35)
        axes.plot(steps, average, color=TRAIN, linewidth=2, label="training, smoothed")
    if checks:
        axes.plot(
            *zip(*checks, strict=True), "o:", color=CHECK, markersize=5.5, linewidth=1.4, label="validation"
        )
    axes.set_ylim(*value_range([*average, *(loss for _, loss in checks)], losses))
    axes.set_title("Loss per token", loc="left", fontsize=11, color=INK)
    axes.set_xlabel("optimizer steps", color=DIM)
    axes.grid(axis="y", color=RULE)
    _plain(axes)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if unique:
        axes.legend(
            unique.values(),
            unique.keys(),
            frameon=True,
            edgecolor="none",
            framealpha=0.85,
            fontsize=9,
            labelcolor=DIM,
        )


def _draw_errors(figure: "Figure", axes: "Axes", tensors: tuple[TensorRow, ...]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    grid = error_grid(tensors)
    axes.set_title(
        f"Relative error of the code (one bit of a Gaussian: {GAUSSIAN_RELATIVE_ERROR})",
        loc="left",
        fontsize=11,
        color=INK,
    )
    _plain(axes)
    if not grid.values():
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing was approximated", ha="center", color=DIM, transform=axes.transAxes)
        return
    cells = [[float("nan") if value is None else value for value in row] for row in grid.cells]
    colours = LinearSegmentedColormap.from_list("zen", HEAT)
    image = axes.imshow(cells, cmap=colours, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(grid.modules)), grid.modules, family="monospace", fontsize=9, parse_math=False)
    places = range(0, len(grid.layers), 1 if len(grid.layers) <= 12 else 5 if len(grid.layers) <= 40 else 10)
    axes.set_xticks(list(places), [str(grid.layers[place]) for place in places])
    axes.set_xlabel("layer", color=DIM)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=DIM, labelsize=9, length=0)


def _plain(axes: "Axes") -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(colors=DIM, labelsize=9, length=0)
