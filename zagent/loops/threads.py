"""The user's synchronous functions, off the event loop, each call in a thread of its own.

A pool's threads would be used up by calls that never return, and the calls behind them would wait for ever; and
`asyncio` joins its pool when it ends. These threads are daemons, and one that is stuck costs itself only.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from zagent.errors import CallCancelled, DeadlineExceeded

#: Calls that run at once. They share the interpreter with the event loop, which waits up to 5 ms for its turn behind
#: each that computes.
AT_ONCE = 16
#: A call that takes longer, in seconds, is thought to wait (for a network, a process, for ever) and no longer counts.
COMPUTES_S = 2.0


def started(function: Callable[[], Any], name: str = "user call") -> asyncio.Future[tuple[Any, BaseException | None]]:
    """Start ``function()`` in a thread of its own, with the caller's context variables. Gives its result or its error
    as a value: no future may hold a `StopIteration`, and a task with a `SystemExit` ends the event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def work() -> None:
        try:
            answer: tuple[Any, BaseException | None] = function(), None
        except BaseException as error:
            answer = None, error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, answer)

    def deliver(answer: tuple[Any, BaseException | None]) -> None:
        if not future.done():
            future.set_result(answer)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name=name, daemon=True).start()
    return future


class Threads:
    """Runs functions in threads, `AT_ONCE` of them at once, the rest in order."""

    def __init__(self, at_once: int = AT_ONCE, computes_s: float = COMPUTES_S) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._computes_s = computes_s

    async def run(self, function: Callable[[], Any], timeout: float) -> Any:
        """What ``function()`` returns or raises.

        Its ``timeout`` seconds begin when it starts. Beyond them, or when the caller is cancelled, its thread is left
        alone: nothing can end it.

        Raises:
            DeadlineExceeded: it has not returned in time.
            CallCancelled: it raised CancelledError of its own.
        """
        async with self._slots:
            future = started(function)
            await asyncio.wait((future,), timeout=min(self._computes_s, timeout))
        if timeout > self._computes_s:
            await asyncio.wait((future,), timeout=timeout - self._computes_s)
        if not future.done():
            raise DeadlineExceeded(f"the call took longer than {timeout:g} s")
        result, error = future.result()
        if isinstance(error, asyncio.CancelledError):
            raise CallCancelled("the call raised CancelledError though nobody cancelled it") from error
        if error is not None:
            raise error
        return result
