"""Rooms whose heartbeat is looked at. All beat twenty times a second."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher import heartbeat
from zagent import alive

Ready = Callable[[Mapping[str, Any]], None]


def turning(settings: Mapping[str, Any], ready: Ready) -> None:
    """Its loop turns for ``settings["seconds"]``."""
    heartbeat.BEAT_S = 0.05

    async def main() -> None:
        alive.watch_loop()
        ready({"who": "turning"})
        await asyncio.sleep(settings["seconds"])

    asyncio.run(main())


def blocked(settings: Mapping[str, Any], ready: Ready) -> None:
    """Its loop stands still once it is ready."""
    heartbeat.BEAT_S = 0.05

    async def main() -> None:
        alive.watch_loop()
        ready({})
        time.sleep(settings["seconds"])  # noqa: ASYNC251 (that is its purpose)

    asyncio.run(main())


def flooding(settings: Mapping[str, Any], ready: Ready) -> None:
    """Takes memory for ever, without ever having become ready."""
    flood()


def flood() -> None:
    held: list[bytearray] = []
    while True:
        held.append(bytearray(b"x" * 10_000_000))


def unheard(settings: Mapping[str, Any], ready: Ready) -> None:
    """Ends, with exit code 5, once its heartbeat has ended."""
    heartbeat.BEAT_S = 0.05
    ready({})
    while any(thread.name == "heartbeat" for thread in threading.enumerate()):
        time.sleep(0.01)
    sys.exit(5)
