"""ZeroMQ sockets; the only importer of zmq.

The broker polls one ROUTER from its own thread; every other process has DEALERs on its event loop, drained in batches
from an event-loop reader on the socket's descriptor (zmq.asyncio costs a future and a wake-up per message).
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from zagent.errors import ConfigError, ConnectionLost
from zagent.wire.channel import Frames, Receiver
from zagent.wire.codec import Buffer

#: Messages queued towards one peer before it counts as gone. A peer is owed at most what it asked for
#: (`broker.max_pending` calls), so only a peer that stopped reading reaches it.
HIGH_WATER = 200_000
#: Undelivered messages are dropped this long after close, so that no exit hangs (libzmq's default is for ever).
LINGER_MS = 500
#: Messages taken in one go before other work gets its turn; at about 10 µs each this bounds the delay to some ms.
BATCH = 512
#: Received frames from this size on (bytes) are handed on without a copy. Smaller ones share libzmq's receive buffer of
#: this size with their neighbours, so that keeping one would keep all.
UNCOPIED_FROM = 8192
#: Longest path of a Unix socket on Linux, in bytes.
IPC_PATH_MAX = 107


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)


# Plain ints, for arithmetic on zmq's enums costs as much as the send itself (1.5 µs a message).
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
# Without the Python wrapper of `zmq.Socket.send`, which serves other socket types and costs as much again.
_send_frame = zmq.backend.Socket.send


def _send(socket: zmq.Socket[bytes], frames: Frames) -> None:
    """`send_multipart`, never waiting. Raises `zmq.Again` when the queue is full; nothing was sent then."""
    for frame in frames[:-1]:
        _send_frame(socket, frame, _NOBLOCK_MORE)
    _send_frame(socket, frames[-1], _NOBLOCK)


def _receive(socket: zmq.Socket[bytes]) -> list[Buffer]:
    """`recv_multipart`, never waiting: bytes, and a `zmq.Frame` for each frame from `UNCOPIED_FROM` on (a buffer as
    well, and sent on without a copy). Raises `zmq.Again` when nothing is there."""
    receive = socket.recv
    frame = receive(_NOBLOCK, False)
    frames: list[Any] = [frame.bytes]
    while frame.more:
        frame = receive(_NOBLOCK, False)
        frames.append(frame.bytes if len(frame) < UNCOPIED_FROM else frame)
    return frames


class RouterSocket:
    """The broker's socket. All methods from one thread.

    Args:
        endpoint: `ipc://PATH`, or `tcp://HOST:PORT` (port 0 = any free one). `self.endpoint` is what was bound.

    Raises:
        ConfigError: the endpoint is taken or malformed; names it.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._bound: str | None = None
        try:
            _refuse_taken(endpoint)
            self._socket.bind(endpoint)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ConfigError(f"broker.endpoint {endpoint!r} cannot be bound: {error}") from error
        self.endpoint: str = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        self._bound = _ipc_path(self.endpoint)

    def receive(self, timeout_ms: int) -> list[tuple[bytes, Frames]]:
        """Up to `BATCH` messages, each (identity, frames); waits up to ``timeout_ms`` for the first."""
        if not self._socket.poll(timeout_ms):
            return []
        batch: list[tuple[bytes, Frames]] = []
        try:
            while len(batch) < BATCH:
                identity, *frames = _receive(self._socket)
                batch.append((bytes(identity), frames))
        except zmq.Again:
            pass
        return batch

    def send(self, identity: bytes, frames: Frames) -> bool:
        """One message; False when the peer is gone or has stopped reading (never waits)."""
        try:
            _send(self._socket, [identity, *frames])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Close; waits at most `LINGER_MS`."""
        self._context.destroy(linger=LINGER_MS)
        if self._bound is not None:  # libzmq leaves the file behind
            with suppress(FileNotFoundError):
                os.unlink(self._bound)
            self._bound = None


def _ipc_path(endpoint: str) -> str | None:
    return endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else None


def _refuse_taken(endpoint: str) -> None:
    """Binding an ipc path silently deletes whatever is there; ask first whether somebody answers."""
    import socket as sockets

    path = _ipc_path(endpoint)
    if path is None:
        return
    if not os.path.isabs(path):
        raise OSError("the path must be absolute")
    if len(os.fsencode(path)) > IPC_PATH_MAX:
        raise OSError(f"path is longer than {IPC_PATH_MAX} bytes")
    if os.path.lexists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
        raise OSError("something that is no socket is there")
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return
    raise OSError("address already in use")


class DealerChannel:
    """A peer's lane to the broker (`zagent.wire.channel.Channel` over a DEALER), on the loop that opens it."""

    def __init__(self, endpoint: str, identity: bytes, on_hangup: Callable[[], None] | None = None) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._on_hangup = on_hangup
        self._monitor: zmq.Socket[bytes] | None = None
        self._monitor_fd = -1
        self._socket: zmq.Socket[bytes] | None = None
        self._backlog: deque[list[Buffer]] = deque()
        self._drain_due = False

    def open(self, receiver: Receiver) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        # One context, hence one I/O thread, per process (pyzmq makes a fresh one after a fork).
        try:
            self._socket = _context().socket(zmq.DEALER)
        except zmq.ZMQError as error:  # too many sockets, or files
            raise ConnectionLost(f"no socket for {self._endpoint!r}: {error}") from error
        _configure(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        try:
            if self._on_hangup is not None:
                self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
                self._loop.add_reader(self._monitor_fd, self._hear)
                self._hear()  # the descriptor tells of changes only, and only to who has looked once
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConnectionLost(f"{self._endpoint!r} is no endpoint: {error}") from error
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)

    def send(self, frames: Frames) -> None:
        if self._socket is None:
            raise ConnectionLost("the link to the broker is closed")
        self._backlog.append(list(map(bytes, frames)))
        # All sends of one turn of the loop go out together: one wake-up of the I/O thread, fuller segments. Sending may
        # also swallow the edge that announces arrivals, so the same callback looks for those before the loop sleeps.
        if not self._drain_due and not self._loop.is_closed():
            self._drain_due = True
            self._loop.call_soon(self._drain)

    def _try_send(self, frames: Sequence[Buffer]) -> bool:
        assert self._socket is not None
        try:
            _send(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def _drain(self) -> None:
        """Take all that has arrived, send what waits."""
        self._drain_due = False
        if self._socket is None:
            return
        while self._backlog and self._try_send(self._backlog[0]):
            self._backlog.popleft()
        batch: list[Frames] = []
        try:
            while len(batch) < BATCH:
                batch.append(_receive(self._socket))
        except zmq.Again:
            pass
        else:  # more may be there, and no edge will say so
            self._drain_due = True
            self._loop.call_soon(self._drain)
        if batch:
            self._receiver(batch)

    def _hear(self) -> None:
        """The monitor says one thing only: the other side has hung up. What it said before comes first."""
        if self._monitor is None or not self._monitor.poll(0):
            return
        self._monitor.recv_multipart(_NOBLOCK)
        self._drain()
        if self._on_hangup is not None:
            self._on_hangup()

    def close(self) -> None:
        if self._socket is None:
            return
        if self._monitor is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._monitor_fd)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        if hasattr(self, "_fd") and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        while self._backlog and self._try_send(self._backlog[0]):
            self._backlog.popleft()
        self._socket.close(linger=LINGER_MS)
        self._socket = None


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))  # not 1023: a link takes up to four
    return context


def terminate() -> None:
    """Send what is still queued on this process's closed channels; waits at most `LINGER_MS`. For processes that end
    without the interpreter's usual exit."""
    zmq.Context.instance().term()
