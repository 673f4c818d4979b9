"""What is done to whom, and when: decided by the seed alone. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any, Literal, TypeAlias

Room: TypeAlias = Literal["engine", "worker", "broker"]
ROOMS: tuple[Room, ...] = ("engine", "worker", "broker")
#: What is done unless `--kinds` says otherwise: kills by room, stops of any of them, slow engines.
KINDS = (*ROOMS, "stop", "slow")
#: What it may name: `term` ends any of them in order, by SIGTERM.
ALL_KINDS = (*KINDS, "term")
#: Seconds that a process is stopped: from a hiccup to beyond the 3 s after which a member counts as slow.
STOP_S = (0.5, 4.0)
#: Seconds from one stop to the next, and from one SIGTERM to the next.
STOP_GAP_S = (1.0, 5.0)
TERM_GAP_S = (1.0, 7.0)
#: Slow spells of each life of an engine: one in each of so many stretches of so many seconds (factors of spells that
#: meet would multiply), how long and how much slower.
SPELLS = 3
STRETCH_S = 7.0
SPELL_S = (0.5, 4.0)
SPELL_FACTOR = (2.0, 8.0)


@dataclass(frozen=True)
class Action:
    """At ``at_s`` seconds after the start, ``do`` it to one of ``room``: of those that can be chosen then, by name, the
    one at the share ``pick`` (0 to 1). A stop lasts ``for_s`` seconds."""

    at_s: float
    do: Literal["kill", "stop", "term"]
    room: Room
    pick: float
    for_s: float = 0.0


def actions(seed: int, every_s: float, kinds: Sequence[str]) -> Iterator[Action]:
    """Without end, in order of time."""
    found = (_kills(seed, every_s, kinds), _stops(seed, kinds), _terms(seed, kinds))
    return merge(*found, key=lambda action: action.at_s)


def _kills(seed: int, every_s: float, kinds: Sequence[str]) -> Iterator[Action]:
    """One each ``every_s`` seconds. All rooms have had their turn before one has another."""
    dice = random.Random(f"kills {seed}")
    rooms = [room for room in ROOMS if room in kinds]
    at_s = every_s * dice.uniform(0.2, 1.0)
    while rooms:
        for room in dice.sample(rooms, len(rooms)):
            yield Action(at_s, "kill", room, dice.random())
            at_s += every_s


def _stops(seed: int, kinds: Sequence[str]) -> Iterator[Action]:
    dice = random.Random(f"stops {seed}")
    at_s = 0.0
    while "stop" in kinds:
        at_s += dice.uniform(*STOP_GAP_S)
        yield Action(at_s, "stop", dice.choice(ROOMS), dice.random(), dice.uniform(*STOP_S))


def _terms(seed: int, kinds: Sequence[str]) -> Iterator[Action]:
    dice = random.Random(f"terms {seed}")
    at_s = 0.0
    while "term" in kinds:
        at_s += dice.uniform(*TERM_GAP_S)
        yield Action(at_s, "term", dice.choice(ROOMS), dice.random())


def slow_spells(seed: int, engines: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """`engine.sim.faults`: each engine is slow for some spells of each of its lives."""
    dice = random.Random(f"slow {seed}")
    return [
        {
            "engine": engine,
            "do": "slow",
            "at_s": round(spell * STRETCH_S + dice.uniform(0.0, STRETCH_S - SPELL_S[1]), 2),
            "for_s": round(dice.uniform(*SPELL_S), 2),
            "factor": round(dice.uniform(*SPELL_FACTOR), 1),
        }
        for engine in range(engines if "slow" in kinds else 0)
        for spell in range(SPELLS)
    ]


def chosen(names: Sequence[str], pick: float) -> str:
    """The one of ``names`` (not empty, any order) that ``pick`` means."""
    return sorted(names)[int(pick * len(names))]
