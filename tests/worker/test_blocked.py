"""A worker whose event loop is blocked for good ends by itself, and its log says where."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, time
from zagent.worker.blocked import ends_when_blocked

def user_code():
    time.sleep(60)

async def main():
    async with ends_when_blocked(0.2):
        await asyncio.sleep(0.5)  # busy for longer than the limit, but not blocked
        print("not blocked", flush=True)
        {then}
    time.sleep(0.5)
    print("left", flush=True)

asyncio.run(main())
"""


def run(then: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(then=then)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_a_blocked_loop_ends_the_process_and_shows_the_line() -> None:
    """Exit code 1 and all stacks on standard error."""
    done = run("user_code()")
    assert done.returncode == 1
    assert done.stdout == "not blocked\n"
    assert "in user_code" in done.stderr


def test_a_loop_that_turns_lives() -> None:
    """And after leaving nothing is watched any more."""
    done = run("pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "not blocked\nleft\n", "")
