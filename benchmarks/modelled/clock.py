"""Virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Clock:
    """Events in the order of their time; those of one time in the order they were made."""

    def __init__(self) -> None:
        self.now = 0.0  #: s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Let it happen then."""
        self._made += 1
        heappush(self._events, (time, self._made, event))

    def run(self) -> None:
        """Until nothing more will happen."""
        while self._events:
            self.now, _, event = heappop(self._events)
            event()
