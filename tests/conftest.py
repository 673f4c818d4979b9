"""The suite is strict: every test says what it expects, and leaves no process, thread, socket or task behind."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from asyncio import runners
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from support.processes import with_run_id

# Before torch comes: two test processes with a thread per core each would spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No timed assertions: the machines are shared.
settings.register_profile("zagent", deadline=None)
settings.load_profile("zagent")

#: Seconds that what a test has just ended may take to be gone (a thread between its last line and its end).
PATIENCE_S = 2.0
#: pytest's own, and the cache that torch keeps for the next process (both go with the suite's directory).
KEPT_FILES = ("pytest-of-", "torchinductor_")
#: Threads that libraries start once per process and keep, and ours for chat templates and for images.
KEPT_THREADS = ("tokenizer", "images", "pydev", "tqdm", "asyncio_")


#: What lay in shared memory when the suite began.
MEMORY_BEFORE = pytest.StashKey[set[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    # Shells let what they start in the background ignore it, and children inherit that: nothing would hear Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    session.stash[MEMORY_BEFORE] = _shared_memory()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where all tests are done (several processes may run them), nothing of ours is left in shared memory."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    left = {name for name in _shared_memory() - session.stash[MEMORY_BEFORE] if not _in_use(name)}
    if left:
        print(f"\nleft in shared memory: {sorted(left)}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test without a docstring."""
    silent = [item.nodeid for item in items if not (getattr(item, "obj", None) and item.obj.__doc__)]
    if silent:
        raise pytest.UsageError(f"tests without a docstring that says what is expected: {silent}")


@pytest.fixture(scope="session", autouse=True)
def no_file_left_behind() -> Iterator[None]:
    """A temporary directory for the whole suite, which must be empty at its end."""
    place = Path(tempfile.mkdtemp(prefix="zt-"))  # short: sockets have paths of 107 bytes at most
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(place))
        patch.setattr(tempfile, "tempdir", None)
        yield
    left = [path.name for path in place.iterdir() if not path.name.startswith(KEPT_FILES)]
    shutil.rmtree(place, ignore_errors=True)
    assert not left, f"left in the temporary directory: {left}"


def _in_use(name: str) -> bool:
    """Whether the run it is named after lives: somebody else's suite, at the same time."""
    run_id = re.search(r"\d{8}-\d{6}-[0-9a-f]{8}", name)
    return run_id is not None and bool(with_run_id(run_id[0]))


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "zagent" in name or "sglang" in name}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a child process, a thread, a socket or an unfinished task."""
    tasks: list[str] = []
    cancel_all = runners._cancel_all_tasks

    def report(loop: asyncio.AbstractEventLoop) -> None:
        if sys.exc_info()[0] is None:  # else the test's coroutine itself was left by an error, which tells more
            tasks.extend(repr(task) for task in asyncio.all_tasks(loop))
        cancel_all(loop)

    monkeypatch.setattr(runners, "_cancel_all_tasks", report)
    before = _holdings()
    yield
    assert not tasks, f"unfinished tasks: {tasks}"
    left = _left(before)
    if left:  # an unreachable object may still hold a socket
        gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = _left(before)
    assert not left, f"left behind: {left}"


def _left(before: set[Any]) -> set[Any]:
    return _holdings() - before


def _holdings() -> set[Any]:
    threads = {t.name for t in threading.enumerate() if not t.name.startswith(KEPT_THREADS)}
    processes = {f"process {child.pid}" for child in multiprocessing.active_children()}
    return threads | processes | _children() | _sockets()


def _children() -> set[str]:
    """Child processes that are alive or not waited for."""
    path = f"/proc/self/task/{os.getpid()}/children"
    try:
        with open(path) as file:
            return {f"child {pid}" for pid in file.read().split() if not _is_tracker(pid)}
    except OSError:
        return set()


def _is_tracker(pid: str) -> bool:
    """multiprocessing's resource tracker: one per process, kept on purpose."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return True  # gone meanwhile


def _sockets() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found
