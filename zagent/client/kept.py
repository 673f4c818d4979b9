"""Answers that a member keeps until the broker has surely passed them on: one that dies takes with it what it had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from zagent.wire.channel import Frames
from zagent.wire.messages import Call, Failure, Reply

#: A call and its attempt.
Key: TypeAlias = tuple[bytes, int]


@dataclass(slots=True)
class Answer:
    """What was sent, and what for."""

    call: Call
    message: Reply | Failure
    body: Frames
    stopped: bool = False  #: the member was told to stop the call before
    size: int = 0  #: bytes of the body


class Kept:
    """Answers by call and attempt, in the order of their numbers.

    At most ``limit`` bytes in all: beyond that the oldest are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._answers: dict[Key, Answer] = {}

    def put(self, answer: Answer) -> None:
        """Keep an answer, with a higher number than any before, of a call and attempt that none is kept of."""
        answer.size = sum(map(len, answer.body))
        self._answers[(answer.call.call, answer.call.attempt)] = answer
        self._size += answer.size
        while self._size > self._limit:
            self.take(next(iter(self._answers)))

    def take(self, key: Key) -> Answer | None:
        """The answer, no longer kept; None where there is none."""
        answer = self._answers.pop(key, None)
        if answer is not None:
            self._size -= answer.size
        return answer

    def passed(self, number: int) -> None:
        """Answers up to that number need not be kept."""
        for key in [*takewhile(lambda key: self._answers[key].message.number <= number, self._answers)]:
            self.take(key)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._answers.values())
