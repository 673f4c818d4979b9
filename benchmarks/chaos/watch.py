"""Watching a cluster from outside while it is being wrecked: the broker's status, and the broker's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zagent
from benchmarks import procfs
from benchmarks.chaos.losses import Losses
from benchmarks.chaos.script import Room

#: Seconds between two looks: a tenth of what a recovery takes, at a few per cent of a core.
LOOK_S = 0.03
#: A status as old as this no longer says who has work in flight.
FRESH_S = 0.5


@dataclass(frozen=True)
class Snapshot:
    """A status that was answered at ``at`` (monotonic s)."""

    at: float
    status: Mapping[str, Any]

    def members(self, room: Room) -> Mapping[str, Mapping[str, Any]]:
        """Those of a room that can be chosen: alive, with a pid."""
        pool: Mapping[str, Mapping[str, Any]] = self.status["pools"][room]
        return {name: member for name, member in pool.items() if member["state"] != "dead" and member["pid"]}

    @property
    def in_flight(self) -> int:
        """All members' calls."""
        return sum(member["in_flight"] for room in ("engine", "worker") for member in self.members(room).values())

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self.at < FRESH_S


class Watch:
    """Two threads, since a status may have to wait for a broker that only the other one can see coming.

    A context manager. ``note`` is told of what goes wrong with asking.
    """

    def __init__(self, manager: zagent.AgentLoopManager, losses: Losses, note: Callable[[str], None]) -> None:
        self._manager, self._losses, self._note = manager, losses, note
        self._over = threading.Event()
        #: Held while losses are added.
        self.lock = threading.Lock()
        self._broker, self._launcher = _find_broker(manager.run_id)
        self.latest = Snapshot(time.monotonic(), manager.status())
        self._threads = [
            threading.Thread(target=work, name=f"chaos-{work.__name__}") for work in (self._ask, self._look)
        ]

    @property
    def broker(self) -> int:
        """Pid of the broker that was seen last."""
        return self._broker

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """A status that waits is waited for: it ends within its time limit."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._over.wait(LOOK_S):
            asked_at = time.monotonic()
            try:
                status = self._manager.status()
            except zagent.ZagentError as error:
                if not self._over.is_set():
                    self._note(f"status: {type(error).__name__}: {error}")
                continue
            self.latest = Snapshot(time.monotonic(), status)
            with self.lock:
                self._losses.note_status(asked_at, self.latest.at, status)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            found = procfs.child_of(self._launcher, "broker")
            if found is not None and found != self._broker:
                self._broker = found
                with self.lock:
                    self._losses.note_broker(time.monotonic(), found)


def _find_broker(run_id: str) -> tuple[int, int]:
    """Its pid, and its launcher's."""
    pid = next(pid for pid, name in procfs.of_run(run_id).items() if name == "broker")
    launcher = procfs.parent_of(pid)
    assert launcher is not None, "the broker is gone before anything was done to it"
    return pid, launcher
