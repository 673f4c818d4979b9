"""A peer of bytes: what says ZMTP (ZeroMQ's RFC 37) to a broker, rightly or wrongly, without libzmq's help."""

from __future__ import annotations

import socket
from contextlib import suppress
from types import TracebackType

#: Only a failing test waits as long, in s.
PATIENCE_S = 20.0
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"


def greeting(mechanism: bytes = b"NULL", version: bytes = b"\3\1") -> bytes:
    """The first 64 bytes of either side."""
    return SIGNATURE + version + mechanism.ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    """``flags``: 1 = more frames of the message follow, 4 = a command."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


def message(frames: list[bytes]) -> bytes:
    return b"".join(frame(one, flags=1) for one in frames[:-1]) + frame(frames[-1])


def ready(identity: bytes, kind: bytes = b"DEALER") -> bytes:
    def known(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value

    return frame(b"\5READY" + known(b"Socket-Type", kind) + known(b"Identity", identity), flags=4)


class RawPeer:
    """A connection to ``endpoint`` that has said nothing yet."""

    def __init__(self, endpoint: str) -> None:
        scheme, _, place = endpoint.partition("://")
        self.socket = socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET)
        host, _, port = place.partition("?")[0].rpartition(":")
        try:
            self.socket.connect(place if scheme == "ipc" else (host, int(port)))
        except OSError:
            self.socket.close()
            raise
        self.socket.settimeout(PATIENCE_S)  # not before: a full backlog is waited for

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.socket.close()

    def shake_hands(self, identity: bytes) -> RawPeer:
        """Up to the point where messages may be sent: the broker has said its READY."""
        self.socket.sendall(greeting() + ready(identity))
        self.read(len(greeting()))
        self.read(self.read(2)[1])
        return self

    def read(self, count: int) -> bytes:
        """``count`` bytes."""
        got = b""
        while len(got) < count:
            more = self.socket.recv(count - len(got))
            assert more, f"the other side closed after {got!r}"
            got += more
        return got

    def receive(self) -> list[bytes]:
        """The frames of the next message; commands are passed over."""
        frames: list[bytes] = []
        while True:
            flags, *_ = self.read(1)
            body = self.read(int.from_bytes(self.read(8 if flags & 2 else 1), "big"))
            if flags & 4:
                continue
            frames.append(body)
            if not flags & 1:
                return frames

    def send(self, data: bytes) -> None:
        """As much of it as the other side lets us."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def rest(self) -> bytes:
        """What still comes until the other side closes the connection."""
        got = b""
        with suppress(ConnectionResetError):
            while more := self.socket.recv(65536):
                got += more
        return got
