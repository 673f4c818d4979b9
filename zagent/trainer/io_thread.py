"""One thread with an event loop of its own, so that synchronous calls also work inside a running loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from zagent.errors import ConnectionLost

Result = TypeVar("Result")
#: Seconds that work which is cancelled at the end may take to end.
SETTLE_S = 5.0

logger = logging.getLogger(__name__)


class IoThread:
    """Runs coroutines for other threads until `close`. Whatever ends it, nobody waits for it any more then."""

    def __init__(self, name: str, whose: str = "the manager") -> None:
        """``whose``: for the text of errors."""
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_unheard)
        self._closing = asyncio.Event()
        self._whose = whose
        self._why = ""  # no work is taken on any more
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()  # of the two above: what was taken on is seen at the end
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        main = self.loop.create_task(self._main())
        try:
            while not main.done():
                try:
                    self.loop.run_until_complete(main)
                except (SystemExit, KeyboardInterrupt) as error:
                    # These two leave the loop, whichever task raised them. The task's future has them for whoever
                    # waits for it, who learns of that as the loop goes on.
                    logger.warning("%s raised in a task of %s, which goes on", type(error).__name__, self._thread.name)
        except BaseException as error:
            logger.exception("the event loop of %s has ended", self._thread.name)
            self._refuse(f"has lost its event loop: {type(error).__name__}: {error}")
        finally:
            self._fail_what_is_left()
            self.loop.close()

    async def _main(self) -> None:
        await self._closing.wait()
        await _settle()
        await self.loop.shutdown_asyncgens()

    def _refuse(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why

    def _fail_what_is_left(self) -> None:
        """No loop will answer those."""
        with self._lock:
            left = list(self._pending)
        for future in left:
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_exception(ConnectionLost(f"{self._whose} {self._why}"))

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start ``work`` on the loop. Cancelling the future cancels it there. Raises `ConnectionLost` once closed."""
        if os.getpid() != self._pid:
            work.close()
            raise ConnectionLost(f"{self._whose} belongs to the process that made it, this is a fork of that")
        with self._lock:
            if self._why:
                work.close()
                raise ConnectionLost(f"{self._whose} {self._why}")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
            self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run ``work`` and wait for it; an interrupt here (Ctrl-C) cancels it there."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the loop and join the thread. What still runs is cancelled, so that whoever waits for it wakes up."""
        if os.getpid() != self._pid:  # the thread is not in this fork
            return
        self._refuse("is closed")
        with suppress(RuntimeError):  # closed already
            self.loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()


def _unheard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Of errors that nobody waits for: work that was cancelled loses its connection where the manager is closed before
    it has tidied up. That is no news, and whoever asks next is told as well."""
    if isinstance(error := context.get("exception"), ConnectionLost):
        logger.debug("%s: %s", context["message"], error)
    else:
        loop.default_exception_handler(context)


async def _settle() -> None:
    """First let what was woken finish by itself (a closed link fails its calls), then cancel the rest."""
    for patience in (0.1, SETTLE_S):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
        for task in tasks:
            task.cancel()
