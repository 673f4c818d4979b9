"""ZeroMQ sockets; zmq is imported in this room only.

The broker polls one ROUTER from its own thread; every other process has DEALERs on its event loop, drained in batches
from an event-loop reader on the socket's descriptor (zmq.asyncio costs a future and a wake-up per message).
"""

from __future__ import annotations

import asyncio
import os
import select
from collections import deque

import zmq

from zagent.errors import ConnectionLost
from zagent.wire import multipart
from zagent.wire.binding import Door, allow_files
from zagent.wire.channel import Frames, Receiver, Reconnected
from zagent.wire.codec import Buffer
from zagent.wire.endpoints import Endpoint, parse
from zagent.wire.gate import Gate
from zagent.wire.keys import CLIENT_SUFFIX, read_broker, read_client
from zagent.wire.monitor import Monitor
from zagent.wire.options import HIGH_WATER, LINGER_MS, configure

#: Messages that wait, behind those in libzmq's queue, in a peer whose broker takes nothing.
BACKLOG_MAX = 200_000
#: Events of the broker's socket: a connection, and a handshake that came to nothing.
_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_FAILED = (
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
)
_MADE = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)


class RouterSocket:
    """The broker's socket. All methods from one thread.

    Args:
        endpoint: `ipc://PATH`, or `tcp://HOST:PORT` (port 0 = any free one). `self.endpoint` is what was bound, and
            what peers connect to.
        keys: path of the broker's key file; TCP only. None lets everybody in.

    Raises:
        ConfigError: the endpoint is taken or malformed, or the key file cannot be used; names it.
    """

    def __init__(self, endpoint: str, keys: str | None = None) -> None:
        address = parse(endpoint).address
        allow_files()
        self._context = zmq.Context()
        try:
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            configure(self._socket)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A peer that reconnects before its former connection was found dead takes its name over, else its messages
            # would go nowhere. To take somebody else's one must know 8 random bytes, which the broker tells nobody but
            # the members that run his calls (a call's id begins with them).
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._monitor = Monitor(self._socket, sum(_FAILED) + _ACCEPTED)
            self._gate = self._guarded(keys) if keys else None
            self._poll = select.poll()
            #: What is done, beside receiving, when a descriptor tells of something.
            self._chores = {self._monitor.socket.fileno(): self._look_around}
            if self._gate is not None:
                self._chores[self._gate.socket.fileno()] = self._gate.answer
            for fd in (self._socket.fileno(), *self._chores):
                self._poll.register(fd, select.POLLIN)
            self._door = Door(self._socket, address)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        client = os.path.abspath(keys + CLIENT_SUFFIX) if keys else ""
        self.endpoint = str(Endpoint(self._door.address, client))
        self._turned_away = 0
        self._look_around()  # a descriptor tells of changes only, and only to who has looked once

    def _guarded(self, keys: str) -> Gate:
        gate = Gate(self._context, read_broker(keys))
        gate.guard(self._socket)
        return gate

    def receive(self, timeout_ms: int) -> list[tuple[bytes, Frames]]:
        """Up to `multipart.BATCH` messages, each (identity, frames); waits up to ``timeout_ms`` for the first, or for
        somebody to connect."""
        batch = multipart.rest(self._socket, multipart.receive_from)
        for fd, _ in self._poll.poll(0 if batch else timeout_ms):
            if fd in self._chores:
                self._chores[fd]()
            elif not batch:
                batch = multipart.first(self._socket, multipart.receive_from)
        return batch

    def turned_away(self) -> int:
        """Connections so far that ended before they had said who they are: noise, other protocols, wrong keys."""
        self._look_around()
        return self._turned_away

    def _look_around(self) -> None:
        events = self._monitor.take()
        self._turned_away += sum(events[failed] for failed in _FAILED)
        self._door.entered(events[_ACCEPTED])

    def send(self, identity: bytes, frames: Frames) -> bool:
        """One message; False when the peer is gone or has stopped reading (never waits)."""
        try:
            multipart.send(self._socket, [identity, *frames])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Close; waits at most `LINGER_MS`."""
        self._context.destroy(linger=LINGER_MS)
        self._door.remove()


class DealerChannel:
    """A peer's lane to the broker (`zagent.wire.channel.Channel` over a DEALER), on the loop that opens it."""

    def __init__(self, endpoint: str, identity: bytes) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: Monitor | None = None
        self._connections = 0
        self._anew = False  #: a connection was made that nobody has been told of
        self._backlog: deque[list[Buffer]] = deque()
        self._drain_due = False
        self._lonely = True  #: hardly anything was sent in the last turn, and nothing in this one

    def open(self, receiver: Receiver, reconnected: Reconnected) -> None:
        """Raises `ConnectionLost` where the endpoint is none, `ConfigError` where its key file cannot be used."""
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._reconnected = reconnected
        address, keys = parse(self._endpoint)
        options = _client_options(keys) if keys else {}
        # One context, hence one I/O thread, per process (pyzmq makes a fresh one after a fork).
        try:
            self._socket = _context().socket(zmq.DEALER)
        except zmq.ZMQError as error:  # too many sockets, or files
            raise ConnectionLost(f"no socket for {self._endpoint!r}: {error}") from error
        configure(self._socket)
        for option, value in {**options, zmq.IDENTITY: self._identity}.items():
            self._socket.setsockopt(option, value)
        try:
            self._watch(self._socket)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectionLost(f"{self._endpoint!r} is no endpoint: {error}") from error
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._arrived)

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        self._monitor = Monitor(socket, _MADE)
        self._monitor_fd = self._monitor.socket.fileno()
        self._loop.add_reader(self._monitor_fd, self._hear)
        self._hear()  # as in `RouterSocket`

    def _hear(self) -> None:
        """A connection was made. What came over the one before is delivered first; a welcome in it asks by `notice`."""
        self._count()
        if self._anew:
            self._drain()
            self.notice()

    def _count(self) -> None:
        made = 0 if self._monitor is None else self._monitor.take()[_MADE]
        self._connections += made
        self._anew = self._anew or (made > 0 and self._connections > 1)

    def notice(self) -> None:
        self._count()
        if self._anew and self._socket is not None:
            self._anew = False
            self._reconnected()

    def send(self, frames: Frames) -> None:
        """Raises `ConnectionLost` after close, and while more waits than a broker that is there lets wait."""
        if self._socket is None:
            raise ConnectionLost("the link to the broker is closed")
        if len(self._backlog) >= BACKLOG_MAX:
            self._flush(self._socket)
            if len(self._backlog) >= BACKLOG_MAX:
                raise ConnectionLost(f"the broker takes nothing: {HIGH_WATER + BACKLOG_MAX} messages wait for it")
        self._backlog.append(list(map(bytes, frames)))
        # All sends of one turn of the loop go out together: one wake-up of the I/O thread, fuller segments. But who
        # sends one at a time does not wait for the turn's end. Sending may also swallow the edge that announces
        # arrivals, so they are looked for before the loop sleeps.
        if self._lonely:
            self._lonely = False
            self._flush(self._socket)
        self._drain_soon()

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        """Send what waits, as far as the broker takes it."""
        while self._backlog:
            try:
                multipart.send(socket, self._backlog[0])
            except zmq.Again:
                return
            self._backlog.popleft()

    def _arrived(self) -> None:
        """The descriptor tells of a message. Whether there are more is looked for when this one has been acted upon."""
        if self._socket is not None:
            first = multipart.first(self._socket, multipart.receive)
            if first:
                self._receiver(first)
            self._drain_soon()

    def _drain_soon(self) -> None:
        """At the end of this turn of the loop, or the next."""
        if not self._drain_due and not self._loop.is_closed():
            self._drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Send what waits, take all that has arrived."""
        self._drain_due = False
        if self._socket is None:
            return
        self._lonely = len(self._backlog) <= 1
        self._flush(self._socket)
        batch = multipart.rest(self._socket, multipart.receive)
        if len(batch) == multipart.BATCH:  # more may be there, and no edge will say so
            self._drain_soon()
        if batch:
            self._receiver(batch)

    def close(self) -> None:
        if self._socket is None:
            return
        if self._monitor is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._monitor_fd)
            self._monitor.close()
            self._monitor = None
        if hasattr(self, "_fd") and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._flush(self._socket)
        self._socket.close(linger=LINGER_MS)
        self._socket = None


def _client_options(keys: str) -> dict[int, bytes]:
    client = read_client(keys)
    options = {
        zmq.CURVE_SERVERKEY: client.broker_public,
        zmq.CURVE_PUBLICKEY: client.client_public,
        zmq.CURVE_SECRETKEY: client.client_secret,
    }
    return {option: key.encode() for option, key in options.items()}


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))  # not 1023: a link takes six
    return context


def terminate() -> None:
    """Send what is still queued on this process's closed channels; waits at most `LINGER_MS`. For processes that end
    without the interpreter's usual exit."""
    zmq.Context.instance().term()
