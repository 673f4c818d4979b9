"""The end of a child is noticed at once, and said in words."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from zagent.engine.children import ChildWatch
from zagent.errors import StartupError


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


async def first_end(watch: ChildWatch) -> str:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    watch.start(ended.set_result)
    try:
        return await asyncio.wait_for(ended, 20)
    finally:
        watch.stop()
        watch.stop()


def test_exit_code_is_reported() -> None:
    """A child that exits is reported by pid and code, and left for its parent to reap."""
    process = child("import sys; sys.exit(3)")
    assert asyncio.run(first_end(ChildWatch([process.pid]))).endswith(f"(pid {process.pid}) exited with code 3")
    process.communicate(timeout=5)
    assert process.returncode == 3


def test_signal_is_reported() -> None:
    """A child that is killed before the watch starts is reported when it does, with the signal."""
    process = child("input()")
    watch = ChildWatch([process.pid])
    process.send_signal(signal.SIGKILL)
    assert asyncio.run(first_end(watch)).endswith("was killed by signal 9")
    process.communicate(timeout=5)


def test_child_that_is_gone_is_an_error() -> None:
    """A pid that no longer exists fails the start."""
    process = child("pass")
    process.communicate(timeout=20)
    with pytest.raises(StartupError, match=str(process.pid)):
        ChildWatch([process.pid])
