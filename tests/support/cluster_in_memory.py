"""A cluster without processes or sockets: broker core, members and callers over a `MemoryRouter`, on virtual time.

Use inside ``support.virtual_clock.run``:

    async with Cluster() as cluster:
        await cluster.engine(0)
        calls = await cluster.caller()
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from support.sim_engines import started
from zagent.broker.core import BrokerCore
from zagent.broker.record import Assignment
from zagent.broker.server import TICK_S, deliver, feed
from zagent.client.calls import Calls, Retry
from zagent.client.link import CONTROL, DATA, Identity, Link
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.client.member import Member, Method
from zagent.engine.memory import Memory
from zagent.engine.methods import EngineServer
from zagent.wire.channel import Frames, MemoryRouter
from zagent.wire.codec import encode_header
from zagent.wire.messages import Exited, Pulse

SECRET = "s3cret"
#: Virtual seconds after which a cluster whose calls still wait is taken to hang.
PATIENCE_S = 100_000.0


class Cluster:
    """The broker, and peers as they are asked for; ``latency`` seconds per message, or a ``router`` of your own.

    ``pulses``: the broker ticks all the time, and not only while that may change something.
    """

    def __init__(
        self, latency: float = 0.0, *, router: MemoryRouter | None = None, pulses: bool = False, **core: Any
    ) -> None:
        self.assignments: list[Assignment] = []
        self.router = router or MemoryRouter(latency)
        self.router.receiver = self._arrived
        self._holders: list[bytes] = []  #: of gates, as the broker has written them down
        self._options = {"secret": SECRET, "record": self.assignments.append, "remember": self._remember, **core}
        self.core = BrokerCore(**self._options)
        self.engines: list[EngineServer] = []
        self.links: list[Link] = []
        self.exits: list[Exited] = []
        self._launcher: Link | None = None
        self._pulses = pulses
        self._there = True  #: the broker
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Cluster:
        self._tick_while_restless()
        return self

    async def __aexit__(self, *error: object) -> None:
        for link in self.links:
            link.close()
        for server in self.engines:
            await server.engine.close()
        self._stop_ticking()
        await asyncio.sleep(0)

    # ---- the broker -------------------------------------------------------------------------------------------------

    def _arrived(self, batch: list[tuple[bytes, Frames]]) -> None:
        feed(self.core, self.router, batch, asyncio.get_running_loop().time())
        self._tick_while_restless()

    def _tick_while_restless(self) -> None:
        if self._there and self._timer is None and (self._pulses or self.core.restless):
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        if now > PATIENCE_S:
            return  # so that the clock finds nothing left to do, and says so
        deliver(self.core, self.router, self.core.tick(now), now)
        self._tick_while_restless()

    def _stop_ticking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _remember(self, holders: list[bytes]) -> None:
        self._holders = holders

    def kill_broker(self) -> None:
        """What it had is lost, and all that is under way."""
        self._there = False
        self._stop_ticking()
        self.router.cut()

    def start_broker(self, expected: Sequence[Sequence[Any]] | None = None) -> None:
        """The next incarnation; by default it waits for the members that are alive."""
        alive = [link.identity for link in self.links if link.identity.pool and link.incarnation and not link.closed]
        self._options["incarnation"] = self._options.get("incarnation", 1) + 1
        self.core = BrokerCore(
            **self._options,
            expected=[[i.pool, i.name, i.epoch] for i in alive] if expected is None else expected,
            holders=self._holders,
            now=asyncio.get_running_loop().time(),
        )
        self._there = True
        self.router.mend()
        self._tick_while_restless()

    async def restart_broker(self, expected: Sequence[Sequence[Any]] | None = None, *, after_s: float = 0.0) -> None:
        """It is killed, and another takes its place."""
        self.kill_broker()
        await asyncio.sleep(after_s)
        self.start_broker(expected)

    def forget(self, link: Link) -> None:
        """The broker, if it is there, finds that peer out of reach."""
        if not self._there:
            return
        now = asyncio.get_running_loop().time()
        pulse = [encode_header(Pulse(0))]
        deliver(self.core, self.router, self.core.unsendable(CONTROL + link.nonce, pulse, now), now)
        self._tick_while_restless()

    # ---- its peers --------------------------------------------------------------------------------------------------

    def die(self, link: Link, member: Member | None = None) -> None:
        """That process ends without a word."""
        for lane in (DATA, CONTROL):
            self.router.detach(lane + link.nonce)
        link.closed, link._open = "it died", False
        for task in () if member is None else member._tasks():
            task.cancel()

    async def exited(self, link: Link, reason: str = "it was killed", *, crashed: bool = False) -> None:
        """The launcher reports the end of a member; to each broker anew."""
        if self._launcher is None:
            self._launcher = await self.link(Identity(name="launcher", secret=SECRET))
            self._launcher.on_rejoin(lambda same: self._report(self.exits))
        me = link.identity
        self.exits.append(Exited(me.pool, me.name, me.epoch, reason, crashed))
        self._report(self.exits[-1:])

    def _report(self, exits: list[Exited]) -> None:
        assert self._launcher is not None
        for exited in exits:
            self._launcher.send(exited, control=True)

    async def link(self, identity: Identity | None = None) -> Link:
        link = Link(self.router.connect, identity)
        self.links.append(link)
        await link.open()
        return link

    async def engine(
        self,
        index: int = 0,
        *,
        pool: str = "engine",
        credits: int = 8,
        epoch: int = 1,
        mode: str = "standalone",
        **sim: Any,
    ) -> EngineServer:
        """A simulated engine behind the broker."""
        engine = await started(index, **sim)
        link = Link(self.router.connect, Identity(pool, f"{pool}-{index}", epoch, credits, SECRET))
        server = EngineServer(engine, link, memory=Memory(mode))
        self.links.append(link)
        self.engines.append(server)
        await link.open()
        return server

    async def member(self, name: str, methods: dict[str, Method], **options: Any) -> Member:
        """A member that serves ``methods``; its link is the last of `links`."""
        member, link = self.new_member(name, methods, **options)
        await link.open()
        return member

    def new_member(
        self,
        name: str,
        methods: dict[str, Method],
        *,
        pool: str = "engine",
        credits: int = 8,
        epoch: int = 1,
        facts: dict[str, Any] | None = None,
    ) -> tuple[Member, Link]:
        """One whose link is not open yet."""
        link = Link(self.router.connect, Identity(pool, name, epoch, credits, SECRET, facts or {}))
        self.links.append(link)
        return Member(link, methods), link

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
