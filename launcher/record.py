"""Which process a run belongs to, on disk, so that a later run can tell whether it still lives."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher import processes

FILE_NAME = "launcher.json"


@dataclass(frozen=True, slots=True)
class Record:
    """The launcher of a run. ``start_time`` tells a reused pid; boot and namespace, where the pid means anything."""

    run_id: str
    pid: int
    start_time: int
    boot_id: str
    pid_namespace: str
    host: str

    @classmethod
    def own(cls, run_id: str) -> Record:
        """This process as the launcher of ``run_id``."""
        me = processes.read(os.getpid())
        assert me is not None  # a process that runs has an entry
        return cls(run_id, me.pid, me.start_time, _boot_id(), os.readlink("/proc/self/ns/pid"), socket.gethostname())

    @classmethod
    def load(cls, directory: Path) -> Record | None:
        """The record in ``directory``; None if there is none that can be read."""
        try:
            return cls(**json.loads((directory / FILE_NAME).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def save(self, directory: Path) -> None:
        """Write to ``directory``, whole or not at all."""
        draft = directory / f"{FILE_NAME}.draft"
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(directory / FILE_NAME)

    def is_dead(self) -> bool:
        """Whether that launcher is certainly gone. Another host's or container's cannot be judged: False."""
        if self.host != socket.gethostname():
            return False
        if self.boot_id != _boot_id():
            return True
        if self.pid_namespace != os.readlink("/proc/self/ns/pid"):
            return False
        process = processes.read(self.pid)
        return process is None or process.zombie or process.start_time != self.start_time


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
