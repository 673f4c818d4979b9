"""Ray as in verl of August 2026: one balancer actor for all workers, asked before every call and told after it.

As there, the balancer is an actor of plain (not asyncio) methods, and nobody waits for what it is told.
"""

from __future__ import annotations

from typing import Any

from cachetools import LRUCache

from benchmarks.processes import Processes
from benchmarks.relay.cluster import Shape
from benchmarks.relay.peers import ray
from benchmarks.relay.traffic import Case, sampling_params

FORMS = ray.FORMS
PACE = 0.08
SESSIONS = 10_000


def start(processes: Processes, shape: Shape) -> ray.RayCallers:
    """Ray, servers, balancer, callers."""
    return ray.start(processes, shape, __name__)


class Balancer:
    """The session's server, or the one with the fewest calls in flight."""

    def __init__(self, servers: int) -> None:
        self._in_flight = [0] * servers
        self._sessions: LRUCache[str, int] = LRUCache(SESSIONS)

    def acquire(self, session: str) -> int:
        if (which := self._sessions.get(session)) is None:
            which = min(range(len(self._in_flight)), key=self._in_flight.__getitem__)
            self._sessions[session] = which
        self._in_flight[which] += 1
        return which

    def release(self, which: int) -> None:
        self._in_flight[which] -= 1


def shared(ray: Any, servers: int) -> Any:
    """The balancer's actor."""
    return ray.remote(num_cpus=0)(Balancer).remote(servers)


class Client:
    """A worker's view of the servers."""

    def __init__(self, servers: list[Any], shared: Any, case: Case) -> None:
        self._servers = servers
        self._balancer = shared
        self._params = sampling_params(case)

    async def open(self) -> None:
        """Actors need no connection."""

    async def generate(self, session: str, prompt: Any) -> tuple[Any, Any]:
        which = await self._balancer.acquire.remote(session)
        try:
            answer: tuple[Any, Any] = await self._servers[which].generate.remote(session, prompt, self._params)
            return answer
        finally:
            self._balancer.release.remote(which)

    async def close(self) -> None:
        """Nothing to close."""
