"""An event loop on virtual time: when nothing is ready, the clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:  # nothing is scheduled and nobody else is at work
            raise RuntimeError("forgotten wake-up: every task waits and no timer is set")
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """For code that waits by this loop only: threads and foreign sockets look like a forgotten wake-up to it."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self._clock_resolution = 1e-9  # now + (when - now) may fall short of `when` by a rounding error

    def time(self) -> float:
        return self._jump.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on virtual time. Raises `RuntimeError` where ``main`` would wait for ever."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
