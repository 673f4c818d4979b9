"""The end of a child is noticed at once, and said in words."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from zagent.engine.base import ENGINE_DIED, ENGINE_KILLED, Death
from zagent.engine.children import ChildWatch, is_stopped
from zagent.errors import StartupError


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


async def first_end(watch: ChildWatch) -> Death:
    ended: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
    watch.start(ended.set_result)
    try:
        return await asyncio.wait_for(ended, 20)
    finally:
        watch.stop()
        watch.stop()


@pytest.mark.parametrize("code", [3, 0])
def test_exit_code_is_reported(code: int) -> None:
    """A child that exits is reported by pid and code, and left for its parent to reap. It did so by itself, whatever
    the code: SGLang's scheduler exits with 0 after an exception."""
    process = child(f"import sys; sys.exit({code})")
    death = asyncio.run(first_end(ChildWatch([process.pid])))
    assert death.reason.endswith(f"(pid {process.pid}) exited with code {code}")
    assert (death.crashed, death.exit_code) == (True, ENGINE_DIED)
    process.communicate(timeout=5)
    assert process.returncode == code


@pytest.mark.parametrize(
    ("number", "crashed"),
    [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGSEGV, True), (signal.SIGABRT, True)],
)
def test_signal_is_reported(number: signal.Signals, crashed: bool) -> None:
    """A child that is killed before the watch starts is reported when it does, with the signal; only some signals are
    its own doing."""
    process = child("input()")
    watch = ChildWatch([process.pid])
    process.send_signal(number)
    death = asyncio.run(first_end(watch))
    assert death.reason.endswith(f"was killed by signal {number}")
    assert (death.crashed, death.exit_code) == (crashed, ENGINE_DIED if crashed else ENGINE_KILLED)
    process.communicate(timeout=5)


def test_a_stopped_process_is_told_from_one_that_runs() -> None:
    """By its state; one that is gone is not stopped."""
    process = child("input()")
    seen = [is_stopped(process.pid)]
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    seen.append(is_stopped(process.pid))
    process.kill()
    process.communicate(timeout=5)
    assert [*seen, is_stopped(process.pid)] == [False, True, False]


def test_child_that_is_gone_is_an_error() -> None:
    """A pid that no longer exists fails the start."""
    process = child("pass")
    process.communicate(timeout=20)
    with pytest.raises(StartupError, match=str(process.pid)):
        ChildWatch([process.pid])
