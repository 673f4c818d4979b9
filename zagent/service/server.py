"""The service process: an object of a user's class behind the broker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from zagent import alive
from zagent.client.calls import Calls
from zagent.client.link import Identity, Link
from zagent.client.member import Member
from zagent.client.process import contained, end_cut_off, run_main, stop_requested, stopped
from zagent.client.services import Services
from zagent.errors import RemoteError
from zagent.service.base import Actor, build
from zagent.wire.sockets import DealerChannel

#: Shares of the time that the launcher gives a process to end: for the calls that still run, and for `close()`.
LEAVE_SHARE, CLOSE_SHARE = 0.3, 0.5


class Outgoing:
    """The service's own calls to other pools: a link of its own, opened by the first call."""

    def __init__(self, endpoint: str) -> None:
        self._link = Link(partial(DealerChannel, endpoint))
        self._calls = Calls(self._link)
        self._opening: asyncio.Task[None] | None = None

    async def here(self) -> Calls:
        """The pending table. Raises `ConnectionLost` when the broker does not answer."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        if not self._opening.done():
            await asyncio.shield(self._opening)  # others may wait for it
        return self._calls

    async def _open(self) -> None:
        await self._link.open()
        self._link.keep()

    def close(self) -> None:
        """What still waits is told."""
        self._link.close()


async def serve(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Serve until SIGTERM."""
    asyncio.get_running_loop().set_task_factory(contained(RemoteError, "a task of a service"))
    name = settings["pool"]
    outgoing = Outgoing(settings["endpoint"])
    services = Services.configured(outgoing.here, settings["services"])
    actor = Actor(name, build(name, settings["target"], settings["args"], services))
    print(f"services.{name}: starting", flush=True)  # the last line of the log where start() hangs
    await actor.start()
    member, link = await _join(settings, actor)
    stop = stop_requested()  # last: the class may have brought a library with signal handlers of its own
    alive.watch_loop()
    ready({})
    cut_off = await stopped(stop, link)
    await _leave(member, link, actor, cut_off or "the cluster stops", settings["stop_timeout_s"])
    outgoing.close()
    if cut_off:
        end_cut_off(settings["name"], cut_off)


async def _join(settings: dict[str, Any], actor: Actor) -> tuple[Member, Link]:
    facts = {"pid": os.getpid(), "idempotent": actor.idempotent}
    identity = Identity(
        settings["pool"], settings["name"], settings["epoch"], settings["credits"], settings["secret"], facts
    )  # fmt: skip
    link = Link(partial(DealerChannel, settings["endpoint"]), identity)
    member = Member(link, actor.methods)
    await link.open()
    link.keep()
    return member, link


async def _leave(member: Member, link: Link, actor: Actor, reason: str, patience: float) -> None:
    actor.leaving = True
    try:
        await asyncio.wait_for(member.leave(reason), LEAVE_SHARE * patience)
    except TimeoutError:
        print("calls go on though they were cancelled: left behind", file=sys.stderr, flush=True)
    link.close()
    await actor.close(CLOSE_SHARE * patience)


def main(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Entry point of a service process.

    Settings: `endpoint`, `secret`, `pool` (the service's name), `name`, `epoch`, `credits`, `target`, `args`,
    `services` (`{name: {model: bool}}`, all of the cluster), `stop_timeout_s`.
    """
    run_main(serve(settings, ready))
