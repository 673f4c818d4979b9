"""Places in the batch and the time that calls take in them, both as modelled: an event loop that wakes late (a busy
machine, hundreds of engines in one process) delays answers, but makes no engine slower than it is said to be."""

from __future__ import annotations

import asyncio
from collections import deque

from zagent.engine.sim.halt import Halt

#: Part of a token by which sums of times may miss its end.
ROUNDING = 1e-6


class Places:
    """So many calls at once, the others in order of arrival. A place is handed on as of the modelled time at which it
    became free, which may be a little before the event loop knows."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[float]] = deque()

    async def take(self, arrived: float) -> float:
        """Wait for a place; since when it is the caller's. Times are the loop's."""
        if self._free:
            self._free -= 1
            return arrived
        turn: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return max(arrived, await turn)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came in the same moment
                self.give_back(turn.result())
            raise

    def give_back(self, at: float) -> None:
        """Free as of the time ``at``."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(at)
                return
        self._free += 1


class Pace:
    """One call's time: each part ends when it should, however late the one before was noticed.

    Args:
        began: when the call got its place.
        factor: how many times longer everything takes.
        halt: may wake it early.
    """

    def __init__(self, began: float, factor: float, halt: Halt) -> None:
        self.time = began
        self._factor = factor
        self._halt = halt

    async def spend(self, tokens: int, tokens_per_s: float) -> int:
        """Sleep until ``tokens`` more are done, at once with 0 tokens per second; how many are, if a halt came before
        the last one. The one that was under way then is not: its time is given back."""
        if not tokens or not tokens_per_s:
            return tokens
        began, each = self.time, self._factor / tokens_per_s
        self.time += tokens * each
        if await self._halt.sleep(max(0.0, self.time - asyncio.get_running_loop().time())):
            return tokens
        passed = max(0.0, asyncio.get_running_loop().time() - began)
        done = min(tokens, int(passed / each + ROUNDING))
        self.time = began + done * each
        return done
