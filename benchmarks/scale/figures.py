"""What the figures of `scale` are called, and how they are found again. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scale.laws import Points
from benchmarks.suite import Figure

NAME = "scale"
#: What the processes of a cluster are summed by.
GROUPS = ("trainer", "broker", "workers", "engines", "launcher")
#: What varies; a case is one of these and a number.
ENGINES, IN_FLIGHT, SESSIONS = "broker, engines", "broker, calls in flight", "broker, sessions"
#: Calls without a prompt, and with one.
WAITING = "waiting calls, empty", "waiting calls, 1024 tokens"
AT_REST, TRAJECTORIES = "at rest, engines", "trajectories"


@dataclass(frozen=True)
class Reference:
    """What does not vary on an axis of the broker's; every call is of a session of its own there."""

    engines: int = 64
    in_flight: int = 1024


REFERENCE = Reference()


def case(what: str, number: int) -> str:
    return f"{what}: {number}"


def samples(figures: Sequence[Figure], what: str, name: str) -> dict[int, list[float]]:
    """number -> values of all repeats, by number."""
    found: dict[int, list[float]] = defaultdict(list)
    for figure in figures:
        kind, _, number = figure.case.rpartition(": ")
        if kind == what and figure.name == name:
            found[int(number)].append(figure.value)
    return dict(sorted(found.items()))


def points(figures: Sequence[Figure], what: str, name: str) -> Points:
    """(number, median) pairs, by number."""
    return [(number, statistics.median(values)) for number, values in samples(figures, what, name).items()]


def limit(figures: Sequence[Figure]) -> float:
    """Calls per second at which the broker saturates, at `REFERENCE` load. NaN where that was not measured."""
    found = samples(figures, IN_FLIGHT, "limit").get(REFERENCE.in_flight)
    return statistics.median(found) if found else float("nan")
