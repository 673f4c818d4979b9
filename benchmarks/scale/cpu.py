"""Processor time of other processes, thread by thread."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Spent:
    """Seconds so far: of the thread that runs Python's main loop, and of libzmq's I/O threads."""

    main: float
    sockets: float

    @classmethod
    def of(cls, pid: int) -> Spent:
        """Raises `OSError` if it is gone."""
        sockets = 0.0
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while we look
                name, seconds = parse((task / "stat").read_text())
                sockets += seconds if name.startswith("ZMQbg") else 0.0
        _, main = parse(Path(f"/proc/{pid}/task/{pid}/stat").read_text())
        return cls(main, sockets)

    def since(self, before: Spent) -> Spent:
        return Spent(self.main - before.main, self.sockets - before.sockets)


def parse(stat: str) -> tuple[str, float]:
    """(name, seconds) of the thread or process that a `stat` file is about."""
    head, _, rest = stat.rpartition(")")
    fields = rest.split()
    return head.partition("(")[2], (int(fields[11]) + int(fields[12])) / _TICKS


def whole(pid: int) -> float:
    """All threads, also those that have ended, in s. Raises `OSError` if it is gone."""
    return parse(Path(f"/proc/{pid}/stat").read_text())[1]
