"""What a modelled cluster works on: trajectories of several turns, made by seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from benchmarks.modelled.kv import BLOCK


class Turn(NamedTuple):
    """``prompt`` tokens beyond what the session had before; ``wait_s``: the tool's time, before it."""

    prompt: int
    answer: int
    wait_s: float = 0.0


class Trajectory(NamedTuple):
    """One sample of the prompt ``group``."""

    number: int
    group: int
    turns: Sequence[Turn]

    def keys(self, turn: int) -> list[int]:
        """Blocks of that turn's context and answer; samples of one group share those of the first turn's prompt."""
        shared = self.turns[0].prompt // BLOCK
        size = sum(one.prompt + one.answer for one in self.turns[: turn + 1]) // BLOCK
        return [_key(self.group, i) for i in range(shared)] + [_key(-1 - self.number, i) for i in range(shared, size)]

    def context(self, turn: int) -> int:
        """Tokens of the prompt of ``turn``: all that was before, and its own."""
        before = sum(one.prompt + one.answer for one in self.turns[:turn])
        return before + self.turns[turn].prompt


def _key(owner: int, block: int) -> int:
    return owner * 1_000_000 + block


class Work(Protocol):
    """Trajectories by seed."""

    def made(self, seed: int) -> list[Trajectory]:
        """The same for the same seed."""


class SingleTurns(NamedTuple):
    """Samples of one prompt in a row, as rollouts have them. Answers are log-normal, most 100 to 4 000 tokens, half of
    the variance being the prompt's: hard ones have long answers in all samples."""

    prompts: int
    samples: int
    prompt_tokens: int

    def made(self, seed: int) -> list[Trajectory]:
        draw = random.Random(seed)
        made: list[Trajectory] = []
        for group in range(self.prompts):
            scale = draw.lognormvariate(6.3, 0.55)  # median 545
            for _ in range(self.samples):
                answer = min(6000, max(16, round(scale * draw.lognormvariate(0.0, 0.55))))
                made.append(Trajectory(len(made), group, (Turn(self.prompt_tokens, answer),)))
        return made


class Sessions(NamedTuple):
    """Each of a prompt of its own; ten turns on average, with a long tail (geometric); tools take a second on average,
    and what they say adds ``turn_tokens`` to the context."""

    sessions: int
    turn_tokens: int

    def made(self, seed: int) -> list[Trajectory]:
        draw = random.Random(seed)
        made = []
        for number in range(self.sessions):
            turns = [Turn(1024, _turn_answer(draw))]
            while draw.random() > 0.1 and len(turns) < 40:
                turns.append(Turn(self.turn_tokens, _turn_answer(draw), draw.expovariate(1.0)))
            made.append(Trajectory(number, number, tuple(turns)))
        return made


def _turn_answer(draw: random.Random) -> int:
    return round(draw.lognormvariate(5.0, 0.6)) + 1  # median 149
