"""Processes that are to be started again, each when its wait is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from launcher.specs import ChildSpec


class Restarts:
    """Calls ``start`` with each spec once its time has come, on the running loop."""

    def __init__(self, start: Callable[[ChildSpec], None]) -> None:
        self._start = start
        self._waiting: dict[str, tuple[ChildSpec, asyncio.TimerHandle]] = {}

    def schedule(self, spec: ChildSpec, after_s: float) -> None:
        """Start ``spec`` in ``after_s`` seconds."""
        timer = asyncio.get_running_loop().call_later(after_s, self._due, spec)
        self._waiting[spec.name] = (spec, timer)

    def of_pool(self, pool: str) -> int:
        """How many of that pool wait."""
        return sum(spec.pool == pool for spec, _ in self._waiting.values())

    def cancel(self) -> None:
        """None of them any more."""
        while self._waiting:
            self._waiting.popitem()[1][1].cancel()

    def _due(self, spec: ChildSpec) -> None:
        del self._waiting[spec.name]
        self._start(spec)
