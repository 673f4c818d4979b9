"""The supervisor's line to the broker: reports that nobody waits for, and whose failure ends nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from launcher.specs import Member

logger = logging.getLogger(__name__)

#: The broker answers at once or is in trouble itself.
REPORT_S = 2.0


class BrokerLink(Protocol):
    """The launcher's link to the broker."""

    async def exited(self, pool: str, name: str, epoch: int, reason: str) -> None:
        """The member is gone: answer its calls with `MemberLost`."""

    async def abandoned(self, pool: str, reason: str) -> None:
        """The pool has nobody left: answer its calls with `PoolLost`."""

    async def close(self) -> None:
        """Hang up."""


#: Called with the broker's endpoint and the run's secret.
LinkFactory = Callable[[str, str], BrokerLink]


class BrokerLine:
    """Sends reports in the order in which they are made."""

    def __init__(self, link: BrokerLink) -> None:
        self._link = link
        self._tasks: set[asyncio.Task[None]] = set()

    def exited(self, member: Member, reason: str) -> None:
        """That member is gone."""
        report = self._link.exited(member.pool, member.name, member.epoch, reason)
        self._send(report, f"the broker was not told that {member.name} is gone")

    def abandoned(self, pool: str, reason: str) -> None:
        """Nobody will serve that pool any more."""
        self._send(self._link.abandoned(pool, reason), f"the broker was not told that nobody is left in pool {pool}")

    def _send(self, report: Coroutine[Any, Any, None], failure: str) -> None:
        task = asyncio.get_running_loop().create_task(_within(report, failure))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Once all is said, hang up."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=REPORT_S)
        await _within(self._link.close(), "the line to the broker did not close")


async def _within(work: Coroutine[Any, Any, None], failure: str) -> None:
    try:
        await asyncio.wait_for(work, REPORT_S)
    except Exception:
        logger.exception(failure)
