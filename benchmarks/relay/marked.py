"""Processes known by a mark in their environment, which all that they start inherit, and keep when a parent dies."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

VARIABLE = "ZAGENT_BENCHMARK"
#: Longest that processes which have been told to end may take, in seconds.
PATIENCE_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Mark:
    """Of one cluster."""

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex

    @contextmanager
    def on(self) -> Iterator[None]:
        """What is started meanwhile carries the mark."""
        resource_tracker.ensure_running()  # multiprocessing's own process, which stays: started before, it does not
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = self._value
        try:
            yield
        finally:
            os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})

    def pids(self) -> list[int]:
        """Those that live; zombies have no environment."""
        mark = f"{VARIABLE}={self._value}".encode()
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and mark in _environment(name)]

    def cpu_s(self) -> dict[int, float]:
        """Processor time so far by process, all threads, in s."""
        return {pid: _cpu_s(pid) for pid in self.pids()}

    def end(self) -> list[int]:
        """Wait for all to be gone, kill those that are not; their ids."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def _environment(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return []


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
