"""The picture of scripts/bench_fidelity.py: `python scripts/fidelity_picture.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from readme_fidelity import CODES, OF_OTHERS, kept_over_time, values, with_all_codes
from readme_tables import RESULTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUR_COLOUR, AWARE_COLOUR, OTHERS_COLOUR = "#1f6f54", "#3a5fa0", "#b5482f"
LABEL_SHIFT = {"pushed": 6, "spread_1": -6, "delta_come": 6, "delta_come_gptq": -5, "directions": -5}
"""Points up or down, of codes that lie upon each other."""


def picture(path: Path) -> None:
    """Bits against divergence, a dot for each variant and a ring for their geometric mean; share kept over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (codes, times) = pyplot.subplots(
        1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=(3, 2)
    )
    _draw_codes(codes)
    _draw_times(times)
    for axes in (codes, times):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_codes(axes: Axes) -> None:
    names = with_all_codes()
    for method in CODES:
        lost, bits = values(method, "KL", names), values(method, "bits", names)
        if not lost:
            continue
        colour = OTHERS_COLOUR if method in OF_OTHERS else OUR_COLOUR
        axes.plot(bits, lost, "o", color=colour, alpha=0.35, markersize=4, markeredgewidth=0)
        centre = (fmean(bits), geometric_mean(lost))
        axes.plot(*centre, "o", color="none", markeredgecolor=colour, markersize=9, markeredgewidth=1.6)
        shift = (9, LABEL_SHIFT.get(method, 0))
        axes.annotate(
            method, centre, xytext=shift, textcoords="offset points", va="center", color=colour, fontsize=9
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits a weight")
    axes.set_ylabel("KL from the fine-tune, nats a token")
    axes.set_title(f"What a code loses: {', '.join(names)} (green: ours)", loc="left", fontsize=10)
    axes.set_xlim(0, 2.6)


def _draw_times(axes: Axes) -> None:
    for code, colour, shift in (("directions", OUR_COLOUR, -12), ("aware", AWARE_COLOUR, 0)):
        for name, shares in kept_over_time(code).items():
            mean = name == "mean"
            style: dict[str, Any] = {"linewidth": 2.2} if mean else {"linewidth": 0.8, "alpha": 0.45}
            axes.plot(
                *zip(*shares.items(), strict=True), "o-", color=colour, markersize=4 if mean else 2, **style
            )
            if mean:
                axes.annotate(
                    code,
                    max(shares.items()),
                    xytext=(6, shift),
                    textcoords="offset points",
                    va="center",
                    color=colour,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
                )
    axes.axhline(100, color="#888", linewidth=0.8, linestyle=":")
    axes.set_xlabel("steps over those of the full fine-tune")
    axes.set_ylabel("% of its gain")
    axes.set_title("What more training adds (thick: mean)", loc="left", fontsize=10)
    axes.margins(x=0.18)


if __name__ == "__main__":
    picture(RESULTS / "fidelity.png")
