"""What a caller process is asked for, and what it says then. Plain data: it travels between processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """``calls`` calls, ``in_flight`` at once, in turn of one of ``sessions`` sessions (0: each of its own), with
    prompts of ``prompt`` tokens."""

    calls: int
    in_flight: int
    sessions: int
    prompt: int


@dataclass(frozen=True)
class Pile:
    """So many calls more that nobody takes: they stay in the broker."""

    calls: int
    prompt: int


@dataclass(frozen=True)
class Done:
    """Seconds from the first call to the last answer, or until all lie in the broker; answers that were not what was
    asked for."""

    seconds: float
    wrong: int = 0
