"""The processes of a measurement: started, waited for with a deadline, and gone at the end whatever happened."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from launcher.bootstrap import die_with
from launcher.quick import COLLECTED, quick_imports

#: Longest any process may take to start, or to run one round and check it, in seconds.
PATIENCE_S = 120.0
#: SIGTERM to SIGKILL.
STOP_S = 3.0


class Failed(RuntimeError):
    """A process of the measurement died, broke or said nothing in time; names it."""


class Process:
    """A child that runs ``entry`` (``module:function``), called with ``settings`` and its end of a pipe."""

    def __init__(self, name: str, entry: str, settings: dict[str, Any]) -> None:
        self.name = name
        self._line, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_enter, args=(entry, settings, theirs, os.getpid()), name=name)
        self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        self._line.send(message)

    def receive(self) -> Any:
        """The child's next message. Raises `Failed`."""
        if not wait([self._line, self._process.sentinel], PATIENCE_S):
            raise Failed(f"{self.name} said nothing within {PATIENCE_S:g} s")
        try:
            message = self._line.recv()
        except EOFError:
            raise Failed(f"{self.name} ended with exit code {self._process.exitcode}") from None
        if isinstance(message, _Broken):
            raise Failed(f"{self.name} failed:\n{message.traceback}")
        return message

    def has_spoken(self) -> bool:
        """Whether `receive` need not wait."""
        return bool(wait([self._line, self._process.sentinel], 0))

    def cpu_s(self) -> float:
        """Processor time so far, all threads, in s."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def terminate(self) -> None:
        self._process.terminate()

    def end(self, deadline: float) -> None:
        """Wait until the monotonic time ``deadline``, then kill."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._line.close()


class Processes:
    """A context manager: what was started through it is gone when it is left."""

    def __init__(self) -> None:
        self.started: list[Process] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self.started:
            process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in self.started:
            process.end(deadline)

    def start(self, name: str, entry: str, settings: dict[str, Any]) -> Process:
        process = Process(name, entry, settings)
        self.started.append(process)
        return process

    def start_ready(self, specs: Sequence[tuple[str, str, dict[str, Any]]]) -> list[Any]:
        """Start all, wait for each one's first message; these."""
        return [process.receive() for process in [self.start(*spec) for spec in specs]]


class _Broken:
    def __init__(self, text: str) -> None:
        self.traceback = text


def _enter(entry: str, settings: dict[str, Any], line: Connection, parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    module, _, function = entry.partition(":")
    try:
        getattr(importlib.import_module(module), function)(settings, line)
    except Exception:
        line.send(_Broken(traceback.format_exc()))


def room(settings: dict[str, Any], line: Connection) -> None:
    """Entry point: a process room of zagent, ``settings["entry"]``, with ``settings["settings"]``."""
    module, _, function = settings["entry"].partition(":")
    gc.set_threshold(*COLLECTED)
    with quick_imports():
        main = getattr(importlib.import_module(module), function)
    main(settings["settings"], line.send)
