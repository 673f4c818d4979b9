"""The supervisor: starts a plan, serves until something ends it, ends it in order. One event loop, main thread."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from launcher import logs, policy
from launcher.child import KILL_S, Child
from launcher.children import Children
from launcher.context import Context
from launcher.lives import Lives
from launcher.specs import Plan
from launcher.startup import start
from zagent.errors import StartupError, ZagentError

logger = logging.getLogger(__name__)

#: Ctrl-C, `kill`, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Cluster:
    """The processes of one run."""

    def __init__(self, plan: Plan, context: Context) -> None:
        self._plan, self._context = plan, context
        self._loop = asyncio.get_running_loop()
        self._children = Children(context, self._on_death, self._on_exit)
        self._lives: Lives | None = None  #: once it serves
        self._started = False  #: all have become ready
        self._orphaned = False
        #: Done once the cluster shall end; an exception is why it had to.
        self._ending: asyncio.Future[None] = self._loop.create_future()
        self._ending.add_done_callback(lambda ending: ending.cancelled() or ending.exception())
        self._at_once = asyncio.Event()

    async def run(
        self, on_ready: Callable[[str], None], on_serving: Callable[[str], None] = lambda _endpoint: None
    ) -> None:
        """Start, call ``on_ready`` with the endpoint, serve until told to stop, and end everything. ``on_serving`` is
        called before, when workers are still missing.

        Raises:
            ConfigError, UnknownAgent: a child cannot use its part of the configuration.
            StartupError: a child did not become ready.
            ConnectionLost: the broker died too often.
            PoolLost: the engines or the workers died too often.
        """

        def serving(endpoint: str) -> None:
            on_serving(endpoint)  # first: the line to the broker takes its time
            self._serve(endpoint)

        self._watch()
        try:
            limit = self._context.limits.start_timeout_s
            endpoint = await self._unless_ended(start(self._plan, self._children.spawn, limit, serving))
            if endpoint is not None:
                self._started = True
                on_ready(endpoint)
                await self._ending
        finally:
            await self._close()
        if self._ending.done():
            self._ending.result()

    def stop(self) -> None:
        """End in order; said again, at once."""
        if self._ending.done():
            self._at_once.set()
        else:
            self._ending.set_result(None)

    def _fail(self, error: ZagentError) -> None:
        """End, since it cannot go on."""
        if not self._ending.done():
            self._ending.set_exception(error)

    def _watch(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup SIGHUP stays ignored
                self._loop.add_signal_handler(number, self._on_signal, number)
        if self._context.trainer is not None:
            self._loop.add_reader(self._context.trainer, self._on_trainer_exit)

    def _unwatch(self) -> None:
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)
        if self._context.trainer is not None:
            self._loop.remove_reader(self._context.trainer)

    def _on_signal(self, number: int) -> None:
        logger.info("%s: %s", signal.Signals(number).name, "ending at once" if self._ending.done() else "ending")
        self.stop()

    def _on_trainer_exit(self) -> None:
        assert self._context.trainer is not None
        self._loop.remove_reader(self._context.trainer)
        logger.warning("the trainer is gone, ending")
        self._orphaned = True
        self.stop()

    async def _unless_ended(self, work: Coroutine[Any, Any, str]) -> str | None:
        """The result of ``work``, or None if the cluster shall end first."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._ending}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None

    def _serve(self, endpoint: str) -> None:
        self._lives = Lives(self._children, self._context, endpoint, self._fail)
        for child in self._children:  # one may have died since it was ready
            if child.died.done():
                self._on_death(child)
            if child.exited.done():
                self._on_exit(child)

    def _on_death(self, child: Child) -> None:
        if self._ending.done():
            return
        if self._lives is not None and self._belongs(child):
            self._lives.on_death(child)
        elif child.spec.room == "broker" and child.became_ready:
            # Start-up itself sees whoever is not ready yet; without the broker nobody else will be.
            died = f"{child.spec.name} (pid {child.pid}) died while the others started: {child.end}"
            self._fail(StartupError(died + logs.quoted(child.log)))

    def _on_exit(self, child: Child) -> None:
        if self._lives is not None and self._belongs(child) and not self._ending.done():
            self._lives.on_exit(child)

    def _belongs(self, child: Child) -> bool:
        """Whether it has served, or all have, or it is no first life: start-up itself sees who else is not ready."""
        return self._started or child.became_ready or child.spec.life > 1

    async def _close(self) -> None:
        lives, self._lives = self._lives, None
        if lives is not None:
            await lives.close()
        for room in policy.STOP_ORDER:
            await self._stop([c for c in self._children if c.spec.room == room and not c.exited.done()], room)
        left = [child.spec.name for child in self._children if not child.exited.done()]
        if left:
            logger.error("not even SIGKILL ended %s: stuck in the kernel", ", ".join(left))
        self._unwatch()

    async def _stop(self, children: Sequence[Child], room: str) -> None:
        """TERM, then KILL, for all of a room together."""
        timeout = policy.stop_timeout_s(room, self._context.limits.stop_timeout_s, orphaned=self._orphaned)
        if children:
            logger.info("ending %s, at most %g s", ", ".join(c.spec.name for c in children), timeout)
        for child in children:
            child.terminate()
        await self._exits(children, timeout)
        late = [child for child in children if not child.exited.done()]
        for child in late:
            logger.warning("%s did not end on SIGTERM, killing it", child.spec.name)
            child.kill()
        if late:
            await asyncio.wait([child.exited for child in late], timeout=KILL_S)

    async def _exits(self, children: Iterable[Child], timeout: float) -> None:
        """Until all have exited, the time is up, or somebody is impatient."""
        pending: set[asyncio.Future[Any]] = {child.exited for child in children}
        impatient: asyncio.Future[Any] = asyncio.ensure_future(self._at_once.wait())
        deadline = self._loop.time() + timeout
        while pending and not impatient.done() and self._loop.time() < deadline:
            left = deadline - self._loop.time()
            await asyncio.wait({*pending, impatient}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            pending = {exited for exited in pending if not exited.done()}
        impatient.cancel()


def open_trainer(pid: int) -> int | None:
    """A pidfd of our parent ``pid``; None if it is gone (the pid may be somebody else's by now)."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if os.getppid() != pid:
        os.close(handle)
        return None
    return handle
