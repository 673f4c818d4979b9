"""Real processes for tests: specs of tiny rooms, and looking for what is left of a run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from launcher.specs import ChildSpec, Member

#: Of this process's children: two suites on one machine do not take each other's for their own.
RUN_ID = f"test-run-{os.getpid()}"
#: Long enough for a loaded two-core machine; only a failing test waits as long.
PATIENCE_S = 20.0


def spec(room: str, entry: str, *, name: str = "", pool: str = "", run_id: str = RUN_ID, **settings: Any) -> ChildSpec:
    """A child of ``room`` that runs the function ``entry`` of `support.rooms`."""
    name = name or f"{room}-0"
    members = () if room == "broker" else (Member(pool or room, name, 0),)
    env = {"ZAGENT_RUN_ID": run_id, "ZAGENT_CHILD": name}
    return ChildSpec(name, room, f"support.rooms:{entry}", settings, env, members)


def with_run_id(run_id: str) -> list[int]:
    """Pids with this run id in their environment, zombies (which have none) aside."""
    mark = f"ZAGENT_RUN_ID={run_id}".encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and mark in _environ(int(name))]


def child_name(pid: int) -> str:
    """What the launcher calls it; "" for others."""
    mark = b"ZAGENT_CHILD="
    return next((entry[len(mark) :].decode() for entry in _environ(pid) if entry.startswith(mark)), "")


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def running(pid: int) -> bool:
    """Whether ``pid`` exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class Popen(subprocess.Popen[Any]):
    """As a context manager it kills the process where the test fails, instead of waiting for its end for good."""

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, value, trace)


def eventually(holds: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """What ``holds`` returns once it is true; a failed assertion if it does not become true."""
    deadline = time.monotonic() + within_s
    while not (result := holds()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)
    return result
