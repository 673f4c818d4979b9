"""One child process as its launcher sees it: spawned, ready or dead, told to stop, and gone with all it started.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launcher import bootstrap, logs, processes
from launcher.specs import ChildSpec
from zagent.errors import CallerError, StartupError, from_wire

logger = logging.getLogger(__name__)

#: SIGKILL to gone; the kernel needs the time to free memory (and a GPU's driver to unmap it).
KILL_S = 2.0
#: A report is a name, a few numbers or a traceback.
REPORT_BYTES = 1 << 20


class Child:
    """A spawned process. ``ready`` becomes the room's info, or raises `StartupError` (the room's own error where that
    is a `CallerError`); ``exited`` becomes the exit code (negative = killed by that signal), once the process and what
    it started are gone."""

    def __init__(self, spec: ChildSpec, log: Path, run_id: str) -> None:
        """Spawn it. ``spec.settings`` must be complete."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("children are spawned from the main thread: they die with the thread that spawned them")
        self.spec, self.log = spec, log
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Mapping[str, Any]] = self._loop.create_future()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.ready.add_done_callback(_retrieve)  # a failed start is reported once, for all of its children
        self._reports, theirs = multiprocessing.Pipe(duplex=False)
        self._process = _spawn(spec, log, theirs)
        theirs.close()
        self.pid: int = self._process.pid or 0
        # Not multiprocessing's sentinel: that is a pipe, which a child's own fork keeps open beyond its death.
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._reports.fileno(), self._read_report)
        self._loop.add_reader(self._pidfd, self._note_exit)
        logger.info("%s started, pid %d", spec.name, self.pid)

    def terminate(self) -> None:
        """Ask it to end in order (SIGTERM)."""
        if not self.exited.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL it and all it started. They are gone when ``exited`` is done."""
        if not self.exited.done():
            for process in self._left_behind():  # before it dies and its children have another parent
                processes.kill(process)

    def failure(self, what: str, reported: Exception | None = None) -> StartupError:
        """The error for a child that did not become ready: its name, what happened, what it said, its last lines."""
        said = f": {type(reported).__name__}: {reported}" if reported is not None else ""
        error = StartupError(f"{self.spec.name} did not become ready: {what}{said}{logs.quoted(self.log)}")
        error.__cause__ = reported
        return error

    def _read_report(self) -> None:
        self._loop.remove_reader(self._reports.fileno())
        try:
            report = json.loads(self._reports.recv_bytes(REPORT_BYTES))
        except (EOFError, OSError):  # it died, or closed the line: its exit tells
            return
        finally:
            self._reports.close()
        if self.ready.done():
            return
        if report["event"] == "ready":
            self.ready.set_result(report["info"])
            return
        error = from_wire(report["error"])
        if isinstance(error, CallerError):  # a configuration that only the room could judge: its message says it all
            self.ready.set_exception(error)
        else:
            self.ready.set_exception(self.failure("it failed", error))

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self._reports.closed:
            self._read_report()  # what it said last is more telling than its exit code
        left = processes.kill_until_gone(self._left_behind, KILL_S)
        if left:
            logger.error("%s left processes that do not end: %s", self.spec.name, [p.pid for p in left])
        self._process.join()  # a zombie until now, so that its pid and session could not be reused
        os.close(self._pidfd)
        code = self._process.exitcode or 0
        if not self.ready.done():
            self.ready.set_exception(self.failure(describe(code)))
        logger.info("%s (pid %d): %s", self.spec.name, self.pid, describe(code))
        self.exited.set_result(code)

    def _left_behind(self) -> list[processes.Process]:
        return processes.of_child(self.pid, self.spec.name, self._run_id)


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"it exited with code {code}"
    known = -code in set(signal.Signals)
    return f"it was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _spawn(spec: ChildSpec, log: Path, reports: Connection) -> multiprocessing.context.SpawnProcess:
    orders = bootstrap.Orders(spec.entry, dict(spec.settings), spec.name, str(log), os.getpid())
    process = multiprocessing.get_context("spawn").Process(
        target=bootstrap.enter,
        args=(orders, reports),
        name=spec.name,
        daemon=False,  # SGLang starts processes of its own, which a daemon may not
    )
    resource_tracker.ensure_running()  # not by the first child's start: it would bear that child's name, and go with it
    with _environment(spec.env):
        process.start()
    return process


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """``extra`` in this process's environment, which the child is given at exec: before it imports anything."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
