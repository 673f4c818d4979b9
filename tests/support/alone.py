"""A member, or a caller, with a hand-fed broker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from zagent.client.calls import Calls, Retry
from zagent.client.link import Identity, Link
from zagent.client.member import Member, Method
from zagent.wire.channel import MemoryRouter
from zagent.wire.codec import decode_body, decode_header, encode_body, encode_header
from zagent.wire.messages import Call, Cancel, Failure, Hello, Message, Passed, Pulse, Reply, Welcome


async def forever(argument: Any, call: Call) -> None:
    """A method that never ends."""
    await asyncio.sleep(1e6)


class Peer:
    """A link and what it said to the broker, in order: (message, body)."""

    def __init__(self, identity: Identity | None = None) -> None:
        self.router = MemoryRouter()
        self.router.receiver = self._got
        self.said: list[tuple[Any, Any]] = []
        self.link = Link(self.router.connect, identity)

    def _got(self, batch: Any) -> None:
        for _, frames in batch:
            self.said.append((decode_header(frames[0]), decode_body(frames[1:]) if len(frames) > 1 else None))

    async def open(self, incarnation: int = 1) -> Any:
        opening = asyncio.create_task(self.link.open())
        await asyncio.sleep(0)
        self.welcome(incarnation)
        await opening
        await asyncio.sleep(0)
        self.said.clear()
        return self

    def send(self, message: Message, body: Any = None, lane: bytes = b"d") -> None:
        assert self.router.send(lane + self.link.nonce, [encode_header(message), *encode_body(body)])

    def welcome(self, incarnation: int = 1, *, known: bool = False) -> None:
        self.send(Welcome(incarnation, known), {}, lane=b"c")

    def passed(self, number: int) -> None:
        self.send(Passed(number))

    def pulse(self) -> None:
        self.send(Pulse(1), lane=b"c")

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message, _ in self.said]

    def of(self, kind: type[Message]) -> list[Any]:
        """All messages of that kind."""
        return [message for message, _ in self.said if type(message) is kind]

    def take(self) -> list[tuple[Any, Any]]:
        """What was said since the last time."""
        said = self.said[:]
        self.said.clear()
        return said


class Alone(Peer):
    """A member."""

    def __init__(self, methods: Mapping[str, Method], facts: dict[str, Any] | None = None) -> None:
        super().__init__(Identity("engine", "m", 1, 8, "", facts or {}))
        self.member = Member(self.link, methods)

    def call(self, call: bytes = b"1", method: str = "do", attempt: int = 1, **fields: Any) -> None:
        self.send(Call(call, attempt, "engine", method)._replace(**fields))

    def cancel(self, call: bytes = b"1", attempt: int = 1) -> None:
        self.send(Cancel(call, attempt), lane=b"c")

    def answers(self) -> list[tuple[str, bytes, int, Any]]:
        """(kind, call, attempt, value or error's type)."""
        return [
            (type(m).__name__, m.call, m.attempt, body["type"] if isinstance(m, Failure) else body)
            for m, body in self.said
            if isinstance(m, (Reply, Failure))
        ]

    def held(self) -> list[Any]:
        """The calls in the last hello."""
        return next(list(body["held"]) for message, body in reversed(self.said) if isinstance(message, Hello))


class Asking(Peer):
    """A caller."""

    def __init__(self, retry: Retry | None = None) -> None:
        super().__init__()
        self.calls = Calls(self.link, retry)
