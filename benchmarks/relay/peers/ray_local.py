"""Ray as in verl of January 2026: each worker chooses servers itself, from a heap of its own and a cache of sessions.

The heap counts calls ever sent, not those in flight, and knows nothing of other workers' calls.
"""

from __future__ import annotations

import heapq
import random
from typing import Any

from cachetools import LRUCache

from benchmarks.processes import Processes
from benchmarks.relay.cluster import Shape
from benchmarks.relay.peers import ray
from benchmarks.relay.traffic import Case, sampling_params

FORMS = ray.FORMS
PACE = 0.15
SESSIONS = 10_000


def start(processes: Processes, shape: Shape) -> ray.RayCallers:
    """Ray, servers, callers."""
    return ray.start(processes, shape, __name__)


def shared(ray: Any, servers: int) -> None:
    """Workers have nothing in common."""


class Client:
    """A worker's view of the servers."""

    def __init__(self, servers: list[Any], shared: None, case: Case) -> None:
        order = random.sample(range(len(servers)), len(servers))
        self._heap = [(0, place, servers[which]) for place, which in enumerate(order)]
        self._sessions: LRUCache[str, Any] = LRUCache(SESSIONS)
        self._params = sampling_params(case)

    async def open(self) -> None:
        """Actors need no connection."""

    async def generate(self, session: str, prompt: Any) -> tuple[Any, Any]:
        answer: tuple[Any, Any] = await self._server(session).generate.remote(session, prompt, self._params)
        return answer

    def _server(self, session: str) -> Any:
        if (server := self._sessions.get(session)) is None:
            count, place, server = self._heap[0]
            heapq.heapreplace(self._heap, (count + 1, place, server))
            self._sessions[session] = server
        return server

    async def close(self) -> None:
        """Nothing to close."""
