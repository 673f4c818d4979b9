"""Breaking off or freezing what runs in a simulated engine."""

from __future__ import annotations

import asyncio

from zagent.engine.base import PauseMode


class Halt:
    """Calls enter, sleep through their modelled time, and leave. A halt wakes the sleepers: they look at ``mode``, and
    end (`abort`), or wait until they may go on (`in_place`). Whoever comes meanwhile waits at the entrance."""

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self._sleeping: set[asyncio.Future[bool]] = set()
        self._inside = 0
        self._empty, self._open, self._thawed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self._empty, self._open, self._thawed):
            event.set()

    async def enter(self) -> None:
        """Wait for the end of a halt; then the call is inside, until it leaves."""
        while self.mode is not None:
            await self._open.wait()
        self._inside += 1
        self._empty.clear()

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def frozen(self) -> float:
        """Wait while the halt is `in_place`: until its end, or until it becomes an `abort`; how long that took, s."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self.mode == "in_place":
            await self._thawed.wait()
        return loop.time() - began

    async def sleep(self, seconds: float) -> bool:
        """Whether it was slept through; False: woken by a halt."""
        if self.mode is not None:
            return False
        loop = asyncio.get_running_loop()
        nap: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(seconds, _wake, nap, True)
        self._sleeping.add(nap)
        try:
            return await nap
        finally:
            timer.cancel()
            self._sleeping.discard(nap)

    async def begin(self, mode: PauseMode) -> None:
        """Returns when all are out (`abort`), or at once."""
        self.mode = mode
        self._open.clear()
        (self._thawed.set if mode == "abort" else self._thawed.clear)()
        for nap in self._sleeping:
            _wake(nap, False)
        if mode == "abort":
            await self._empty.wait()

    def end(self) -> None:
        """Go on."""
        self.mode = None
        self._open.set()
        self._thawed.set()


def _wake(nap: asyncio.Future[bool], through: bool) -> None:
    if not nap.done():
        nap.set_result(through)
