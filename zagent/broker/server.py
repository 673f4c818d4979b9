"""The broker process: a thin loop around the core. Poll, feed, send."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from zagent import alive
from zagent.broker.awake import AwakeClock
from zagent.broker.core import BrokerCore, Sends
from zagent.broker.holders import HoldersFile
from zagent.broker.leases import Frames
from zagent.broker.record import Assignment, Recorder
from zagent.broker.routing import routing
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
    for to, frames in sends:
        if not router.send(to, frames):
            sends += core.unsendable(to, frames, now)  # the loop comes to these, too


def feed(core: BrokerCore, router: Router, batch: list[tuple[bytes, Frames]], now: float) -> None:
    """Hand the core a batch of messages, then send all that follows: one wake-up of the I/O thread a receiver."""
    sends: Sends = []
    for sender, frames in batch:
        sends += core.frames(sender, frames, now)
    deliver(core, router, sends, now)


def serve(core: BrokerCore, router: RouterSocket, clock: Callable[[], float], stopped: Callable[[], bool]) -> None:
    """Run until ``stopped()``."""
    next_tick = clock()
    while not stopped():
        alive.mark()
        batch = router.receive(POLL_MS)
        now = clock()
        feed(core, router, batch, now)
        if now >= next_tick:
            next_tick = now + TICK_S
            core.counters["turned_away"] = router.turned_away()
            deliver(core, router, core.tick(now), now)


def main(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Entry point of the broker process.

    Settings: `endpoint`, `secret`, `pools` (names), `max_pending`, `sticky_cache_size`, `incarnation`, `expected` (of a
    broker in the place of one that died: [pool, name, epoch] of the members that live), `info` (told to every peer),
    and, if need be, `holders` (path of the file that tells the next broker who holds gates), `routing`
    (`RoutingConfig.thresholds` by pool) and `record` (path of the assignments' JSON lines). Reports the bound
    `endpoint` when ready.
    """
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))  # only noted; the loop acts
    holders = HoldersFile(Path(settings["holders"])) if "holders" in settings else None
    clock = AwakeClock()
    with ExitStack() as resources:
        core = BrokerCore(
            secret=settings["secret"],
            pools=settings["pools"],
            max_pending=settings["max_pending"],
            sticky_cache_size=settings["sticky_cache_size"],
            routing={
                pool: routing(thresholds, settings["sticky_cache_size"])
                for pool, thresholds in settings.get("routing", {}).items()
            },
            incarnation=settings["incarnation"],
            expected=settings.get("expected", ()),
            holders=() if holders is None else holders.read(),
            remember=None if holders is None else holders.write,
            facts=settings["info"],
            record=_recorder(settings.get("record"), resources),
            now=clock(),
        )
        router = RouterSocket(settings["endpoint"], settings.get("keys"))
        resources.callback(router.close)
        ready({"endpoint": router.endpoint})
        serve(core, router, clock, lambda: bool(stop))


def _recorder(path: str | None, resources: ExitStack) -> Callable[[Assignment], None] | None:
    if path is None:
        return None
    recorder = Recorder(Path(path))
    resources.callback(recorder.close)
    return recorder.write
