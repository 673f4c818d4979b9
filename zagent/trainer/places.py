"""Where trainers' weights lie, and which of them no engine will be told to load any more.

`<run>/<trainer>/<version>-<random>`: the trainer's name says which process of which host wrote them. What it leaves
behind, another trainer removes; of processes on other hosts, which may share the directory, it knows nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

#: Host, pid, start time, and a random part: a process may have several, one after the other.
TRAINER = re.compile(r"([0-9a-f]{12})-(\d+)-(\d+)-[0-9a-f]{8}")
#: Version, random part, and whether it was never finished.
WEIGHTS = re.compile(r"(\d+)-[0-9a-f]{8}(\.draft)?")
#: In the directory of a trainer that has gone, though its process may be there.
LEFT = "left"
#: For a host of which nothing is known: nobody is judged there.
UNKNOWN = "0" * 12


def trainer_name() -> str:
    """For a new trainer of this process."""
    return f"{host()}-{os.getpid()}-{started_at(os.getpid()) or 0}-{uuid4().hex[:8]}"


def host() -> str:
    """Where a pid and a start time mean one process: this boot of the machine, and this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return UNKNOWN
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[: len(UNKNOWN)]


def started_at(pid: int) -> int | None:
    """When that process started, in clock ticks since boot; None where there is none, or a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the name before may hold blanks and brackets
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_gone(name: str, here: str, started_at: Callable[[int], int | None]) -> bool:
    """Whether the process of the trainer of that ``name`` ran on the host ``here``, and has ended."""
    match = TRAINER.fullmatch(name)
    if match is None or match[1] != here or here == UNKNOWN:
        return False
    return started_at(int(match[2])) != int(match[3])


def is_useless(name: str, version: int) -> bool:
    """Whether weights of that ``name``, whose trainer has gone, are needed by nobody where the engines serve others of
    that ``version``. Newer ones may take effect yet: engines finish what they have begun."""
    match = WEIGHTS.fullmatch(name)
    return match is not None and (match[2] is not None or int(match[1]) <= version)


class Places:
    """Of the trainer whose directory is ``own``."""

    def __init__(self, own: Path) -> None:
        self._own = own

    def new(self, version: int) -> Path:
        """A broken-off update may have left one of that version."""
        return self._own / f"{version}-{uuid4().hex[:8]}"

    def own(self) -> list[Path]:
        """Those that are there."""
        return list(self._own.glob("*"))

    def left_by_others(self, version: int, directory: str) -> list[Path]:
        """What trainers that have gone need not have left, as the engines serve that."""

        def needed(place: Path) -> bool:
            return str(place) == directory or not is_useless(place.name, version)

        found: list[Path] = []
        for trainer in self._own.parent.glob("*"):
            with suppress(OSError):  # its trainer, which leaves, removes it at this moment
                if trainer != self._own and _has_left(trainer):
                    found += _without(needed, trainer)
        return found

    def leave(self, needed: Container[str]) -> list[Path]:
        """This trainer goes: what it need not leave. Others remove the rest in time."""
        useless = _without(lambda place: str(place) in needed, self._own)
        if useless != [self._own]:
            with suppress(OSError):  # no room, say: it counts as left when the process has ended
                (self._own / LEFT).touch()
        return useless

    def end(self) -> list[Path]:
        """The run is over: no trainer's are needed."""
        return [self._own.parent]


def _has_left(trainer: Path) -> bool:
    if not TRAINER.fullmatch(trainer.name) or trainer.stat().st_uid != os.getuid():
        return False
    return (trainer / LEFT).exists() or is_gone(trainer.name, host(), started_at)


def _without(needed: Callable[[Path], bool], trainer: Path) -> list[Path]:
    """The directory, or what is not ``needed`` of it where something is."""
    places = [place for place in trainer.glob("*") if place.name != LEFT]
    useless = [place for place in places if not needed(place)]
    return [trainer] if len(useless) == len(places) else useless
