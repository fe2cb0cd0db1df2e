"""Curve arithmetic: smoothing, thinning, ranges, ticks."""

import math
import random

import pytest

from zen_train.report.series import smoothed, thinned, tick_text, ticks, value_range


def test_a_constant_curve_stays_constant_when_smoothed():
    assert smoothed([2.5] * 40, window=10) == pytest.approx([2.5] * 40)


def test_smoothing_equals_the_weighted_mean_of_its_definition():
    draw = random.Random(0)
    values = [draw.gauss(0, 1) for _ in range(30)]
    window = 7
    keep = 1 - 2 / (window + 1)
    for last, found in enumerate(smoothed(values, window=window)):
        weights = [keep ** (last - index) for index in range(last + 1)]
        expected = sum(w * v for w, v in zip(weights, values[: last + 1], strict=True)) / sum(weights)
        assert found == pytest.approx(expected)


def test_thinning_keeps_every_spike_and_the_order():
    draw = random.Random(1)
    points = [(float(step), draw.gauss(0, 1)) for step in range(10_000)]
    points[4321] = (4321.0, 50.0)
    points[777] = (777.0, -50.0)
    kept = thinned(points, most=500)
    assert len(kept) <= 500
    assert (4321.0, 50.0) in kept
    assert (777.0, -50.0) in kept
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})


def test_a_short_curve_is_not_thinned():
    points = [(0.0, 1.0), (1.0, 2.0)]
    assert thinned(points, most=500) == points


def test_one_spike_does_not_flatten_the_range_but_validation_is_always_inside():
    noisy = [2.0 + 0.001 * index for index in range(500)] + [900.0]
    low, high = value_range([1.5, 2.9], noisy)
    assert low < 1.5
    assert 2.9 < high < 10


def test_equal_values_still_span_a_range():
    low, high = value_range([3.0], [3.0, 3.0])
    assert low < 3.0 < high
    assert value_range([], []) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 60.0), (1.523, 2.241), (-3e-5, 4e-5), (0.0, 1e6), (5.0, 5.0)]
)
def test_ticks_are_round_inside_and_few(low, high):
    found = ticks(low, high, most=6)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-9 * abs(high) <= value <= high + 1e-9 * abs(high) for value in found)
    if len(found) > 2:
        step = found[1] - found[0]
        assert round(step / 10 ** math.floor(math.log10(step) + 1e-9)) in (1, 2, 5)


def test_tick_labels_have_the_decimals_that_the_spacing_needs():
    assert tick_text(1.6, 0.2) == "1.6"
    assert tick_text(20.0, 10.0) == "20"
    assert tick_text(0.002, 0.0005) == "0.0020"
