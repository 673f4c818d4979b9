"""The two ways in which a child's process is started: by multiprocessing, or as `python -m launcher.entry` where it
runs under another interpreter. Behind both `launcher.bootstrap.enter` does the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from launcher import bootstrap, tracker
from launcher.entry import signature
from launcher.interpreter import environment_of
from launcher.specs import ChildSpec


class Started(Protocol):
    """A process that may be dead, but has not been reaped."""

    @property
    def pid(self) -> int | None:
        """Never None."""

    @property
    def exitcode(self) -> int | None:
        """None while it runs; negative: killed by that signal."""

    def kill(self) -> None:
        """SIGKILL."""

    def join(self) -> None:
        """Reap it."""


def start(spec: ChildSpec, log: Path, reports: Connection) -> Started:
    """The process of ``spec``; ``reports`` is its line to us. Raises `OSError`: no memory, no file descriptors, no such
    interpreter."""
    orders = bootstrap.Orders(
        spec.entry, dict(spec.settings), spec.name, str(log), os.getpid(), memory_limit=spec.memory_limit
    )
    tracker.line()  # not by the first child's start: it would bear that child's name, and go with it
    if spec.python:
        return _Executed(spec.python, orders, spec.env, reports)
    process = get_context("spawn").Process(
        target=bootstrap.enter,
        args=(orders, reports),
        name=spec.name,
        daemon=False,  # SGLang starts processes of its own, which a daemon may not
    )
    with _environment(spec.env):
        process.start()
    return process


class _Executed:
    """A subprocess under the names that multiprocessing's processes have.

    Its orders come on standard input: a command line could be read by everybody, and a pipe could fill up.
    """

    def __init__(self, python: str, orders: bootstrap.Orders, env: Mapping[str, str], reports: Connection) -> None:
        lines = (reports.fileno(), tracker.line())
        with tempfile.TemporaryFile() as said, open(orders.log, "ab", opener=_for_us) as log:
            said.write(json.dumps({"by": signature(), "orders": asdict(orders)}).encode())
            said.seek(0)
            self._popen = subprocess.Popen(
                [python, "-P", "-m", "launcher.entry", *map(str, lines)],
                stdin=said,
                stdout=log,  # what goes wrong before the child redirects them itself
                stderr=log,
                env=environment_of(python, env),
                pass_fds=lines,
            )
        self.pid = self._popen.pid

    @property
    def exitcode(self) -> int | None:
        return self._popen.poll()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._popen.kill()

    def join(self) -> None:
        self._popen.wait()


def _for_us(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


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
