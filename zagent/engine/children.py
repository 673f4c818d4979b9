"""Notices at once when a child process ends, by pidfd on the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from zagent.engine.base import Death
from zagent.errors import StartupError

#: Signals that a process brings upon itself. Any other one comes from outside.
CRASH_SIGNALS = frozenset(
    (
        *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL),
        *(signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS),
    )
)


class ChildWatch:
    """Holds pidfds from construction on, so that an end before `start` is not missed and no pid is mistaken."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Raises `StartupError` if one of ``pids`` is gone already."""
        self._names: dict[int, str] = {}
        for pid in pids:
            try:
                self._names[os.pidfd_open(pid)] = f"{_title(pid)} (pid {pid})"
            except ProcessLookupError:
                self.close()
                raise StartupError(f"process {pid} ended while the engine started") from None

    def start(self, on_exit: Callable[[Death], None]) -> None:
        """Call ``on_exit``, on the running loop, for each child that ends."""
        loop = asyncio.get_running_loop()
        for fd in self._names:
            loop.add_reader(fd, self._exited, fd, on_exit)

    def stop(self) -> None:
        """No more calls, from within the running loop. May be called twice."""
        for fd in self._names:
            asyncio.get_running_loop().remove_reader(fd)
        self.close()

    def close(self) -> None:
        for fd in self._names:
            os.close(fd)
        self._names.clear()

    def _exited(self, fd: int, on_exit: Callable[[Death], None]) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        how, crashed = _exit_of(fd)
        on_exit(Death(f"{self._names[fd]} {how}", crashed))


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0] or "a process"
    return "a process"


def is_stopped(pid: int) -> bool:
    """Whether the process stands still until somebody lets it go on (SIGSTOP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it is gone, which others notice
        return False


def _exit_of(fd: int) -> tuple[str, bool]:
    """How the child ended, and whether by itself; leaves it to whoever started it to reap.

    No child of an engine ends unless told to: exit code 0 is a failure, too (SGLang's scheduler after an exception).
    """
    try:
        found = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # a grandchild, or reaped already
        found = None
    if found is None:
        return "exited", True
    if found.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        return f"was killed by signal {found.si_status}", found.si_status in CRASH_SIGNALS
    return f"exited with code {found.si_status}", True
