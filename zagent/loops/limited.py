"""The user's coroutines, which may hang, ignore their cancellation, or raise what would end the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

from zagent.errors import CallCancelled, DeadlineExceeded

logger = logging.getLogger(__name__)

#: Seconds that work may take to end once it is cancelled.
CANCEL_GRACE_S = 10.0


async def limited(work: Awaitable[Any], seconds: float, what: str) -> Any:
    """The result of ``work``, which errors call ``what``.

    Raises:
        DeadlineExceeded: it took longer than ``seconds``, and was cancelled.
        CallCancelled: it raised CancelledError though nobody cancelled it.
        BaseException: whatever else it raised.
    """
    try:
        async with asyncio.timeout(seconds) as clock:
            return await within_grace(work, what)
    except TimeoutError as error:
        if clock.expired():
            raise DeadlineExceeded(f"{what} took longer than {seconds:g} s") from error
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise CallCancelled(f"{what} raised CancelledError though nobody cancelled it") from error


async def within_grace(work: Awaitable[Any], what: str) -> Any:
    """The result of ``work``. Once cancelled it has `CANCEL_GRACE_S` to end; work that goes on is left behind, for the
    row must end (deadline, caller gone) whatever its loop does."""

    async def contained() -> tuple[Any, BaseException | None]:
        try:
            return await work, None
        except BaseException as error:  # SystemExit would end the event loop if it got out of a task
            return None, error

    task = asyncio.ensure_future(contained())
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait((task,), timeout=CANCEL_GRACE_S)
        if not task.done():
            logger.warning("%s goes on though it was cancelled %g s ago: left behind", what, CANCEL_GRACE_S)
            raise
        if task.cancelled() or isinstance(task.result()[1], (asyncio.CancelledError, type(None))):
            raise
    result, error = task.result()
    if error is not None:
        raise error
    return result
