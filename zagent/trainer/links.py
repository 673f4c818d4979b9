"""A trainer's links to the broker: one of its I/O thread, and one of every event loop that calls engines directly."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zagent.client.calls import Calls
from zagent.client.link import WELCOME_TIMEOUT_S, Link
from zagent.errors import ConnectionLost
from zagent.wire.sockets import DealerChannel


class Links:
    """Opened by the first who asks on a loop, closed together.

    A broker that dies is started again, and they with it; one that has been away for ``patience_s`` seconds is gone,
    and they close.
    """

    def __init__(self, endpoint: str, *, patience_s: float) -> None:
        self._endpoint, self._patience_s = endpoint, patience_s
        self._openings: dict[asyncio.AbstractEventLoop, asyncio.Task[Calls]] = {}
        self._lock = threading.Lock()  # loops of several threads ask
        #: Why they are closed; "" while they are not.
        self.closed = ""

    async def here(self, timeout: float = WELCOME_TIMEOUT_S) -> Calls:
        """The pending table of the running loop; however many ask at once, one link is opened per loop.

        Raises:
            ConnectionLost: closed, or nobody answers at the endpoint within ``timeout`` seconds.
        """
        if self.closed:
            raise ConnectionLost(f"the link to the broker is closed: {self.closed}")
        opening = self._opening(timeout)
        calls = opening.result() if opening.done() else await asyncio.shield(opening)
        if self.closed:  # while it was opened
            calls.link.close(self.closed)
        return calls

    def _opening(self, timeout: float) -> asyncio.Task[Calls]:
        loop = asyncio.get_running_loop()
        with self._lock:
            ended = [(known, self._openings.pop(known)) for known in list(self._openings) if known.is_closed()]
            opening = self._openings.get(loop)
            if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
                opening = loop.create_task(open_calls(self._endpoint, timeout, self._patience_s))
                self._openings[loop] = opening
        for pair in ended:
            _close(*pair, "its event loop has ended")
        return opening

    def close(self, reason: str) -> None:
        """Close all, each on its loop; whatever waits on them is told ``reason``."""
        self.closed = self.closed or reason
        with self._lock:
            openings, self._openings = list(self._openings.items()), {}
        for loop, opening in openings:
            _close(loop, opening, reason)


def _close(loop: asyncio.AbstractEventLoop, opening: asyncio.Task[Calls], reason: str) -> None:
    if not opening.done() or opening.cancelled() or opening.exception() is not None:
        return  # an opening that does not end well closes its link itself
    link = opening.result().link
    if loop.is_closed():
        link.close(reason)
    else:
        loop.call_soon_threadsafe(link.close, reason)


async def open_calls(endpoint: str, timeout: float, patience_s: float) -> Calls:
    """A link of this loop to the broker, as a caller. Raises `ConnectionLost`, which names the endpoint."""
    link = Link(partial(DealerChannel, endpoint))
    calls = Calls(link)
    try:
        await link.open(timeout)
    except ConnectionLost as error:
        hint = (
            "; one with broker.keys answers only to ?keys=FILE.client of that run"
            if endpoint.startswith("tcp://")
            else ""
        )
        raise ConnectionLost(f"no cluster at {endpoint!r}: {error}{hint}") from error
    link.keep(patience_s)
    return calls


def open_launcher(endpoint: str, facts: Mapping[str, Any]) -> int | None:
    """A pidfd of the launcher behind ``endpoint``, by the record in its run directory (launcher/record.py); None where
    it is out of sight: on another host, in another container, gone."""
    if not endpoint.startswith("ipc://"):
        return None
    try:
        record = json.loads((Path(facts["run_dir"]) / "launcher.json").read_text())
        if record["pid_namespace"] == os.readlink("/proc/self/ns/pid"):  # else the pid means somebody else here
            return os.pidfd_open(record["pid"])
    except (OSError, ValueError, KeyError):
        pass
    return None
