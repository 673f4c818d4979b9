"""Answers that a member keeps until the broker has surely passed them on: one that dies takes with it what it had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """Answers by call and attempt, each until the second `pulse` after it was put in.

    At most ``limit`` bytes in all: beyond that the oldest are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._recent: dict[Key, Answer] = {}
        self._former: dict[Key, Answer] = {}  #: from before the last pulse

    def put(self, answer: Answer) -> None:
        """Keep an answer of a call and attempt that none is kept of."""
        answer.size = sum(map(len, answer.body))
        self._recent[(answer.call.call, answer.call.attempt)] = answer
        self._size += answer.size
        while self._size > self._limit:
            oldest = self._former or self._recent
            self._size -= oldest.pop(next(iter(oldest))).size

    def take(self, key: Key) -> Answer | None:
        """The answer, no longer kept; None where there is none."""
        answer = self._recent.pop(key, None) or self._former.pop(key, None)
        if answer is not None:
            self._size -= answer.size
        return answer

    def pulse(self) -> None:
        """The broker is alive: it has passed on what was sent before the pulse before."""
        self._size -= sum(answer.size for answer in self._former.values())
        self._former, self._recent = self._recent, {}

    def __iter__(self) -> Iterator[Answer]:
        yield from self._former.values()
        yield from self._recent.values()
