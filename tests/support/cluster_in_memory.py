"""A cluster without processes or sockets: broker core, members and callers over a `MemoryRouter`, on virtual time.

Use inside ``support.virtual_clock.run``:

    async with Cluster() as cluster:
        await cluster.engine(0)
        calls = await cluster.caller()
"""

from __future__ import annotations

import asyncio
from typing import Any

from support.sim_engines import started
from zagent.broker.core import BrokerCore
from zagent.broker.dispatch import Assignment
from zagent.broker.server import TICK_S, deliver, feed
from zagent.client.calls import Calls, Retry
from zagent.client.link import Identity, Link
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.client.member import Member, Method
from zagent.engine.server import EngineServer
from zagent.wire.channel import Frames, MemoryRouter

SECRET = "s3cret"
#: Virtual seconds after which a cluster whose calls still wait is taken to hang.
PATIENCE_S = 100_000.0


class Cluster:
    """The broker, and peers as they are asked for; ``latency`` seconds per message."""

    def __init__(self, latency: float = 0.0, **core: Any) -> None:
        self.assignments: list[Assignment] = []
        self.router = MemoryRouter(latency)
        self.router.receiver = self._arrived
        self.core = BrokerCore(secret=SECRET, record=self.assignments.append, **core)
        self.engines: list[EngineServer] = []
        self.links: list[Link] = []
        self._ticking = False

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *error: object) -> None:
        for link in self.links:
            link.close()
        for server in self.engines:
            await server.engine.close()
        await asyncio.sleep(0)

    def _arrived(self, batch: list[tuple[bytes, Frames]]) -> None:
        loop = asyncio.get_running_loop()
        feed(self.core, self.router, batch, loop.time())
        self._tick_while_calls_wait(loop)

    def _tick_while_calls_wait(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.core.dispatch.pending and not self._ticking:
            self._ticking = True
            loop.call_later(TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = False
        if loop.time() > PATIENCE_S:
            return  # so that the clock finds nothing left to do, and says so
        deliver(self.core, self.router, self.core.tick(loop.time()), loop.time())
        self._tick_while_calls_wait(loop)

    async def link(self, identity: Identity | None = None) -> Link:
        link = Link(self.router.connect, identity)
        self.links.append(link)
        await link.open()
        return link

    async def engine(
        self, index: int = 0, *, pool: str = "engine", credits: int = 8, epoch: int = 1, **sim: Any
    ) -> EngineServer:
        """A simulated engine behind the broker."""
        engine = await started(index, **sim)
        link = Link(self.router.connect, Identity(pool, f"{pool}-{index}", epoch, credits, SECRET))
        server = EngineServer(engine, link)
        self.links.append(link)
        self.engines.append(server)
        await link.open()
        return server

    async def member(
        self, name: str, methods: dict[str, Method], *, pool: str = "engine", credits: int = 8, epoch: int = 1
    ) -> Member:
        """A member that serves ``methods``; its link is the last of `links`."""
        link = Link(self.router.connect, Identity(pool, name, epoch, credits, SECRET))
        member = Member(link, methods)
        self.links.append(link)
        await link.open()
        return member

    async def caller(self, retry: Retry | None = None) -> Calls:
        link = Link(self.router.connect)
        calls = Calls(link, retry)
        self.links.append(link)
        await link.open()
        return calls

    async def manager(self) -> AsyncLLMServerManager:
        return AsyncLLMServerManager(await self.caller())

    def in_flight(self, pool: str = "engine") -> dict[str, int]:
        return {name: member.in_flight for name, member in self.core.pools[pool].members.items()}

    def quiet(self) -> bool:
        """Whether the broker holds nothing, and the engines agree."""
        counts = [count for pool in self.core.pools for count in self.in_flight(pool).values()]
        own = [server.engine.in_flight() for server in self.engines]
        return not any(counts) and not any(own) and self.core.dispatch.pending == 0
