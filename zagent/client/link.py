"""A process's link to the broker: two lanes (data, control), joined by a hello on each.

Heartbeats, cancels and control calls have a lane of their own, so they never wait behind data.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from zagent import __version__
from zagent.errors import ConnectionLost, DecodeError, VersionMismatch, from_wire
from zagent.wire.channel import Channel, Frames
from zagent.wire.codec import Buffer, decode_body, decode_header, encode_body, encode_header
from zagent.wire.messages import Failure, Goodbye, Hello, Message, Welcome

#: First byte of a lane's identity; the rest is the link's id, so the broker knows which lanes belong together.
DATA, CONTROL = b"d", b"c"
#: A broker that is up answers a hello in a millisecond; a busy machine may need seconds.
WELCOME_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who says hello: a member of ``pool``, or a caller ("" )."""

    pool: str = ""
    name: str = ""
    epoch: int = 0
    credits: int = 0
    secret: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


#: Makes the channel of a lane from its identity bytes.
Connect = Callable[[bytes], Channel]
Handler = Callable[[Any, Frames], None]


class Link:
    """Sends messages to the broker and hands what arrives to the handler registered for its kind.

    Bytes that are no message are counted in ``malformed`` and dropped.
    """

    def __init__(self, connect: Connect, identity: Identity | None = None) -> None:
        self.identity = identity or Identity()
        #: Unique per link; the prefix of its call ids.
        self.nonce = os.urandom(8)
        self.incarnation = 0
        #: The cluster's facts, from the broker's welcome.
        self.facts: dict[str, Any] = {}
        self.malformed = 0
        #: Why the link is closed; "" while it is not.
        self.closed = ""
        self._data, self._control = connect(DATA + self.nonce), connect(CONTROL + self.nonce)
        self._handlers: dict[type[Message], Handler] = {}
        self._closed: list[Callable[[], None]] = []
        self._open = False
        #: The event loop it was opened on: it works on no other.
        self.loop: asyncio.AbstractEventLoop | None = None
        self._welcomed: asyncio.Future[None] | None = None

    def on(self, kind: type[Message], handler: Handler) -> None:
        """``handler(message, body frames)`` takes every message of that kind."""
        if kind in self._handlers:
            raise ValueError(f"{kind.__name__} already has a handler")
        self._handlers[kind] = handler

    def on_close(self, callback: Callable[[], None]) -> None:
        """Run when the link closes."""
        self._closed.append(callback)

    async def open(self, timeout: float = WELCOME_TIMEOUT_S) -> None:
        """Say hello and wait for the welcome.

        Raises:
            ConnectionLost: no welcome within ``timeout`` seconds.
            ProtocolError: the broker refused the hello; `VersionMismatch` where that is why.
        """
        self.loop = asyncio.get_running_loop()
        self._welcomed = self.loop.create_future()
        calls = self._handlers.pop(Failure, None)
        self._handlers[Welcome], self._handlers[Failure] = self._welcome, self._refused
        self._open = True
        try:
            self._say_hello()
            async with asyncio.timeout(timeout):
                await self._welcomed
        except TimeoutError:
            self.close()
            raise ConnectionLost(f"the broker did not answer hello within {timeout:g} s") from None
        except BaseException:
            self.close()
            raise
        finally:
            self._welcomed = None
            self._handlers.pop(Failure, None)
            if calls is not None:
                self._handlers[Failure] = calls

    def _say_hello(self) -> None:
        me = self.identity
        hello = Hello(me.pool, me.name, me.epoch, me.credits, me.secret, __version__)
        for lane in (self._data, self._control):
            lane.open(self._receive)
            lane.send([encode_header(hello), *encode_body(me.facts)])

    def _welcome(self, message: Welcome, body: Frames) -> None:
        self.incarnation, self.facts = message.incarnation, decode_body(body)
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_result(None)

    def _refused(self, message: Failure, body: Frames) -> None:
        self._fail_hello(from_wire(decode_body(body)))

    def _fail_hello(self, error: Exception) -> None:
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)

    def send(self, message: Message, body: Sequence[Buffer] = (), *, control: bool = False) -> None:
        """Send one message. Raises `ConnectionLost` once closed."""
        if self.closed:
            raise ConnectionLost(f"the link to the broker is closed: {self.closed}")
        (self._control if control else self._data).send([encode_header(message), *body])

    def _receive(self, batch: list[Frames]) -> None:
        for frames in batch:
            try:
                message = decode_header(frames[0])
                handler = self._handlers.get(type(message))
                if handler is None:
                    raise DecodeError(f"nobody here takes a {type(message).__name__}", frames)
                handler(message, frames[1:])
            except VersionMismatch as error:  # a refusal in the broker's own version cannot be read here
                self.malformed += 1
                self._fail_hello(error)
            except (DecodeError, IndexError):
                self.malformed += 1

    def close(self, reason: str = "it was closed here") -> None:
        """Say goodbye and close both lanes; whatever still waits on the link is told why."""
        if not self._open:
            return
        self._open = False
        with suppress(ConnectionLost):  # a lane that could not be opened
            self.send(Goodbye(), control=True)
        self.closed = reason
        for lane in (self._data, self._control):
            lane.close()
        for callback in self._closed:
            callback()
