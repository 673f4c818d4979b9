"""How growth is judged, and what GPUs ask of a broker."""

from __future__ import annotations

import math

import pytest

from benchmarks.scale.laws import Traffic, exponent, slope


def test_the_slope_of_a_line_is_its_own() -> None:
    """Whatever its height; points beside it pull it both ways."""
    assert slope([(x, 3 * x + 7) for x in range(5)]) == pytest.approx(3)
    assert slope([(0, 1), (0, -1), (10, 21), (10, 19)]) == pytest.approx(2)


def test_a_single_point_has_no_slope() -> None:
    """Nor have several with one x, nor none."""
    assert math.isnan(slope([(1, 1)]))
    assert math.isnan(slope([(1, 1), (1, 2)]))
    assert math.isnan(slope([]))


@pytest.mark.parametrize("power", [0, 1, 1.5, 2])
def test_the_exponent_tells_linear_from_worse(power: float) -> None:
    """Of y = 5 x^k; what is not positive has no logarithm and is left out."""
    points = [(x, 5 * x**power) for x in (1, 10, 100)]
    assert exponent([(0, 0), *points]) == pytest.approx(power)


def test_a_gpu_asks_for_its_answers_and_its_trajectories() -> None:
    """3000 tokens/s in answers of 300: ten calls, and for every four of them the trajectory itself."""
    traffic = Traffic(3000, 300, turns=4)
    assert traffic.calls_per_s == pytest.approx(12.5)
    assert traffic.gpus(10_000) == pytest.approx(800)
