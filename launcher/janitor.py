"""Cleans up after a launcher that was killed: `python -m launcher.janitor RUN_ID RUN_DIR LAUNCHER_PID`.

Children die with the launcher (PR_SET_PDEATHSIG), but what *they* started need not, and nobody would be left to remove
the run directory. This process costs 10 MB and sleeps until the launcher is gone; a launcher that ends in order has
nothing left to clean up, and ends it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from launcher import processes, rundir
from launcher.processes import Process
from launcher.rundir import RunDir

logger = logging.getLogger(__name__)

#: Children die by signal at once; multiprocessing's resource tracker then removes their shared memory.
GRACE_S = 1.0
STRAYS_GONE_S = 3.0


def start(run: RunDir) -> subprocess.Popen[bytes]:
    """Start it for this process as the launcher of ``run``."""
    command = [sys.executable, "-m", "launcher.janitor", run.run_id, str(run.path), str(os.getpid())]
    root = Path(__file__).resolve().parent.parent
    installed = root.name in ("site-packages", "dist-packages")
    where = None if installed else root  # a checkout is importable from within
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, cwd=where)


def end(janitor: subprocess.Popen[bytes]) -> None:
    """Send it home: there is nothing to clean up."""
    janitor.kill()
    janitor.wait()


def main(run_id: str, path: str, launcher: int) -> None:
    """Wait for the end of ``launcher``, then remove what is left of the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run = RunDir(Path(path), run_id)
    _wait_for_end(launcher)
    died = processes.ticks_now()
    sessions = run.children()

    def left() -> list[Process]:
        return processes.of_run(run_id) + processes.of_sessions(sessions, died)

    processes.wait_until_gone(left, GRACE_S)
    stuck = processes.kill_until_gone(left, STRAYS_GONE_S)
    if stuck:
        logger.error("processes of run %s do not end: %s", run_id, [p.pid for p in stuck])
    rundir.remove(run)


def _wait_for_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if os.getppid() == pid:  # else it is gone, and the pid somebody else's
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
