"""What becomes of calls that come while an engine is paused."""

from __future__ import annotations

import asyncio

from zagent.engine.base import PauseMode


class Entrance:
    """They wait while running calls stand still, and end while these are broken off: a pause travels on another lane
    than calls, and overtakes some that whoever pauses the engine waits for."""

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self._moving = asyncio.Event()
        self._moving.set()

    def close(self, mode: PauseMode) -> None:
        self.mode = mode
        (self._moving.clear if mode == "in_place" else self._moving.set)()

    def open(self) -> None:
        self.mode = None
        self._moving.set()

    async def enter(self) -> bool:
        """Wait until nothing stands still. Whether the call may go on; else it is broken off, as all are."""
        while self.mode == "in_place":
            await self._moving.wait()
        return self.mode is None
