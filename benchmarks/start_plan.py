"""What both sides of `start` do, and what they report."""

from __future__ import annotations

from dataclasses import dataclass

ENGINES, WORKERS = 2, 4
#: Enough that each worker has had some before memory is looked at.
ROWS = 16
PROMPT = list(range(3, 67))


@dataclass(frozen=True)
class Started:
    """``times`` in s by name, ``memory`` in MB (10^6 bytes) by name."""

    times: dict[str, float]
    memory: dict[str, float]


def megabytes(size: float) -> float:
    """Of bytes."""
    return size / 1e6
