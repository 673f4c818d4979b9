"""Signs of life of this process: how long its event loop has not turned, or a thread that all wait for has been at one
thing. Written by whoever is alive, read by the heartbeat thread (`launcher.bootstrap`).

Process-wide, since a process has one main loop and one launcher; nothing of zagent is imported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: The loop marks itself this often, in seconds: far below what counts as slow (3 s), and no load (a mark costs 1 µs).
MARK_S = 0.5


class _Signs:
    """Of this process."""

    def __init__(self) -> None:
        #: When the main loop last turned (`time.monotonic`); None = nobody has said so yet.
        self.turned: float | None = None
        #: What single threads are at, each with the time it began.
        self.busy: dict[object, tuple[float, str]] = {}


_signs = _Signs()


def mark() -> None:
    """The main loop has turned."""
    _signs.turned = time.monotonic()


def watch_loop() -> None:
    """Mark the turns of the running loop, for as long as it lives."""
    mark()
    asyncio.get_running_loop().call_later(MARK_S, watch_loop)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Within, a thread that everybody waits for is at ``what``: the time it takes counts as lag."""
    key = object()
    _signs.busy[key] = (time.monotonic(), what)
    try:
        yield
    finally:
        del _signs.busy[key]


def longest() -> tuple[float, str] | None:
    """What has kept others waiting longest: for how many seconds (up to `MARK_S` where all is well), and what it is.
    None before the first mark."""
    if _signs.turned is None:
        return None
    began, what = min([(_signs.turned, "the event loop"), *_signs.busy.copy().values()])
    return time.monotonic() - began, what
