"""A directory that several processes may want at once, made by one of them."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zagent.errors import StartupError

#: Seconds for another process that is at it already.
BUILD_TIMEOUT_S = 1800.0


def build_once(target: Path, build: Callable[[Path], None], timeout_s: float = BUILD_TIMEOUT_S) -> Path:
    """``target``, made by ``build(temporary directory)`` if it is not there; complete or absent at any moment.

    Any number of processes may call this at once: one builds, the others wait for it.

    Raises:
        StartupError: another process holds the lock for longer than ``timeout_s`` seconds.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock"), timeout_s):
        if target.is_dir():
            return target
        for stale in target.parent.glob(f".{target.name}-*"):  # of builders that were killed: we hold the lock
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            build(made)
            made.rename(target)
    return target


@contextmanager
def _locked(file: Path, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with file.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StartupError(f"another process has held {file} for more than {timeout_s:.0f} s") from None
                time.sleep(0.2)
        yield
