"""Processes as `/proc` shows them: who is whose, and making them go away for good."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

#: In the environment of every process of a run, however it was started: what the last sweep looks for.
RUN_ID_VARIABLE = "ZAGENT_RUN_ID"
#: Which child of the launcher a process belongs to.
CHILD_VARIABLE = "ZAGENT_CHILD"

#: Pause between two looks at /proc while killed processes vanish.
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table. ``start_time`` (clock ticks since boot) tells a reused pid; ``state`` is the
    kernel's letter."""

    pid: int
    parent: int
    session: int
    start_time: int
    state: str

    @property
    def zombie(self) -> bool:
        """Ended, but not waited for."""
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        """By SIGSTOP or a debugger."""
        return self.state in "Tt"


def read(pid: int) -> Process | None:
    """What `/proc/PID/stat` says, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the name before may hold blanks and brackets
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0].decode())


def running() -> list[Process]:
    """All processes but zombies."""
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None and not process.zombie]


def environment(pid: int) -> frozenset[bytes]:
    """``NAME=value`` entries the process was started with; empty where we may not look."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return frozenset(file.read().split(b"\0"))
    except OSError:  # gone, or another user's
        return frozenset()


def command_line(pid: int) -> list[bytes]:
    """Arguments of a process; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def of_run(run_id: str, but: Collection[int] = ()) -> list[Process]:
    """Running processes that carry ``run_id`` in their environment, this one and ``but`` excepted."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    spared = {os.getpid(), *but}
    return [p for p in running() if p.pid not in spared and mark in environment(p.pid)]


def of_sessions(sessions: Collection[int], born_before: int) -> list[Process]:
    """Running processes of ``sessions`` that started before ``born_before`` (ticks since boot).

    For sessions whose leaders are gone: a later process may have been given a leader's pid as its own.
    """
    return [p for p in running() if p.session in sessions and p.start_time < born_before]


def ticks_now() -> int:
    """Now, as start times are counted; rounded up."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")) + 1


def of_child(pid: int, name: str, run_id: str) -> list[Process]:
    """What a child of the launcher started and left: its session, its descendants, and strays that fled from both.

    The pid must not have been reaped yet, else the session may be somebody else's.
    """
    marks = {f"{RUN_ID_VARIABLE}={run_id}".encode(), f"{CHILD_VARIABLE}={name}".encode()}
    table = running()
    below = descendants(pid, table)
    return [p for p in table if p.session == pid or p.pid in below or marks <= environment(p.pid)]


def descendants(root: int, table: Iterable[Process]) -> set[int]:
    """``root`` and all below it."""
    children: dict[int, list[int]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo.extend(children.get(pid, ()))
    return found


def kill(process: Process) -> None:
    """SIGKILL, if the pid is still that process's."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        now = read(process.pid)
        if now is not None and now.start_time == process.start_time:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (
        ProcessLookupError,
        PermissionError,
    ):  # gone meanwhile; or it changed its user, and is no longer ours to kill
        pass
    finally:
        os.close(handle)


def kill_until_gone(find: Callable[[], list[Process]], within_s: float) -> list[Process]:
    """SIGKILL what ``find`` finds, again and again (a dying process may still fork); the rest after ``within_s``."""
    deadline = time.monotonic() + within_s
    while found := find():
        if time.monotonic() >= deadline:
            return found
        for process in found:
            kill(process)
        time.sleep(POLL_S)
    return []


def wait_until_gone(find: Callable[[], list[Process]], within_s: float) -> bool:
    """Whether ``find`` came to find nothing within ``within_s``."""
    deadline = time.monotonic() + within_s
    while find():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
