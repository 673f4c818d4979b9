"""A `MemoryRouter` on which messages take their time, and connections are lost."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable

from zagent.client.link import CONTROL, DATA
from zagent.wire.channel import Frames, MemoryRouter

Arrive = Callable[[bytes, Frames], None]
Message = tuple[Arrive, bytes, Frames]


class RoughRouter(MemoryRouter):
    """Each message takes up to ``slowest`` seconds, drawn from ``chance``; each lane keeps its own order, in each
    direction."""

    def __init__(self, chance: random.Random, slowest: float) -> None:
        super().__init__()
        self._chance, self._slowest = chance, slowest
        self._lanes: defaultdict[tuple[bytes, bool], deque[Message | None]] = defaultdict(deque)
        self._last: defaultdict[tuple[bytes, bool], float] = defaultdict(float)
        self._mute: dict[bytes, float] = {}

    def later(self, arrive: Arrive, identity: bytes, frames: Frames) -> None:
        loop = asyncio.get_running_loop()
        lane = identity, arrive == self._to_broker
        arrival = loop.time() + self._chance.random() * self._slowest
        not_before = self._mute.get(identity[1:], 0.0) if lane[1] else 0.0
        self._last[lane] = max(self._last[lane], arrival, not_before)
        self._lanes[lane].append((arrive, identity, frames))
        loop.call_at(self._last[lane], _next, self._lanes[lane])  # the head: timers of equal time keep no order

    def mute(self, nonce: bytes, until: float) -> None:
        """Nothing of what that peer says reaches the broker before that time."""
        self._mute[nonce] = until

    def cut(self) -> None:
        super().cut()
        for queue in self._lanes.values():
            _lose(queue)

    def connected(self, identity: bytes) -> None:
        asyncio.get_running_loop().call_later(self._chance.random() * self._slowest, self._connected, identity)

    def _connected(self, identity: bytes) -> None:
        if self._there and identity in self._waiting:  # not cut again meanwhile, nor connected by another try
            super().connected(identity)

    def lose(self, nonce: bytes) -> None:
        """That peer's connections, with what is under way on them; they are made again."""
        for lane in (DATA + nonce, CONTROL + nonce):
            for inwards in (True, False):
                _lose(self._lanes[lane, inwards])
            if lane not in self._waiting:
                self._waiting[lane] = []
                self.connected(lane)


def _next(queue: deque[Message | None]) -> None:
    message = queue.popleft()
    if message is not None:
        arrive, identity, frames = message
        arrive(identity, frames)


def _lose(queue: deque[Message | None]) -> None:
    """Their turn comes, but nothing arrives."""
    for place in range(len(queue)):
        queue[place] = None
