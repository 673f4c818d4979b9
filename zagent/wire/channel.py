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


class Channel(Protocol):
    """One lane of a peer's link. ``send`` never waits and keeps no reference to the frames' memory."""

    def open(self, receiver: Receiver) -> None:
        """Deliver to ``receiver`` from now on, on the running loop."""

    def send(self, frames: Frames) -> None:
        """Hand over one message. Raises `ConnectionLost` after close."""

    def close(self) -> None:
        """Stop; what was sent is delivered if the other side is there."""


class MemoryChannel:
    """A peer's end of a `MemoryRouter`."""

    def __init__(self, router: MemoryRouter, identity: bytes) -> None:
        self._router = router
        self.identity = identity
        self._receiver: Receiver | None = None

    def open(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._router.attach(self)

    def send(self, frames: Frames) -> None:
        if self._receiver is None:
            raise ConnectionLost("channel is closed")
        self._router.deliver(self.identity, frames)

    def receive(self, frames: Frames) -> None:
        """Called by the router."""
        if self._receiver is not None:
            self._receiver([frames])

    def close(self) -> None:
        self._receiver = None
        self._router.detach(self.identity)


class MemoryRouter:
    """The broker's end: ROUTER semantics (addressed by identity, an unknown one is an error) on the event loop.

    ``latency`` seconds pass between sending and delivery; messages of one channel keep their order.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.receiver: Callable[[list[tuple[bytes, Frames]]], None] | None = None
        self._channels: dict[bytes, MemoryChannel] = {}
        self._under_way: deque[Callable[[], None]] = deque()

    def connect(self, identity: bytes) -> MemoryChannel:
        """A new channel; it is attached when opened."""
        return MemoryChannel(self, identity)

    def attach(self, channel: MemoryChannel) -> None:
        self._channels[channel.identity] = channel

    def detach(self, identity: bytes) -> None:
        self._channels.pop(identity, None)

    def deliver(self, identity: bytes, frames: Frames) -> None:
        """From a channel to the broker."""
        self._later(self._to_broker, identity, [bytes(frame) for frame in frames])

    def send(self, identity: bytes, frames: Frames) -> bool:
        """From the broker to a channel; False when nobody of that name is there."""
        if identity not in self._channels:
            return False
        self._later(self._to_channel, identity, [bytes(frame) for frame in frames])
        return True

    def _later(self, deliver: Callable[[bytes, Frames], None], identity: bytes, frames: Frames) -> None:
        # One queue, and timers that each take its head: timers of equal time alone would not keep the order.
        self._under_way.append(lambda: deliver(identity, frames))
        loop = asyncio.get_running_loop()
        if self.latency:
            loop.call_later(self.latency, self._deliver_next)
        else:
            loop.call_soon(self._deliver_next)

    def _deliver_next(self) -> None:
        self._under_way.popleft()()

    def _to_broker(self, identity: bytes, frames: Frames) -> None:
        if self.receiver is not None:
            self.receiver([(identity, frames)])

    def _to_channel(self, identity: bytes, frames: Frames) -> None:
        channel = self._channels.get(identity)
        if channel is not None:
            channel.receive(frames)
