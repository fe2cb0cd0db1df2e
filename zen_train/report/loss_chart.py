"""Geometry of the loss chart of report.html, in percent of the plot: the browser does the scaling.

Contract: `loss_chart` is a pure function from curve points to plain values. Does not know HTML or colours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zen_train.report import units
from zen_train.report.results import Curves, MergePoint
from zen_train.report.series import Point, smoothed, smoothing_window, thinned, tick_text, ticks, value_range

MOST_POINTS = 700
"""Train points drawn: more cannot be told apart on a screen, and only add bytes."""

HoverRow = tuple[int, float, float, str | None, str | None, str | None, str | None]
"""Step, percent from the left, percent from the top, then texts: train, smoothed, validation, merge."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled place on an axis, in percent from the left or from the top."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Marker:
    """A validation point, or a merge (`y` is then not used), in percent from the left and the top."""

    x: float
    y: float = 0.0
    accepted: bool = True


@dataclass(frozen=True, kw_only=True)
class LossChart:
    """What the template draws. Paths are SVG path data in a box of 100 by 100."""

    raw_path: str
    smooth_path: str
    validation_path: str
    validation: tuple[Marker, ...]
    merges: tuple[Marker, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    hover: tuple[HoverRow, ...]
    summary: str
    """The chart in a sentence, for a screen reader."""


@dataclass(frozen=True, kw_only=True)
class _Axes:
    first: float
    last: float
    low: float
    high: float

    def across(self, step: float) -> float:
        return round(100.0 * (step - self.first) / ((self.last - self.first) or 1.0), 2)

    def down(self, loss: float) -> float:
        """Losses outside the range sit on its edge: one spike must not flatten the curve."""
        inside = min(max(loss, self.low), self.high)
        return round(100.0 * (self.high - inside) / (self.high - self.low), 2)

    def path(self, points: Sequence[Point]) -> str:
        return "".join(
            f"{'L' if index else 'M'}{self.across(x):g} {self.down(y):g}"
            for index, (x, y) in enumerate(points)
        )


def loss_chart(curves: Curves) -> LossChart | None:
    """The chart of a run; None when no finite loss was recorded."""
    train = [(float(point.step), point.loss) for point in curves.train if point.loss is not None]
    checks = [(float(point.step), point.loss) for point in curves.validation if point.loss is not None]
    if not train and not checks:
        return None
    averages = smoothed([loss for _, loss in train], window=smoothing_window(len(train)))
    smooth = [(step, average) for (step, _), average in zip(train, averages, strict=True)]
    low, high = value_range([loss for _, loss in smooth + checks], [loss for _, loss in train])
    steps = [step for step, _ in train + checks] + [float(merge.step) for merge in curves.merges]
    axes = _Axes(first=min(0.0, *steps), last=max(steps), low=low, high=high)
    y_values = ticks(low, high, most=6)
    spacing = y_values[1] - y_values[0] if len(y_values) > 1 else 0.1
    return LossChart(
        raw_path=axes.path(thinned(train, most=MOST_POINTS)),
        smooth_path=axes.path(thinned(smooth, most=MOST_POINTS)),
        validation_path=axes.path(checks),
        validation=tuple(Marker(x=axes.across(step), y=axes.down(loss)) for step, loss in checks),
        merges=tuple(Marker(x=axes.across(merge.step), accepted=merge.accepted) for merge in curves.merges),
        x_ticks=tuple(
            Tick(at=axes.across(step), text=f"{step:,.0f}")
            for step in ticks(axes.first, axes.last, most=7)
            if step == round(step)
        ),
        y_ticks=tuple(Tick(at=axes.down(value), text=tick_text(value, spacing)) for value in y_values),
        hover=_hover(axes, dict(train), dict(smooth), dict(checks), {m.step: m for m in curves.merges}),
        summary=_summary(smooth, checks, curves.merges),
    )


def _hover(
    axes: _Axes,
    train: dict[float, float],
    smooth: dict[float, float],
    checks: dict[float, float],
    merges: dict[int, MergePoint],
) -> tuple[HoverRow, ...]:
    steps = {step for step, _ in thinned(list(train.items()), most=MOST_POINTS)} | checks.keys() | set(merges)
    rows: list[HoverRow] = []
    for step in sorted(steps):
        height = next((axes.down(series[step]) for series in (smooth, checks) if step in series), 0.0)
        texts = _text(train, step), _text(smooth, step), _text(checks, step)
        merge = merges.get(int(step))
        verdict = None if merge is None else "accepted" if merge.accepted else "rolled back"
        rows.append((int(step), axes.across(step), height, *texts, verdict))
    return tuple(rows)


def _text(series: dict[float, float], step: float) -> str | None:
    return units.loss_text(series[step]) if step in series else None


def _summary(smooth: Sequence[Point], checks: Sequence[Point], merges: Sequence[MergePoint]) -> str:
    parts = []
    for name, points in (("Smoothed training loss", smooth), ("Validation loss", checks)):
        if points:
            (first, before), (last, after) = points[0], points[-1]
            parts.append(f"{name} from {before:.3f} at step {first:.0f} to {after:.3f} at step {last:.0f}.")
    if merges:
        accepted = sum(merge.accepted for merge in merges)
        parts.append(f"{len(merges)} merges, {accepted} accepted.")
    return " ".join(parts)
