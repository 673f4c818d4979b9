"""What a child does before and after its room's `main`: it is armed first, and its end is never silent.

Runs in the child. The environment was given at exec, so nothing here is too late for CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from launcher.heartbeat import Heartbeat
from launcher.quick import COLLECTED, quick_imports
from zagent.errors import ZagentError, to_wire

#: A room that has returned gets this long to leave: children or threads it forgot would be joined for ever. Below
#: the launcher's own patience (3 s), so that the log says where it hung.
EXIT_GRACE_S = 2.0

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


@dataclass(frozen=True, slots=True)
class Orders:
    """What a child is told: the room's ``entry`` (``module:function``) and ``settings``, its ``name`` and ``log`` file,
    the pid of its ``launcher``, without which it does not live, and its ``memory_limit`` (bytes; 0 = none)."""

    entry: str
    settings: Mapping[str, Any]
    name: str
    log: str
    launcher: int
    memory_limit: int = 0


def enter(orders: Orders, reports: Connection) -> None:
    """Run the room until it returns, then leave with its exit status."""
    die_with(orders.launcher)
    os.setsid()  # Ctrl-C is the launcher's business
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect(orders.log)
    _show_name(orders.name)
    faulthandler.enable(all_threads=True)
    reporter = Reporter(reports)
    Heartbeat(reporter.beat, orders.memory_limit).start()
    code = _run(orders.entry, orders.settings, reporter)
    faulthandler.dump_traceback_later(EXIT_GRACE_S, exit=True)
    sys.exit(code)


def die_with(parent: int) -> None:
    """Be killed when ``parent`` dies (to the kernel: the thread that spawned us), also if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def _redirect(log: str) -> None:
    """Standard output and error, of C code and children too, into the log; standard input from nowhere."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nowhere, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    for spare in {nowhere, file} - {0, 1, 2}:
        os.close(spare)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _show_name(name: str) -> None:
    """The name in `ps` and `top` (15 bytes)."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


class Reporter:
    """The room's line to the launcher: it is ready, or why it will not be; and beats for as long as it lives."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._room = select.poll()
        self._room.register(line.fileno(), select.POLLOUT)
        self._sent = False

    def ready(self, info: Mapping[str, Any]) -> None:
        """The room serves. ``info`` has JSON types."""
        if self._sent:
            raise RuntimeError("ready was called twice")
        self._send({"event": "ready", "info": dict(info)})

    def failed(self, error: BaseException) -> None:
        """The room will not serve; nothing if it did already (the log tells)."""
        if not self._sent:
            with contextlib.suppress(BrokenPipeError):  # the launcher gave up on us
                self._send({"event": "failed", "error": to_wire(error)})

    def _send(self, report: Mapping[str, Any]) -> None:
        message = json.dumps(report, default=str).encode()
        with self._lock:
            self._sent = True
            self._line.send_bytes(message)

    def beat(self, report: Mapping[str, Any]) -> bool:
        """Send ``report`` (less than 4 KB) once the room is ready: its start has a deadline of its own. Left out where
        the pipe is full: a launcher that is stopped must not stop this thread. False once nobody listens."""
        if not self._sent or not self._lock.acquire(blocking=False):
            return True
        try:
            if self._room.poll(0):  # also where the other end is closed
                self._line.send_bytes(json.dumps(report).encode())
        except OSError:
            return False
        finally:
            self._lock.release()
        return True


def _run(entry: str, settings: Mapping[str, Any], reporter: Reporter) -> int | str | None:
    """The exit status."""
    try:
        _find(entry)(settings, reporter.ready)
    except SystemExit as leaving:
        return leaving.code
    except BaseException as error:
        # Few frames of an error that we raise ourselves: errors quote the end of this log, and what led to it is above.
        traceback.print_exc(limit=-2 if isinstance(error, ZagentError) else None)
        reporter.failed(error)
        return 1
    return 0


def _find(entry: str) -> Callable[[Mapping[str, Any], Callable[[Mapping[str, Any]], None]], None]:
    module, _, function = entry.partition(":")
    found: Callable[[Mapping[str, Any], Callable[[Mapping[str, Any]], None]], None]
    gc.set_threshold(*COLLECTED)
    with quick_imports():
        found = getattr(importlib.import_module(module), function)
    return found
