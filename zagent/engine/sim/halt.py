"""Breaking off or freezing what runs in a simulated engine."""

from __future__ import annotations

import asyncio

from zagent.engine.base import PauseMode
from zagent.engine.entrance import Entrance


class Halt:
    """Calls enter, sleep through their modelled time, and leave. A halt wakes the sleepers: they look at ``mode``, and
    end (`abort`), or wait until they may go on (`in_place`), as whoever comes meanwhile does at the entrance."""

    def __init__(self) -> None:
        self._entrance = Entrance()
        self._sleeping: set[asyncio.Future[bool]] = set()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def mode(self) -> PauseMode | None:
        """Of the halt; None while there is none."""
        return self._entrance.mode

    async def enter(self) -> bool:
        """As `Entrance.enter`. Then the call is inside, until it leaves."""
        if not await self._entrance.enter():
            return False
        self._inside += 1
        self._empty.clear()
        return True

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()

    async def frozen(self) -> float:
        """Wait while the halt is `in_place`: until its end, or until it becomes an `abort`; how long that took, s."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._entrance.enter()
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
        self._entrance.close(mode)
        for nap in self._sleeping:
            _wake(nap, False)
        if mode == "abort":
            await self._empty.wait()

    def end(self) -> None:
        """Go on."""
        self._entrance.open()


def _wake(nap: asyncio.Future[bool], through: bool) -> None:
    if not nap.done():
        nap.set_result(through)
