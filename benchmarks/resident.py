"""What processes hold in memory and have had of the processor, as the kernel counts it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Resident(NamedTuple):
    """Bytes. ``rss`` counts pages that processes share in each of them, ``pss`` divides them among those that do."""

    rss: int
    pss: int

    @classmethod
    def of(cls, pid: int) -> Resident:
        """Raises `OSError` if it is gone."""
        return cls.parsed(Path(f"/proc/{pid}/smaps_rollup").read_text())

    @classmethod
    def parsed(cls, text: str) -> Resident:
        """From the text of `smaps_rollup`, which counts in kB."""
        lines = (line.split() for line in text.splitlines())
        found = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("Rss:", "Pss:")}
        return cls(found["Rss:"], found["Pss:"])


def descendants(pid: int) -> list[int]:
    """Living processes below ``pid``, parents before their children. Not those whose parent died."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            parents.setdefault(int(fields[1]), []).append(int(name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time of ``pids`` so far and of the children that they have waited for, in s; none of those gone."""
    ticks = sum(int(ticks) for pid in pids for ticks in _stat(pid)[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields of `/proc/<pid>/stat` from the third (the state) on; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
