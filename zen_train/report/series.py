"""Curve arithmetic shared by the page and the picture: smoothing, thinning, ranges and ticks. No drawing."""

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]


def smoothed(values: Sequence[float], *, window: int) -> list[float]:
    """Exponential moving average with start-up correction; it looks back about `window` values."""
    keep = 1.0 - 2.0 / (window + 1.0)
    total = weight = 0.0
    result = []
    for value in values:
        total = keep * total + (1.0 - keep) * value
        weight = keep * weight + (1.0 - keep)
        result.append(total / weight)
    return result


def smoothing_window(count: int) -> int:
    """A look-back that suits a curve of `count` points: a twentieth of it, 1 to 100."""
    return max(1, min(100, count // 20 + 2))


def thinned(points: Sequence[Point], *, most: int) -> list[Point]:
    """At most `most` points that look the same: lowest and highest of each stretch, in order."""
    if len(points) <= most:
        return list(points)
    edges = [round(index * len(points) / (most // 2)) for index in range(most // 2 + 1)]
    kept: list[Point] = []
    for start, end in pairwise(edges):
        stretch = points[start:end]
        low, high = min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])
        kept.extend(sorted({low, high}))
    return kept


def value_range(must: Sequence[float], noisy: Sequence[float]) -> tuple[float, float]:
    """A range that holds all of `must` and the middle 98 % of `noisy`, with a margin; (0, 1) for nothing."""
    inner = sorted(noisy)
    cut = len(inner) // 100
    inner = inner[cut : len(inner) - cut]
    values = [*must, *inner]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) inside the range, at most `most` of them."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (1 * power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return [index * step for index in range(first, last + 1)]
    return [low, high]


def tick_text(value: float, step: float) -> str:
    """A tick label with as many decimals as its spacing needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{decimals}f}"
