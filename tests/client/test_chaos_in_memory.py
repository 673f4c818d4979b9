"""Brokers and members die at random, peers are forgotten, connections are lost: every call ends once, with its result.

All on virtual time, and all from one seed: a failure is repeated by its number (and the environment's PYTHONHASHSEED).
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from support.cluster_in_memory import Cluster
from support.rough_router import RoughRouter
from support.virtual_clock import run
from zagent.client.calls import Calls, Retry
from zagent.client.link import Link
from zagent.client.member import Member
from zagent.errors import PoisonedRequest
from zagent.wire.messages import Call

MEMBERS, CALLERS, CALLS = 4, 3, 60
#: Seconds of trouble; calls begin in the first half.
TROUBLE_S = 30.0
#: No call is so unlucky.
RETRY = Retry(attempts=1000)


class Life:
    """A member's process, from its start to its end."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.member: Member
        self.link: Link
        self.ended = False
        self.cut_off = False  #: a broker lost sight of it, and may have given its calls to others


class Chaos:
    """A cluster in trouble."""

    def __init__(self, seed: int, *deeds: str) -> None:
        self.chance = random.Random(seed)
        self.cluster = Cluster(router=RoughRouter(self.chance, slowest=0.02), pulses=True)
        self._one_broker = asyncio.Lock()
        self.lives: dict[str, Life] = {}
        self.callers: list[Calls] = []
        #: Who ran which (call, attempt) without being stopped, in order.
        self.runs: defaultdict[tuple[bytes, int], list[Life]] = defaultdict(list)
        self.happened = dict.fromkeys(deeds, 0)

    async def start(self, name: str, epoch: int) -> None:
        life = Life(name, epoch)

        async def double(argument: Any, call: Call) -> Any:
            number, seconds = argument
            runs = self.runs[call.call, call.attempt]
            runs.append(life)
            try:
                await asyncio.sleep(seconds / 2)
                life.member.progress(call, number)
                await asyncio.sleep(seconds / 2)
            except asyncio.CancelledError:
                if not life.ended:
                    runs.remove(life)
                raise
            return 2 * number

        life.member, life.link = self.cluster.new_member(name, {"double": double}, credits=4, epoch=epoch)
        await life.link.open()
        life.link.keep()
        self.lives[name] = life

    async def one_call(self, calls: Calls, number: int) -> Any:
        await asyncio.sleep(self.chance.random() * TROUBLE_S / 2)
        seconds = self.chance.choice([0.0, 0.01, 0.3, 2.0])
        session = self.chance.choice(["", f"s{number % 7}"])
        try:
            return await calls.call("engine", "double", [number, seconds], session=session)
        except PoisonedRequest:  # aboard at two deaths for which there is no culprit
            return None

    async def kill_broker(self) -> None:
        async with self._one_broker:
            await self.cluster.restart_broker(after_s=self.chance.choice([0.0, 0.02, 0.5, 2.5]))

    async def kill_member(self, crashed: bool = False) -> None:
        life = self.lives[self.chance.choice(sorted(self.lives))]
        if life.ended:
            return
        life.ended = True
        self.cluster.die(life.link, life.member)
        await asyncio.sleep(self.chance.random() * 0.1)
        await self.cluster.exited(life.link, crashed=crashed)
        await self.start(life.name, life.epoch + 1)

    async def crash_member(self) -> None:
        await self.kill_member(crashed=True)

    def _peer(self) -> Link:
        lives = {life.link: life for life in self.lives.values() if not life.ended}
        link = self.chance.choice([*lives, *(calls.link for calls in self.callers)])
        if link in lives:
            lives[link].cut_off = True
        return link

    async def forget(self) -> None:
        self.cluster.forget(self._peer())

    async def lose(self) -> None:
        router = self.cluster.router
        assert isinstance(router, RoughRouter)
        router.lose(self._peer().nonce)

    async def trouble(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as under_way:
            while loop.time() < TROUBLE_S:
                await asyncio.sleep(self.chance.expovariate(2.0))
                deed = self.chance.choice(list(self.happened))
                self.happened[deed] += 1
                under_way.create_task(getattr(self, deed)())

    async def main(self) -> list[Any]:
        async with self.cluster:
            for number in range(MEMBERS):
                await self.start(f"m{number}", 1)
            self.callers = [await self.cluster.caller(RETRY) for _ in range(CALLERS)]
            for calls in self.callers:
                calls.link.keep()
            tasks = [self.one_call(calls, number) for calls in self.callers for number in range(CALLS)]
            results, _ = await asyncio.gather(asyncio.gather(*tasks), self.trouble())
            await asyncio.sleep(15)  # until nobody may come back for a call
            self.check_quiet()
            return results

    def check_quiet(self) -> None:
        assert self.cluster.quiet(), (self.cluster.in_flight(), self.cluster.core.dispatch.pending)
        assert [len(calls) for calls in self.callers] == [0] * CALLERS
        assert {life.name: life.member.in_flight for life in self.lives.values()} == dict.fromkeys(self.lives, 0)
        takes = {name: member.takes_calls for name, member in self.cluster.core.pools["engine"].members.items()}
        assert takes == dict.fromkeys(self.lives, True)
        assert sum(life.link.malformed for life in self.lives.values()) == 0

    def run_twice(self) -> list[Any]:
        """Attempts that ran again though the member that had them was always there."""
        return [
            (call.hex(), attempt, [(life.name, life.epoch) for life in lives])
            for (call, attempt), lives in self.runs.items()
            if not all(life.ended or life.cut_off for life in lives[:-1])
        ]


#: What may happen to the peers of a broker that lives.
PEERS = ("kill_member", "crash_member", "forget", "lose")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("deeds", [PEERS, ("kill_broker",), ("kill_broker", *PEERS)], ids=len)
def test_every_call_ends_once_whatever_dies(deeds: tuple[str, ...], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its result, or convicted; nothing runs twice where a member has it, and nothing is left."""
    chaos = Chaos(seed, *deeds)
    monkeypatch.setattr("zagent.client.link.os.urandom", chaos.chance.randbytes)
    results = run(chaos.main())
    assert all(result in (2 * (at % CALLS), None) for at, result in enumerate(results))
    assert results.count(None) <= chaos.happened.get("crash_member", 0)  # each death convicts one at most
    assert chaos.run_twice() == []
    assert min(chaos.happened.values()) > 0
    assert sum(chaos.happened.values()) > 30
    if deeds == ("kill_broker",):
        assert {calls.retries for calls in chaos.callers} == {0}
