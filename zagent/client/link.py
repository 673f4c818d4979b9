"""A process's link to the broker: two lanes (data, control), joined by a hello on each.

Heartbeats, cancels and control calls have a lane of their own, so they never wait behind data. The link outlives its
broker: whenever one may not know it (any more), it says hello again, and tells its users if they had been forgotten.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zagent import __version__
from zagent.errors import ConnectionLost, DecodeError, VersionMismatch, from_wire
from zagent.wire.channel import Channel, Frames
from zagent.wire.codec import Buffer, decode_body, decode_header, encode_body, encode_header
from zagent.wire.messages import Call, Failure, Goodbye, Hello, HelloWanted, Message, Progress, Pulse, Welcome

#: First byte of a lane's identity; the rest is the link's id, so the broker knows which lanes belong together.
DATA, CONTROL = b"d", b"c"
#: A broker that is up answers a hello in a millisecond; a busy machine may need seconds.
WELCOME_TIMEOUT_S = 30.0
#: How often `keep` looks, in s. It counts its looks: a process that was suspended, or whose loop was blocked, has not
#: looked either, and does not take the broker for silent.
LOOK_S = 1.0
#: Looks without a sign of life after which hello is said: five of the broker's pulses.
SILENT_LOOKS = 5
#: Looks between hellos that are not answered.
REPEAT_LOOKS = 2
#: Characters of an interpreter's path that a hello tells: the broker reads no long headers of strangers.
PYTHON_MAX = 500


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
        #: Of the broker that has welcomed it last.
        self.incarnation = 0
        #: The cluster's facts, from the broker's welcome.
        self.facts: dict[str, Any] = {}
        #: What a hello says about this peer, asked for each.
        self.hello_facts: Callable[[], dict[str, Any]] = lambda: self.identity.facts
        #: A hello is under way: what is sent now goes out after the welcome.
        self.greeting = False
        #: How often it was connected anew, and the lanes of which that is known.
        self._connection, self._connected = 0, {DATA, CONTROL}
        self.malformed = 0
        #: Why the link is closed; "" while it is not.
        self.closed = ""
        #: The event loop it was opened on: it works on no other.
        self.loop: asyncio.AbstractEventLoop | None = None
        self._data, self._control = connect(DATA + self.nonce), connect(CONTROL + self.nonce)
        self._handlers: dict[type[Message], Handler] = {
            Welcome: self._welcome,
            HelloWanted: self._wanted,
            Pulse: self._pulse,
            Failure: self._failure,
        }
        self._failed: Handler | None = None
        self._closed: list[Callable[[], None]] = []
        self._rejoined: list[Callable[[bool], None]] = []
        self._pulsed: list[Callable[[], None]] = []
        self._open = False
        self._welcomed: asyncio.Future[None] | None = None
        #: What waits for the welcome: (lane, whether it is a call, frames).
        self._held_back: list[tuple[Channel, bool, Frames]] = []
        self._patience_s = math.inf
        self._looks = 0  #: since the last sign of life
        self._greeted = 0  #: since the last hello
        self._timer: asyncio.TimerHandle | None = None

    def on(self, kind: type[Message], handler: Handler) -> None:
        """``handler(message, body frames)`` takes every message of that kind."""
        if kind is Failure and self._failed is None:
            self._failed = handler
        elif kind in self._handlers:
            raise ValueError(f"{kind.__name__} already has a handler")
        else:
            self._handlers[kind] = handler

    def on_close(self, callback: Callable[[], None]) -> None:
        """Run when the link closes."""
        self._closed.append(callback)

    def on_rejoin(self, callback: Callable[[bool], None]) -> None:
        """Run when a broker knows the link again that knew nothing of it: a new one, or the same (True) that had
        forgotten it. What the callbacks send comes before all that was held back; calls are not held back: whoever
        waits for them sends them again."""
        self._rejoined.append(callback)

    def on_pulse(self, callback: Callable[[], None]) -> None:
        """Run at each of the broker's pulses."""
        self._pulsed.append(callback)

    async def open(self, timeout: float = WELCOME_TIMEOUT_S) -> None:
        """Say hello and wait for the welcome.

        Raises:
            ConnectionLost: no welcome within ``timeout`` seconds.
            ProtocolError: the broker refused the hello; `VersionMismatch` where that is why.
        """
        self.loop = asyncio.get_running_loop()
        self._welcomed = self.loop.create_future()
        self._open = True
        try:
            for name, lane in ((DATA, self._data), (CONTROL, self._control)):
                lane.open(self._receive, partial(self._reconnected, name))
            self._greet()
            async with asyncio.timeout(timeout):
                await self._welcomed
        except TimeoutError:
            self.close()
            raise ConnectionLost(f"the broker did not answer hello within {timeout:g} s") from None
        except BaseException:
            self.close()
            raise

    async def wait_closed(self) -> str:
        """Wait until the link is closed, by whomever; why it is."""
        if not self.closed:
            closed = asyncio.get_running_loop().create_future()
            self.on_close(lambda: None if closed.done() else closed.set_result(None))
            await closed
        return self.closed

    # ---- hello and welcome ------------------------------------------------------------------------------------------

    def _reconnected(self, lane: bytes) -> None:
        """A lane is connected anew. The other follows, if the broker is; both together count once."""
        if lane in self._connected:
            self._connection, self._connected = self._connection + 1, set()
        self._connected.add(lane)
        self._greet()

    def _greet(self) -> None:
        """Say hello, again wherever what was said may be lost: a broker that knows this connection changes nothing."""
        if not self._open:
            return
        self.greeting, self._greeted = True, 0
        me = self.identity
        which = (self.incarnation, self._connection)
        hello = Hello(
            me.pool, me.name, me.epoch, me.credits, me.secret, __version__, *which, sys.executable[-PYTHON_MAX:]
        )
        frames = [encode_header(hello), *encode_body(self.hello_facts())]
        for lane in (self._data, self._control):
            lane.send(frames)

    def announce(self) -> None:
        """The facts have changed: the broker is told."""
        self._greet()

    def _wanted(self, message: HelloWanted, body: Frames) -> None:
        if not self.greeting:
            self._greet()

    def _welcome(self, message: Welcome, body: Frames) -> None:
        for lane in (self._data, self._control):  # the loop may not have heard yet what the welcome has come over
            lane.notice()
        self.facts = decode_body(body)
        former, self.incarnation = self.incarnation, message.incarnation
        self.greeting, self._looks = False, 0
        self._connected = {DATA, CONTROL}
        forgotten = not message.known or message.incarnation != former  # a welcome in between may have been lost
        if self._welcomed is not None and not self._welcomed.done():
            forgotten = False
            self._welcomed.set_result(None)
        held_back, self._held_back = self._held_back, []
        if forgotten:
            for callback in self._rejoined:
                callback(message.incarnation == former)
        for lane, is_call, frames in held_back:
            if not (forgotten and is_call):
                lane.send(frames)

    def _failure(self, message: Failure, body: Frames) -> None:
        """Without a call it is the refusal of a hello."""
        if self.greeting and not message.call:
            self._refused(from_wire(decode_body(body)))
        elif self._failed is None:
            raise DecodeError("nobody here takes a Failure")
        else:
            self._failed(message, body)

    def _refused(self, error: Exception) -> None:
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)
        elif self.greeting:
            self.close(f"the broker refused the hello: {error}")

    # ---- signs of life ----------------------------------------------------------------------------------------------

    def keep(self, patience_s: float = math.inf) -> None:
        """Watch the broker from now on: say hello when it is silent or does not answer one; close the link when it has
        been silent for ``patience_s`` seconds."""
        assert self.loop is not None, "the link is not open"
        self._patience_s = patience_s
        if self._timer is None and self._open:
            self._timer = self.loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        assert self.loop is not None
        self._timer = self.loop.call_later(LOOK_S, self._look)
        self._looks += 1
        self._greeted += 1
        if self._looks * LOOK_S >= self._patience_s:
            self.close(f"no sign of life from the broker for {self._patience_s:g} s")
        elif self._greeted >= REPEAT_LOOKS and (self.greeting or self._looks >= SILENT_LOOKS):
            self._greet()

    def _pulse(self, message: Pulse, body: Frames) -> None:
        self._looks = 0
        for callback in self._pulsed:
            callback()

    # ---- messages ---------------------------------------------------------------------------------------------------

    def send(self, message: Message, body: Sequence[Buffer] = (), *, control: bool = False) -> None:
        """Send one message. Raises `ConnectionLost` once closed."""
        if self.closed:
            raise ConnectionLost(f"the link to the broker is closed: {self.closed}")
        lane = self._control if control else self._data
        frames = [encode_header(message), *body]
        if not self.greeting:
            lane.send(frames)
        elif type(message) is not Progress:  # worth nothing to who must ask again, it would pile up without a broker
            self._held_back.append((lane, type(message) is Call, frames))

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
                self._refused(error)
            except (DecodeError, IndexError):
                self.malformed += 1

    def close(self, reason: str = "it was closed here", goodbye: Goodbye | None = None) -> None:
        """Say goodbye and close both lanes; whatever still waits on the link is told why."""
        if not self._open:
            return
        self._open = False
        with suppress(ConnectionLost):  # a lane that could not be opened
            self._control.send([encode_header(goodbye or Goodbye())])
        self.closed = reason
        if self._timer is not None:
            self._timer.cancel()
        for lane in (self._data, self._control):
            lane.close()
        for callback in self._closed:
            callback()
