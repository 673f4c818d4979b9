"""multiprocessing's resource tracker: a helper process that all children share, and that must not outlive the run.

It removes semaphores and shared memory that children leaked, once the last of them is gone. Python ends it only when
the launcher itself exits, so the launcher's "nothing is left" would come a moment too early.
"""

from __future__ import annotations

import os
import time
from multiprocessing import resource_tracker
from typing import Any

from launcher import processes

#: It unlinks a handful of files.
TRACKER_S = 2.0

_tracker: Any = resource_tracker._resource_tracker


def pid() -> int | None:
    """Its pid, if it runs as our child."""
    found: int | None = _tracker._pid
    return found


def line() -> int:
    """The descriptor by which children reach it. Starts it, if need be."""
    _tracker.ensure_running()
    found: int = _tracker._fd
    return found


def join(line: int) -> None:
    """Report to the launcher's, as multiprocessing's own children do: one of ours would be killed with us."""
    _tracker._fd = line


def end() -> None:
    """Let it clean up and leave, now that no child uses it; SIGKILL if it does not."""
    running, line = _tracker._pid, _tracker._fd
    if running is None or line is None:
        return
    _tracker._pid = _tracker._fd = None  # a later child starts a new one
    os.close(line)
    if not processes.wait_until_gone(lambda: _alive(running), TRACKER_S):
        processes.kill_until_gone(lambda: _alive(running), TRACKER_S)
    _reap(running)


def _alive(number: int) -> list[processes.Process]:
    found = processes.read(number)
    return [] if found is None or found.zombie else [found]


def _reap(number: int) -> None:
    deadline = time.monotonic() + TRACKER_S
    while os.waitpid(number, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(processes.POLL_S)
