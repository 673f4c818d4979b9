"""One thread with an event loop of its own, so that synchronous calls also work inside a running loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from zagent.errors import ConnectionLost

Result = TypeVar("Result")
#: Seconds that work which is cancelled at the end may take to end.
SETTLE_S = 5.0


class IoThread:
    """Runs coroutines for other threads until `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(_settle())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start ``work`` on the loop. Cancelling the future cancels it there. Raises `ConnectionLost` once closed."""
        if self._closed or os.getpid() != self._pid:
            work.close()
            what = "is closed" if self._closed else "belongs to the process that made it, this is a fork of that"
            raise ConnectionLost(f"the manager {what}")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run ``work`` and wait for it; an interrupt here (Ctrl-C) cancels it there."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and join the thread. What still runs is cancelled, so that whoever waits for it wakes up."""
        self._closed = True
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()


async def _settle() -> None:
    """First let what was woken finish by itself (a closed link fails its calls), then cancel the rest."""
    for patience in (0.1, SETTLE_S):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=patience)
        for task in tasks:
            task.cancel()
