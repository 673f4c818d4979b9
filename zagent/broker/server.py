"""The broker process: a thin loop around the core. Poll, feed, send."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from zagent.broker.core import BrokerCore, Sends
from zagent.broker.dispatch import Assignment, Frames
from zagent.errors import ConfigError
from zagent.wire.sockets import RouterSocket

#: Longest wait for a message, hence between ticks and until a stop is noticed, in ms.
POLL_MS = 200
#: Seconds between two ticks: waiting calls expire this late at most.
TICK_S = 0.2


class Router(Protocol):
    """What the broker sends through: a `RouterSocket`, or its in-memory twin."""

    def send(self, identity: bytes, frames: Frames) -> bool:
        """False when the receiver is gone."""


def deliver(core: BrokerCore, router: Router, sends: Sends, now: float) -> None:
    """Send what the core wants sent; what cannot be delivered is an event for it, with sends of its own."""
    todo = deque(sends)
    while todo:
        to, frames = todo.popleft()
        if not router.send(to, frames):
            todo.extend(core.unsendable(to, frames, now))


def feed(core: BrokerCore, router: Router, batch: list[tuple[bytes, Frames]], now: float) -> None:
    """Hand the core a batch of messages, then send all that follows: one wake-up of the I/O thread a receiver."""
    sends: Sends = []
    for sender, frames in batch:
        sends += core.frames(sender, frames, now)
    deliver(core, router, sends, now)


def serve(core: BrokerCore, router: RouterSocket, stopped: Callable[[], bool]) -> None:
    """Run until ``stopped()``."""
    next_tick = 0.0
    while not stopped():
        batch = router.receive(POLL_MS)
        now = time.monotonic()
        feed(core, router, batch, now)
        if now >= next_tick:
            next_tick = now + TICK_S
            deliver(core, router, core.tick(now), now)


def main(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Entry point of the broker process.

    Settings: `endpoint`, `secret`, `pools` (names), `max_pending`, `sticky_cache_size`, `incarnation`, `info` (told to
    every peer), and `record` (path of the assignments' JSON lines, or None). Reports the bound `endpoint` when ready.
    """
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))  # only noted; the loop acts
    with ExitStack() as resources:
        core = BrokerCore(
            secret=settings["secret"],
            pools=settings["pools"],
            max_pending=settings["max_pending"],
            sticky_cache_size=settings["sticky_cache_size"],
            incarnation=settings["incarnation"],
            facts=settings["info"],
            record=_recorder(settings.get("record"), resources),
        )
        router = RouterSocket(settings["endpoint"])
        resources.callback(router.close)
        ready({"endpoint": router.endpoint})
        serve(core, router, lambda: bool(stop))


def _recorder(path: str | None, resources: ExitStack) -> Callable[[Assignment], None] | None:
    if path is None:
        return None
    recorder = Recorder(Path(path))
    resources.callback(recorder.close)
    return recorder.write


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
