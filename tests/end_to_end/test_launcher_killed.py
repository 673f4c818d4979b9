"""Deaths around the launcher, each safeguard alone: the kernel's signal, the watch while a model loads, the tracker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support import fake_launch
from support.processes import eventually, running

SUPERVISOR = """
import asyncio, pathlib, sys
from launcher.child import Child
from support.processes import RUN_ID, spec
async def main():
    child = Child(spec("engine", sys.argv[2]), pathlib.Path(sys.argv[1]), RUN_ID)
    await child.ready
    print(child.pid, flush=True)
    await child.exited
asyncio.run(main())
"""

WAITING = """
import os, sys, time
from launcher.run import _ends_with
os.environ["ZAGENT_RUN_ID"] = "test-waiting"
with _ends_with(os.pidfd_open(int(sys.argv[1]))):
    print("waiting", flush=True)
    time.sleep(float(sys.argv[2]))
"""

TRACKED = """
import os
from multiprocessing import resource_tracker
from launcher import tracker
resource_tracker.ensure_running()
pid = tracker.pid()
before = os.path.exists(f"/proc/{pid}")
tracker.end()
print(before, os.path.exists(f"/proc/{pid}"), tracker.pid())
"""


def python(*arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(fake_launch.__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, env=env, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_children_die_with_their_launcher(tmp_path: Path) -> None:
    """By the kernel's hand: without a janitor, and deaf to SIGTERM."""
    with python(SUPERVISOR, str(tmp_path / "log"), "deaf") as supervisor:
        child = int(first_line(supervisor))
        os.kill(supervisor.pid, signal.SIGKILL)
        eventually(lambda: not running(child), within_s=5.0)


def test_a_launcher_that_waits_for_its_model_ends_with_its_trainer() -> None:
    """Nobody is left to use what it downloads."""
    with python("import time; time.sleep(600)") as trainer, python(WAITING, str(trainer.pid), "600") as waiting:
        assert first_line(waiting) == "waiting"
        trainer.kill()
        assert waiting.wait(20) == 1


def test_the_watch_ends_with_the_wait() -> None:
    """Once the model is there the cluster's own watch takes over."""
    with python("import time; time.sleep(600)") as trainer, python(WAITING, str(trainer.pid), "0") as waiting:
        assert waiting.wait(20) == 0
        trainer.kill()


def test_the_resource_tracker_is_ended() -> None:
    """Else it would outlive the last sweep by a moment."""
    with python(TRACKED) as process:
        assert first_line(process) == "True False None"
