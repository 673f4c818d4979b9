"""What `/proc` says, apart from what zagent itself believes: whose processes live, and what they hold."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
SHARED_MEMORY = Path("/dev/shm")


def of_run(run_id: str) -> dict[int, str]:
    """Processes that carry the run id in their environment, this one aside: pid -> which child of the launcher, ""
    for the launcher itself and its helpers. Zombies have no environment."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            environment = _environment(int(name))
            if environment.get("ZAGENT_RUN_ID") == run_id:
                found[int(name)] = environment.get("ZAGENT_CHILD", "")
    return found


def child_of(parent: int, name: str) -> int | None:
    """The living child of ``parent`` that zagent calls ``name``. A few files are read, not the whole of /proc."""
    for pid in _children(parent):
        if _environment(pid).get("ZAGENT_CHILD") == name:
            return pid
    return None


def parent_of(pid: int) -> int | None:
    """Its parent; None if it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def running(pid: int) -> bool:
    """Whether it exists and is no zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


@dataclass(frozen=True)
class Holdings:
    """What a process holds: resident memory in bytes, open descriptors, threads."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Holdings:
        """Raises `OSError` if it is gone."""
        place = Path(f"/proc/{pid}")
        pages = int((place / "statm").read_text().split()[1])
        return cls(pages * PAGE, len(os.listdir(place / "fd")), len(os.listdir(place / "task")))


def _environment(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # gone, or another user's
        return {}
    return dict(entry.partition("=")[::2] for entry in entries)


def _children(parent: int) -> list[int]:
    texts = []
    with suppress(OSError):  # gone
        for task in os.listdir(f"/proc/{parent}/task"):
            with suppress(OSError):  # a thread may end while we look
                texts.append(Path(f"/proc/{parent}/task/{task}/children").read_text())
    return [int(pid) for text in texts for pid in text.split()]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
