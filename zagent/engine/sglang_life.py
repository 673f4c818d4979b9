"""Whether SGLang lives: the ends of its processes, their cries for help, their silence."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from zagent.engine.base import Death
from zagent.engine.children import ChildWatch, is_stopped

logger = logging.getLogger(__name__)

#: How often the scheduler is asked for an answer, in seconds. It costs it a millisecond.
ASK_EVERY_S = 10.0


class Life:
    """Watches over SGLang's processes ``pids`` from construction on, and says at most once that all is over.

    ``hung_after_s`` seconds without a sign of one of them are an end, too; 0 = never.
    """

    #: Resolved with the end.
    died: asyncio.Future[Death]

    def __init__(self, pids: Iterable[int], hung_after_s: float) -> None:
        """Raises `StartupError` if one of ``pids`` is gone already."""
        self._pids = tuple(pids)
        self._hung_after_s = hung_after_s
        self._children = ChildWatch(self._pids)
        self._tasks: set[asyncio.Future[Any]] = set()

    def start(self, ask: Callable[[], Awaitable[Any]]) -> None:
        """On the running loop, which takes SIGQUIT from now on. ``ask`` comes back when the scheduler has answered; it
        is never cancelled before the end, as SGLang would hand the late answer to who asks next."""
        loop = asyncio.get_running_loop()
        self.died = loop.create_future()
        self._children.start(self.end)
        cry = Death("a process of SGLang reported a failure", crashed=True)
        loop.add_signal_handler(signal.SIGQUIT, self.end, cry)
        if self._hung_after_s:
            self.keep(asyncio.ensure_future(self._listen(ask)))

    def keep(self, task: asyncio.Future[Any]) -> asyncio.Future[Any]:
        """``task`` runs to its end, whoever still waits for it, or to that of SGLang."""
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: no complaint that nobody looked

    def receives(self, receiver: asyncio.Future[Any]) -> None:
        """The end of ``receiver`` is SGLang's."""
        self.keep(receiver).add_done_callback(self._receiver_ended)

    def _receiver_ended(self, receiver: asyncio.Future[Any]) -> None:
        if not receiver.cancelled():
            self.end(Death(f"SGLang's receive loop ended: {receiver.exception()!r}", crashed=True))

    def end(self, death: Death) -> None:
        """SGLang is broken for good."""
        if not self.died.done():
            logger.error("SGLang is broken: %s", death.reason)
            self.died.set_result(death)

    def stop(self) -> None:
        """No more looking; all that is kept is cancelled. May be called twice."""
        self._children.stop()
        for task in self._tasks:
            task.cancel()

    async def _listen(self, ask: Callable[[], Awaitable[Any]]) -> None:
        """Rounds without an answer are counted, not seconds: this process may have stood still itself."""
        every, silent = min(ASK_EVERY_S, self._hung_after_s / 4), 0
        answer = self.keep(asyncio.ensure_future(ask()))
        while silent * every < self._hung_after_s:
            await asyncio.sleep(every)
            stopped = [pid for pid in self._pids if is_stopped(pid)]
            silent = silent + 1 if stopped or not answer.done() else 0
            if answer.done():
                answer = self.keep(asyncio.ensure_future(ask()))
        what = f"process {stopped[0]} of SGLang has been stopped" if stopped else "SGLang's scheduler has not answered"
        self.end(Death(f"{what} for {silent * every:.0f} s", crashed=not stopped))
