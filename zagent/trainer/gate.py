"""The gate of the engines' pool, as one manager holds it: closed for one reason or several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from zagent.client.calls import Calls
from zagent.client.llm_client import ENGINE_POOL
from zagent.errors import ZagentError
from zagent.trainer.control import Control


class Gate:
    """Calls to engines wait while there is a reason; those that run go on. All methods on the loop of ``calls``."""

    def __init__(self, calls: Calls, control: Control) -> None:
        self._control = control
        self._reasons: set[str] = set()
        self._changing = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None
        calls.link.on_rejoin(self._rejoined)

    async def close(self, reason: str) -> None:
        """Nothing passes from now on."""
        async with self._changing:
            new = reason not in self._reasons
            self._reasons.add(reason)
            try:
                await self._control.broker("close_gate", ENGINE_POOL)
            except BaseException:  # it may be closed all the same
                if new:
                    await self._let_go(reason)
                raise

    async def open(self, reason: str) -> None:
        """It opens when that was the last reason."""
        async with self._changing:
            await self._let_go(reason)

    async def _let_go(self, reason: str) -> None:
        self._reasons.discard(reason)
        if not self._reasons:
            await self._control.broker("open_gate", ENGINE_POOL)

    @asynccontextmanager
    async def closed(self, reason: str) -> AsyncIterator[None]:
        """Closed within."""
        await self.close(reason)
        try:
            yield
        finally:
            await self.open(reason)

    def _rejoined(self, same_broker: bool) -> None:
        """A broker that does not know of it: one that waits for its members still gives them nothing."""
        if self._reasons:
            self._again = asyncio.get_running_loop().create_task(self._close_again())

    async def _close_again(self) -> None:
        with suppress(ZagentError):  # it is gone again, and so will we hear
            async with self._changing:
                if self._reasons:  # still
                    await self._control.broker("close_gate", ENGINE_POOL)
