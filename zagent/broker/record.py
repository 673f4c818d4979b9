"""The record of who was given what, for tests and for people who debug routing."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zagent.broker.pool import Pool
from zagent.errors import ConfigError


class Assignment(NamedTuple):
    """Event record: a call was given to a member."""

    now: float  #: s
    pool: str
    session: str
    member: str
    #: "new" (first call of a session, or no session), "group" (the same, where the last of its group went), "sticky",
    #: or "rebound" (its former member takes no calls, or is overloaded).
    why: str
    #: Requests in flight at every member that takes calls, before this one.
    in_flight: dict[str, int]


def assignment(pool: Pool, session: str, member: str, why: str, now: float) -> Assignment:
    """That of a call which ``member`` is about to be given."""
    counts = {m.name: m.in_flight for m in pool.members.values() if m.takes_calls}
    return Assignment(now, pool.name, session, member, why, counts)


class Recorder:
    """Assignments as JSON lines. A disk that is full ends the record, not the broker."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            text = f"routing.record={str(path)!r} cannot be written: {error.strerror or error}"
            raise ConfigError(text) from error
        self._broken = False

    def write(self, assignment: Assignment) -> None:
        """One line."""
        if self._broken:
            return
        try:
            print(json.dumps(assignment._asdict()), file=self._file)
        except OSError as error:
            self._broken = True
            print(f"routing.record ends here: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """What could not be written is lost, and was reported."""
        with suppress(OSError):
            self._file.close()
