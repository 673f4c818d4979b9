"""A broker's socket that sends everything back, and channels that speak with it."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

from zagent.wire.channel import Frames
from zagent.wire.sockets import DealerChannel, RouterSocket

#: Only a failing test waits as long, in s.
PATIENCE_S = 20.0


class Echo:
    """Serves from a thread of its own while it is entered. ``received``: (identity, frames) so far."""

    def __init__(self, endpoint: str, keys: str | None = None) -> None:
        self.router = RouterSocket(endpoint, keys)
        self.endpoint = self.router.endpoint
        self.received: list[tuple[bytes, list[bytes]]] = []
        self.turned_away = 0
        #: Set each time the broker has looked around.
        self.looks = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="echo")

    def __enter__(self) -> Echo:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
        self.router.close()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            for identity, frames in self.router.receive(20):
                self.received.append((identity, [bytes(frame) for frame in frames]))
                self.router.send(identity, frames)
            self.turned_away = self.router.turned_away()
            self.looks.set()


class Peer:
    """A channel, open on the running loop; `ask` waits for the echo. ``reconnections`` counts."""

    def __init__(self, endpoint: str, identity: bytes = b"d-peer") -> None:
        self.channel = DealerChannel(endpoint, identity)
        self.reconnections = 0
        self.reconnected = asyncio.Event()
        self.answers: asyncio.Queue[Frames] = asyncio.Queue()
        self.channel.open(self._receive, self._count)

    def _receive(self, batch: list[Frames]) -> None:
        for frames in batch:
            self.answers.put_nowait([bytes(frame) for frame in frames])

    def _count(self) -> None:
        self.reconnections += 1
        self.reconnected.set()

    async def ask(self, *frames: bytes, within_s: float = PATIENCE_S) -> Frames:
        """Raises `TimeoutError`."""
        self.channel.send(frames)
        return await asyncio.wait_for(self.answers.get(), within_s)

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.channel.close()
