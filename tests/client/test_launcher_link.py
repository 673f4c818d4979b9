"""The launcher's line to the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from support.cluster_in_memory import SECRET, Cluster
from support.virtual_clock import run
from zagent.broker.pool import State
from zagent.client import link as link_module
from zagent.client.launcher_link import LauncherLink
from zagent.client.member import Member
from zagent.client.services import Services
from zagent.errors import MemberLost, PoolLost


@pytest.fixture
def with_line(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs ``work(cluster, line)`` in a cluster with the pool `box`, and closes the line."""

    def with_line(work: Callable[[Cluster, LauncherLink], Coroutine[Any, Any, None]], *, broker: bool = True) -> None:
        async def main() -> None:
            async with Cluster(pools=("box",), latency=0.1, pulses=True) as cluster:
                monkeypatch.setattr(
                    "zagent.client.launcher_link.DealerChannel", lambda _endpoint, lane: cluster.router.connect(lane)
                )
                if not broker:
                    cluster.kill_broker()
                line = LauncherLink("ipc://nowhere", SECRET)
                await work(cluster, line)
                await line.close()
                await asyncio.sleep(1)
                assert not [one for one in cluster.core.roster.callers if one not in links(cluster)]

        run(main())

    return with_line


def links(cluster: Cluster) -> set[bytes]:
    return {link.nonce for link in cluster.links if not link.closed}


async def box(cluster: Cluster, epoch: int = 1, **methods: Any) -> Member:
    return await cluster.member("box-0", methods, pool="box", credits=1, epoch=epoch, facts={"idempotent": []})


def state(cluster: Cluster) -> State:
    return cluster.core.pools["box"].members["box-0"].state


def test_reports_arrive_in_order(with_line: Callable[..., None]) -> None:
    """Who exited, then that nobody is left, as the calls that run and that wait hear it."""

    async def work(cluster: Cluster, line: LauncherLink) -> None:
        end = asyncio.Event()

        async def hang(argument: object, call: object) -> None:
            await end.wait()

        await box(cluster, run=hang)
        services = Services(await cluster.caller(), ["box"])
        runs, waits = (asyncio.ensure_future(services["box"].run()) for _ in range(2))
        await asyncio.sleep(1)
        line.exited("box", "box-0", 1, "it exited with code 3", crashed=False)
        line.abandoned("box", "no box is left: cheese")
        with pytest.raises(MemberLost, match="it exited with code 3"):
            await runs
        with pytest.raises(PoolLost, match="no box is left: cheese"):
            await waits
        end.set()

    with_line(work)


def test_a_crash_is_told_from_a_kill(with_line: Callable[..., None]) -> None:
    """Only what dies by itself is counted as a crash."""

    async def work(cluster: Cluster, line: LauncherLink) -> None:
        for epoch, crashed, crashes in ((1, False, 0), (2, True, 1)):
            await box(cluster, epoch)
            line.exited("box", "box-0", epoch, "it ended", crashed=crashed)
            await asyncio.sleep(1)
            assert (state(cluster), cluster.core.counters["crashes"]) == (State.DEAD, crashes)

    with_line(work)


def test_a_slow_member_is_spared(with_line: Callable[..., None]) -> None:
    """Until it is well again."""

    async def work(cluster: Cluster, line: LauncherLink) -> None:
        await box(cluster)
        for slow, expected in ((True, State.SLOW), (False, State.READY)):
            line.health("box", "box-0", 1, slow=slow)
            await asyncio.sleep(1)
            assert state(cluster) is expected

    with_line(work)


def test_what_is_said_before_a_broker_is_there_arrives(with_line: Callable[..., None]) -> None:
    """However long it takes to start one: the line asks again."""

    async def work(cluster: Cluster, line: LauncherLink) -> None:
        line.abandoned("box", "no box is left")
        await asyncio.sleep(3 * link_module.WELCOME_TIMEOUT_S)
        cluster.start_broker(expected=[])
        await asyncio.sleep(link_module.WELCOME_TIMEOUT_S)
        assert cluster.core.pools["box"].abandoned is not None

    with_line(work, broker=False)


def test_a_new_broker_is_told_what_still_holds(with_line: Callable[..., None]) -> None:
    """Who is dead, slow or abandoned, also what was said while no broker was there; not what has changed since."""

    async def work(cluster: Cluster, line: LauncherLink) -> None:
        await box(cluster)
        await cluster.member("box-1", {}, pool="box", credits=1)
        line.health("box", "box-0", 1, slow=True)
        line.health("box", "box-1", 1, slow=True)
        await asyncio.sleep(1)
        cluster.kill_broker()
        line.health("box", "box-1", 1, slow=False)
        line.exited("box", "box-9", 4, "it exited", crashed=True)
        line.abandoned("box", "no box is left")
        cluster.start_broker(expected=[["box", "box-0", 1], ["box", "box-1", 1], ["box", "box-9", 4]])
        await asyncio.sleep(1.5)  # less than the roster's 2 s: nobody waits for box-9
        members = cluster.core.pools["box"].members
        assert {name: member.state for name, member in members.items()} == {"box-0": State.SLOW, "box-1": State.READY}
        assert not cluster.core.dispatch.recovering
        assert cluster.core.counters["crashes"] == 0

    with_line(work)


def test_a_broker_that_had_forgotten_the_launcher_is_told_again(with_line: Callable[..., None]) -> None:
    """What was said while it did not know who spoke was dropped."""

    async def work(cluster: Cluster, line: LauncherLink) -> None:
        await box(cluster)
        await asyncio.sleep(1)
        assert line._link is not None
        cluster.forget(line._link)
        line.exited("box", "box-0", 1, "it exited", crashed=False)
        await asyncio.sleep(1)
        assert state(cluster) is State.DEAD

    with_line(work)


def test_a_broker_is_asked_when_it_is_silent(with_line: Callable[..., None]) -> None:
    """It may have forgotten us, and there may be nothing to say for hours."""

    async def work(cluster: Cluster, line: LauncherLink) -> None:
        await asyncio.sleep(1)
        line.abandoned("box", "no box is left")
        await asyncio.sleep(1)
        assert line._link is not None
        cluster.forget(line._link)
        cluster.core.pools["box"].abandoned = None
        await asyncio.sleep(20)
        assert line._link.nonce in cluster.core.roster.callers
        assert cluster.core.pools["box"].abandoned is not None

    with_line(work)


def test_a_line_that_is_closed_by_the_other_side_is_made_anew(with_line: Callable[..., None]) -> None:
    """Nothing is lost, and nobody is bothered: what is said meanwhile is said by the next."""

    async def work(cluster: Cluster, line: LauncherLink) -> None:
        await box(cluster)
        await asyncio.sleep(1)
        assert line._link is not None
        line._link.close("refused")
        line.exited("box", "box-0", 1, "it exited", crashed=False)
        await asyncio.sleep(1)
        assert state(cluster) is State.DEAD

    with_line(work)


def test_a_line_without_a_broker_closes(with_line: Callable[..., None]) -> None:
    """It was never welcomed."""

    async def work(cluster: Cluster, line: LauncherLink) -> None:
        line.abandoned("box", "no box is left")

    with_line(work, broker=False)
