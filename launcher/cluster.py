"""The supervisor: starts a plan, watches what it started, ends it in order. One event loop, in the main thread."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher import logs, policy
from launcher.broker_line import BrokerLine, LinkFactory
from launcher.child import KILL_S, Child, describe
from launcher.ports import EnginePorts
from launcher.restarts import Restarts
from launcher.specs import ChildSpec, Plan, next_life
from launcher.startup import start
from zagent.config import LauncherConfig
from zagent.errors import ConnectionLost, MemberLost, StartupError, ZagentError

logger = logging.getLogger(__name__)

#: Ctrl-C, `kill`, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Context:
    """What a cluster is told beside its plan. ``trainer`` is the pidfd of a process to end with; ``link`` is called
    with the broker's endpoint and the run's secret; ``release`` lets go of ports right before their engine starts,
    ``note_child`` is told each child's pid."""

    run_id: str
    secret: str
    log_dir: Path
    limits: LauncherConfig
    trainer: int | None = None
    link: LinkFactory | None = None
    release: Callable[[EnginePorts], None] | None = None
    note_child: Callable[[int], None] | None = None


class Cluster:
    """The processes of one run."""

    def __init__(self, plan: Plan, context: Context) -> None:
        self._plan, self._context = plan, context
        self._loop = asyncio.get_running_loop()
        self._children: list[Child] = []
        self._restarts = Restarts(self._restart)
        self._line: BrokerLine | None = None
        self._serving = False
        self._orphaned = False
        #: Done once the cluster shall end; an exception is why it had to.
        self._ending: asyncio.Future[None] = self._loop.create_future()
        self._ending.add_done_callback(lambda ending: ending.cancelled() or ending.exception())
        self._at_once = asyncio.Event()

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Start, call ``on_ready`` with the endpoint, serve until told to stop, and end everything.

        Raises:
            ConfigError, UnknownAgent: a child cannot use its part of the configuration.
            StartupError: a child did not become ready.
            ConnectionLost: the broker died.
            MemberLost: the last engine or the last worker died.
        """
        self._watch()
        try:
            endpoint = await self._unless_ended(start(self._plan, self._spawn, self._context.limits.start_timeout_s))
            if endpoint is not None:
                self._serve(endpoint)
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

    def _spawn(self, spec: ChildSpec) -> Child:
        if spec.ports is not None and self._context.release is not None:
            self._context.release(spec.ports)
        child = Child(spec, self._log(spec), self._context.run_id)
        self._children.append(child)
        if self._context.note_child is not None:
            self._context.note_child(child.pid)
        child.exited.add_done_callback(lambda _: self._on_exit(child))
        return child

    def _serve(self, endpoint: str) -> None:
        if self._context.link is not None:
            self._line = BrokerLine(self._context.link(endpoint, self._context.secret))
        self._serving = True
        for child in self._children:  # one may have died since it was ready
            if child.exited.done():
                self._on_exit(child)

    def _on_exit(self, child: Child) -> None:
        if self._ending.done():
            return
        if not self._serving:
            self._on_early_exit(child)
            return
        became_ready = child.ready.done() and child.ready.exception() is None
        who = f"{child.spec.name} (pid {child.pid})"
        self._lost(child.spec, who, describe(child.exited.result()), became_ready=became_ready)

    def _lost(self, spec: ChildSpec, who: str, reason: str, *, became_ready: bool) -> None:
        """A life of ``spec`` is over: do as the policy decides."""
        logger.error("%s is gone: %s", spec.name, reason)
        decision = policy.on_exit(spec, self._others(spec), self._context.limits, became_ready=became_ready)
        if self._line is not None:
            for member in decision.report:
                self._line.exited(member, reason)
            if decision.abandon:
                self._line.abandoned(spec.pool, self._last_words(spec, who, reason))
        if decision.restart_after_s is not None:
            logger.info("%s is started again in %g s", spec.name, decision.restart_after_s)
            self._restarts.schedule(next_life(spec, became_ready=became_ready), decision.restart_after_s)
        if decision.end:
            self._ending.set_exception(self._fatal(spec, who, reason))

    def _others(self, spec: ChildSpec) -> int:
        """Further processes of the same pool that live, or will again."""
        alive = sum(c.spec.pool == spec.pool and not c.exited.done() for c in self._children)
        return alive + self._restarts.of_pool(spec.pool)

    def _restart(self, spec: ChildSpec) -> None:
        try:
            child = self._spawn(spec)
        except OSError as error:  # no memory, no file descriptors
            self._lost(spec, spec.name, f"it could not be started: {error}", became_ready=False)
            return
        limit = self._context.limits.start_timeout_s
        timer = self._loop.call_later(limit, self._give_up, child, limit)
        child.ready.add_done_callback(partial(self._started_again, child, timer))

    def _started_again(self, child: Child, timer: asyncio.TimerHandle, ready: asyncio.Future[Any]) -> None:
        timer.cancel()
        if ready.exception() is None:
            logger.info("%s is back, epoch %d", child.spec.name, child.spec.members[0].epoch)

    def _give_up(self, child: Child, limit: float) -> None:
        logger.error("%s said nothing within %g s, killing it", child.spec.name, limit)
        child.kill()

    def _on_early_exit(self, child: Child) -> None:
        """Start-up itself sees whoever is not ready yet; without the broker nobody else will be."""
        if child.spec.room == "broker" and child.ready.done() and not child.ready.exception():
            reason = describe(child.exited.result())
            fatal = self._fatal(child.spec, f"{child.spec.name} (pid {child.pid})", reason)
            self._ending.set_exception(StartupError(str(fatal)))

    def _last_words(self, spec: ChildSpec, who: str, reason: str) -> str:
        restarts = spec.members[0].epoch - 1
        after = f", after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
        return f"{who} is gone, and no {spec.pool} is left{after}: {reason}{logs.quoted(self._log(spec))}"

    def _fatal(self, spec: ChildSpec, who: str, reason: str) -> ZagentError:
        if spec.room == "broker":
            return ConnectionLost(f"the {who} is gone: {reason}{logs.quoted(self._log(spec))}")
        return MemberLost(self._last_words(spec, who, reason))

    def _log(self, spec: ChildSpec) -> Path:
        return self._context.log_dir / f"{spec.name}.log"

    async def _close(self) -> None:
        self._serving = False
        self._restarts.cancel()
        if self._line is not None:
            await self._line.close()
        for room in policy.STOP_ORDER:
            await self._stop([c for c in self._children if c.spec.room == room and not c.exited.done()], room)
        left = [child.spec.name for child in self._children if not child.exited.done()]
        if left:
            logger.error("not even SIGKILL ended %s: stuck in the kernel", ", ".join(left))
        self._unwatch()

    async def _stop(self, children: Sequence[Child], room: str) -> None:
        """TERM, then KILL, for all of a room together."""
        for child in children:
            child.terminate()
        timeout = policy.stop_timeout_s(room, self._context.limits.stop_timeout_s, orphaned=self._orphaned)
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
