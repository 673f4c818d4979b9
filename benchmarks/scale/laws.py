"""How figures grow, and what a broker's limit means in GPUs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]


def slope(points: Points) -> float:
    """By least squares: how much y grows with each x. NaN unless there are two different x."""
    if len({x for x, _ in points}) < 2:
        return math.nan
    middle_x, middle_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return float(sum((x - middle_x) * (y - middle_y) for x, y in points) / spread)


def exponent(points: Points) -> float:
    """The k of y ~ x^k: 0 does not grow, 1 grows linearly, more is trouble. Points that are not positive are left
    out."""
    return slope([(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0])


@dataclass(frozen=True)
class Traffic:
    """What one GPU asks of the broker: it samples ``tokens_per_s``, in answers of ``tokens_per_call``; a trajectory
    makes ``turns`` such calls, and is itself a call to its worker."""

    tokens_per_s: float
    tokens_per_call: float
    turns: float = 4.0

    @property
    def calls_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens_per_s / self.tokens_per_call * (self.turns + 1) / self.turns

    def gpus(self, limit: float) -> float:
        """How many of them a broker serves that takes ``limit`` calls per second."""
        return limit / self.calls_per_s
