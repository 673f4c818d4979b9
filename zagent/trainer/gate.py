"""The gate of the engines' pool, as one manager holds it: closed for one reason or several. And the manager's turn to
change the engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from zagent.client.calls import Calls
from zagent.client.llm_client import ENGINE_POOL
from zagent.trainer.control import Control


class Gate:
    """Calls to engines wait while there is a reason; those that run go on. All methods on the loop of ``calls``.

    What is held is said in each hello of the link: a broker that knows nothing of it hears it before anything passes.
    """

    def __init__(self, calls: Calls, control: Control) -> None:
        self._control = control
        self._identity = calls.link.identity
        self._reasons: set[str] = set()
        self._changing = asyncio.Lock()
        self._turns = asyncio.Lock()
        self._has_turn = False  #: as the broker says
        calls.link.hello_facts = self._facts

    def _facts(self) -> dict[str, Any]:
        gates = [[ENGINE_POOL, reason] for reason in sorted(self._reasons)]
        turns = [ENGINE_POOL] if self._has_turn else []
        return {**self._identity.facts, "gates": gates, "turns": turns}

    async def close(self, reason: str) -> None:
        """Nothing passes from now on."""
        async with self._changing:
            new = reason not in self._reasons
            self._reasons.add(reason)
            try:
                await self._control.broker("close_gate", [ENGINE_POOL, reason])
            except BaseException:  # it may be closed all the same
                if new:
                    await self._let_go(reason)
                raise

    async def open(self, reason: str) -> None:
        """It opens when that was the last reason. `asleep` is none any more, either, when nobody sleeps."""
        async with self._changing:
            await self._let_go(reason)

    async def _let_go(self, reason: str) -> None:
        self._reasons.discard(reason)
        await self._control.broker("open_gate", [ENGINE_POOL, reason])

    @asynccontextmanager
    async def closed(self, reason: str) -> AsyncIterator[None]:
        """Closed within."""
        await self.close(reason)
        try:
            yield
        finally:
            await self.open(reason)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Nobody else changes the engines within: updates their weights, makes them sleep or wake up. This manager's
        own orders wait for each other. Raises `StateError` where it is another trainer's turn."""
        async with self._turns:
            await self._control.status()  # which waits until a new broker has heard whose turn it is
            try:
                await self._control.broker("take_turn", ENGINE_POOL)
                self._has_turn = True
                yield
            finally:
                self._has_turn = False
                await self._control.broker("end_turn", ENGINE_POOL)
