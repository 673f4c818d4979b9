"""A channel carries frames between a peer and the broker; here the interface and its in-memory twin.

The twin lives on the event loop, so logic above it can be tested on virtual time (real sockets deliver outside the
loop: under a virtual clock they time out before anything arrives).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from zagent.errors import ConnectionLost
from zagent.wire.codec import Buffer

Frames: TypeAlias = "Sequence[Buffer]"
#: Called with everything that has arrived since the last call.
Receiver: TypeAlias = "Callable[[list[Frames]], None]"
#: Called when a connection that was lost is there again; what was under way then may be lost.
Reconnected: TypeAlias = "Callable[[], None]"


class Channel(Protocol):
    """One lane of a peer's link. ``send`` never waits and keeps no reference to the frames' memory."""

    def open(self, receiver: Receiver, reconnected: Reconnected) -> None:
        """Deliver to ``receiver`` from now on, on the running loop; ``reconnected`` is called there, too, after what
        the former connection has brought."""

    def send(self, frames: Frames) -> None:
        """Hand over one message. Raises `ConnectionLost` after close."""

    def notice(self) -> None:
        """Say ``reconnected`` now, if there is a new connection of which that has not been said yet."""

    def close(self) -> None:
        """Stop; what was sent is delivered if the other side is there."""


class MemoryChannel:
    """A peer's end of a `MemoryRouter`."""

    def __init__(self, router: MemoryRouter, identity: bytes) -> None:
        self._router = router
        self.identity = identity
        self._receiver: Receiver | None = None
        self._reconnected: Reconnected = lambda: None
        self._anew = False

    def open(self, receiver: Receiver, reconnected: Reconnected) -> None:
        self._receiver, self._reconnected = receiver, reconnected
        self._router.attach(self)

    def send(self, frames: Frames) -> None:
        if self._receiver is None:
            raise ConnectionLost("channel is closed")
        self._router.deliver(self.identity, frames)

    def receive(self, frames: Frames) -> None:
        """Called by the router."""
        if self._receiver is not None:
            self._receiver([frames])

    def connected(self) -> None:
        """Called by the router: anew. The loop hears of it later."""
        self._anew = True
        asyncio.get_running_loop().call_soon(self.notice)

    def reconnected(self) -> None:
        """The same, heard of at once."""
        self._anew = True
        self.notice()

    def notice(self) -> None:
        if self._anew:
            self._anew = False
            self._reconnected()

    def close(self) -> None:
        self._receiver = None
        self._router.detach(self.identity)


class MemoryRouter:
    """The broker's end: ROUTER semantics (addressed by identity, an unknown one is an error) on the event loop.

    ``latency`` seconds pass between sending and delivery; messages of one channel keep their order. As on sockets, the
    broker may go and come back (`cut`, `mend`): what was under way is lost, and what a channel sends without a
    connection is delivered to the next broker.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.receiver: Callable[[list[tuple[bytes, Frames]]], None] | None = None
        self._channels: dict[bytes, MemoryChannel] = {}
        self._under_way: deque[Callable[[], None]] = deque()
        self._there = True
        #: What is sent by channels without a connection.
        self._waiting: dict[bytes, list[Frames]] = {}

    def connect(self, identity: bytes) -> MemoryChannel:
        """A new channel; it is attached when opened."""
        return MemoryChannel(self, identity)

    def attach(self, channel: MemoryChannel) -> None:
        self._channels[channel.identity] = channel
        if not self._there:
            self._waiting[channel.identity] = []

    def detach(self, identity: bytes) -> None:
        self._channels.pop(identity, None)

    def cut(self) -> None:
        """The broker is gone: all connections are lost, and all that is under way."""
        self._there = False
        self._under_way.clear()
        self._under_way = deque()
        self._waiting |= {identity: [] for identity in self._channels if identity not in self._waiting}

    def mend(self) -> None:
        """A broker is there again."""
        self._there = True
        for identity in list(self._waiting):
            self.connected(identity)

    def connected(self, identity: bytes) -> None:
        """A channel is connected again: it is told so, and what it has sent meanwhile is delivered."""
        for frames in self._waiting.pop(identity, []):
            self.later(self._to_broker, identity, frames)
        channel = self._channels.get(identity)
        if channel is not None:
            channel.connected()

    def deliver(self, identity: bytes, frames: Frames) -> None:
        """From a channel to the broker."""
        copies = [bytes(frame) for frame in frames]
        waiting = self._waiting.get(identity)
        if waiting is None:
            self.later(self._to_broker, identity, copies)
        else:
            waiting.append(copies)

    def send(self, identity: bytes, frames: Frames) -> bool:
        """From the broker to a channel; False when nobody of that name is there."""
        if identity not in self._channels or identity in self._waiting:
            return False
        self.later(self._to_channel, identity, [bytes(frame) for frame in frames])
        return True

    def later(self, arrive: Callable[[bytes, Frames], None], identity: bytes, frames: Frames) -> None:
        """``arrive(identity, frames)`` after the latency, in order."""
        # One queue, and timers that each take its head: timers of equal time alone would not keep the order.
        queue = self._under_way
        queue.append(lambda: arrive(identity, frames))
        loop = asyncio.get_running_loop()
        if self.latency:
            loop.call_later(self.latency, _arrives, queue)
        else:
            loop.call_soon(_arrives, queue)

    def _to_broker(self, identity: bytes, frames: Frames) -> None:
        if self.receiver is not None:
            self.receiver([(identity, frames)])

    def _to_channel(self, identity: bytes, frames: Frames) -> None:
        channel = self._channels.get(identity)
        if channel is not None:
            channel.receive(frames)


def _arrives(queue: deque[Callable[[], None]]) -> None:
    """The head of the ``queue``, if a `cut` has not taken it."""
    if queue:
        queue.popleft()()
