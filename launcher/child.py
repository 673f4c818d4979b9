"""One child process as its launcher sees it: spawned, ready or dead, heard of, told to stop, and gone with all it
started.

Used on one event loop, in the main thread: the kernel ties PR_SET_PDEATHSIG to the thread that spawns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher import logs, policy, processes, starting
from launcher.health import Signs
from launcher.heartbeat import OUT_OF_MEMORY
from launcher.specs import ChildSpec
from zagent.errors import CallerError, StartupError, from_wire

logger = logging.getLogger(__name__)

#: SIGKILL to gone; the kernel needs the time to free memory (and a GPU's driver to unmap it).
KILL_S = 2.0
#: SIGABRT to SIGKILL: time to write the stacks of all threads into the log.
ABORT_S = 2.0
#: A report is a name, a few numbers or a traceback.
REPORT_BYTES = 1 << 20


class Child:
    """A spawned process. ``ready`` becomes the room's info, or raises `StartupError` (the room's own error where that
    is a `CallerError`); ``died`` becomes the exit code (negative = killed by that signal) at once; ``exited`` the same,
    once what the process started is gone as well."""

    def __init__(self, spec: ChildSpec, log: Path, run_id: str) -> None:
        """Start it. ``spec.settings`` must be complete. Raises `OSError`: no memory, no file descriptors, no such
        interpreter."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("children are spawned from the main thread: they die with the thread that spawned them")
        self.spec, self.log = spec, log
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Mapping[str, Any]] = self._loop.create_future()
        self.died: asyncio.Future[int] = self._loop.create_future()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.ready.add_done_callback(_retrieve)  # a failed start is reported once, for all of its children
        #: Why we have given it up; "" while we have not.
        self.given_up = ""
        self._hung = False
        self._heard: float | None = None  # s, on the loop's clock; None = nothing can be
        self._lag_s, self._what = 0.0, ""
        self._reports, theirs = multiprocessing.Pipe(duplex=False)
        try:
            self._process = starting.start(spec, log, theirs)
        except OSError:
            self._reports.close()
            raise
        finally:
            theirs.close()
        self.pid: int = self._process.pid or 0
        # Not multiprocessing's sentinel: that is a pipe, which a child's own fork keeps open beyond its death.
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # too many open files: a child that nobody watches must not be
            self._process.kill()
            self._process.join()
            raise
        self._line = self._reports.fileno()
        self._loop.add_reader(self._line, self._read_report)
        self._loop.add_reader(self._pidfd, self._note_death)
        logger.info("%s started, pid %d", spec.name, self.pid)

    @property
    def became_ready(self) -> bool:
        """Whether it serves, or did."""
        return self.ready.done() and self.ready.exception() is None

    @property
    def serves(self) -> bool:
        """Whether it is ready and alive."""
        return self.became_ready and not self.died.done()

    @property
    def crashed(self) -> bool:
        """Whether it died by itself. Once it is dead."""
        return policy.crashed(self.died.result(), hung=self._hung)

    @property
    def end(self) -> str:
        """What became of it, in words. Once it is dead."""
        how = describe(self.died.result())
        return f"{self.given_up}, and {how}" if self.given_up else how

    def signs(self) -> Signs:
        """Its signs of life."""
        silent_s = 0.0 if self._heard is None else self._loop.time() - self._heard
        return Signs(silent_s, self._lag_s, self._what)

    def terminate(self) -> None:
        """Ask it to end in order (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL it and all it started. They are gone when ``exited`` is done."""
        if not self.exited.done():
            for process in self._left_behind():  # before it dies and its children have another parent
                processes.kill(process)

    def give_up(self, why: str) -> None:
        """End it for ``why``, which its end will tell. SIGABRT comes first, so that its log shows where it hung; one
        that was stopped from outside could not write that."""
        process = processes.read(self.pid)
        if process is not None and process.stopped:
            self.given_up = f"{why} (it was stopped)"
            self.kill()
            return
        self.given_up, self._hung = why, True
        self._signal(signal.SIGABRT)
        self._loop.call_later(ABORT_S, self.kill)

    def _signal(self, number: int) -> None:
        if not self.exited.done():
            with suppress(ProcessLookupError):  # dead and reaped
                signal.pidfd_send_signal(self._pidfd, number)

    def failure(self, what: str, reported: Exception | None = None) -> StartupError:
        """The error for a child that did not become ready: its name, what happened, what it said, its last lines."""
        said = f": {type(reported).__name__}: {reported}" if reported is not None else ""
        error = StartupError(f"{self.spec.name} did not become ready: {what}{said}{logs.quoted(self.log)}")
        error.__cause__ = reported
        return error

    def _read_report(self) -> None:
        # One message at a time, so that none is waited for: the pipe has a whole beat, or nothing of it.
        try:
            report = json.loads(self._reports.recv_bytes(REPORT_BYTES))
        except (EOFError, OSError):  # it died, or closed the line: nothing more will be heard
            self._hang_up()
            return
        self._heard = self._loop.time()
        if report["event"] == "beat":
            self._lag_s, self._what = report["lag_s"] or 0.0, report["what"]
        elif not self.ready.done():
            self._settle(report)

    def _settle(self, report: Mapping[str, Any]) -> None:
        """It is ready, or says why it will not be."""
        if report["event"] == "ready":
            self.ready.set_result(report["info"])
            return
        error = from_wire(report["error"])
        if isinstance(error, CallerError):  # a configuration that only the room could judge: its message says it all
            self.ready.set_exception(error)
        else:
            self.ready.set_exception(self.failure("it failed", error))

    def _hang_up(self) -> None:
        self._loop.remove_reader(self._line)
        self._reports.close()
        self._heard, self._lag_s = None, 0.0

    def _note_death(self) -> None:
        self._loop.remove_reader(self._pidfd)
        while not self._reports.closed and self._reports.poll():
            self._read_report()  # what it said last is more telling than its exit code
        if not self._reports.closed:  # a fork of its holds the other end
            self._hang_up()
        code = self._exit_code()
        if not self.ready.done():
            self.ready.set_exception(self.failure(describe(code)))
        self.died.set_result(code)
        self._burial = self._loop.create_task(self._bury(code))

    def _exit_code(self) -> int:
        """Leaves it a zombie, so that its pid and session are not used again while we look for what it started."""
        try:
            end = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # multiprocessing reaps whoever is dead when it starts another
            return self._process.exitcode or 0
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    async def _bury(self, code: int) -> None:
        """Until nothing of it is left, and others are looked after meanwhile: to unmap a large memory takes a while."""
        deadline = self._loop.time() + KILL_S
        while (left := self._left_behind()) and self._loop.time() < deadline:
            for process in left:  # again and again: a dying process may still fork
                processes.kill(process)
            await asyncio.sleep(processes.POLL_S)
        if left:
            logger.error("%s left processes that do not end: %s", self.spec.name, [p.pid for p in left])
        self._process.join()
        os.close(self._pidfd)
        logger.info("%s (pid %d): %s", self.spec.name, self.pid, self.end)
        self.exited.set_result(code)

    def _left_behind(self) -> list[processes.Process]:
        return processes.of_child(self.pid, self.spec.name, self._run_id)


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"it exited with code {code}" + (", beyond its memory limit" if code == OUT_OF_MEMORY else "")
    known = -code in set(signal.Signals)
    return f"it was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
