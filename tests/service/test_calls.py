"""Calls to services through the broker, on virtual time: balance, sessions, back-pressure, losses, ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support import actors
from support.cluster_in_memory import SECRET, Cluster
from support.virtual_clock import run
from zagent.client.calls import Retry
from zagent.client.link import Identity, Link
from zagent.client.member import Member
from zagent.client.services import Services
from zagent.errors import (
    DeadlineExceeded,
    EncodeError,
    InvalidRequest,
    MemberLost,
    PoolLost,
    RemoteError,
    UnknownMethod,
    to_wire,
)
from zagent.service.base import Actor
from zagent.wire.codec import encode_body
from zagent.wire.messages import Abandoned

POOLS = ("engine", "worker", "box")


class Box:
    """A cluster with members of the service `box`."""

    def __init__(self, **core: Any) -> None:
        self.cluster = Cluster(pools=POOLS, **core)
        self.targets: list[actors.Everything] = []
        self.members: list[Member] = []
        self.links: list[Link] = []

    async def join(self, name: str = "box-0", *, credits: int = 8, epoch: int = 1) -> None:
        target = actors.Everything()
        actor = Actor("box", target)
        facts = {"idempotent": actor.idempotent}
        link = Link(self.cluster.router.connect, Identity("box", name, epoch, credits, SECRET, facts))
        self.targets.append(target)
        self.links.append(link)
        self.members.append(Member(link, actor.methods))
        self.cluster.links.append(link)
        await link.open()

    async def services(self, retry: Retry | None = None) -> Services:
        return Services(await self.cluster.caller(retry), ["box"])

    def in_flight(self) -> dict[str, int]:
        return self.cluster.in_flight("box")


def within(members: int, test: Callable[[Box, Services], Awaitable[None]], *, credits: int = 8, **core: Any) -> None:
    """Run ``test`` with that many members of `box`; afterwards the broker holds nothing."""

    async def main() -> None:
        box = Box(**core)
        async with box.cluster:
            for index in range(members):
                await box.join(f"box-{index}", credits=credits)
            await test(box, await box.services())
            await asyncio.sleep(1)
            assert box.cluster.quiet()

    run(main())


def test_results_come_back() -> None:
    """Positional and keyword arguments; wire values out."""

    async def test(box: Box, services: Services) -> None:
        assert await services["box"].greet("Ann", mark="?") == "hello Ann?"
        assert await services["box"].nap(seconds=0) == "slept"

    within(1, test)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("value", ValueError, "a bad value"),
        ("caller", InvalidRequest, "not like this"),
        ("foreign", RemoteError, "support.actors.Foreign: from afar"),
        ("exit", RemoteError, "SystemExit: 3"),
    ],
)
def test_an_exception_is_raised_at_the_caller(kind: str, error: type[Exception], text: str) -> None:
    """As its own class where this side knows it, with the remote traceback; the service stays healthy (pitfall K36)."""

    async def test(box: Box, services: Services) -> None:
        with pytest.raises(error) as caught:
            await services["box"].raises(kind)
        assert type(caught.value) is error
        assert str(caught.value) == text
        assert "in raises" in str(caught.value.__cause__)
        assert await services["box"].greet("you") == "hello you!"

    within(1, test)


def test_an_unknown_method_names_the_public_ones() -> None:
    """Private and lifecycle names are unknown as well."""

    async def test(box: Box, services: Services) -> None:
        with pytest.raises(UnknownMethod, match=r"box-0 has no method 'close', only add, exits, greet, kind, nap"):
            await services["box"].close()

    within(1, test)


def test_a_result_that_cannot_travel_is_that_calls_error() -> None:
    """It names the type."""

    async def test(box: Box, services: Services) -> None:
        with pytest.raises(EncodeError, match="cannot cross the wire"):
            await services["box"].greet(object())

    within(1, test)


def test_calls_are_spread_by_requests_in_flight() -> None:
    """Six at once on three members: two each."""

    async def test(box: Box, services: Services) -> None:
        tasks = [asyncio.ensure_future(services["box"].sleep(5)) for _ in range(6)]
        await asyncio.sleep(1)
        assert set(box.in_flight().values()) == {2}
        await asyncio.gather(*tasks)

    within(3, test)


def test_a_session_stays_with_its_member() -> None:
    """Until the member is gone; another session goes elsewhere meanwhile."""

    async def test(box: Box, services: Services) -> None:
        first, second = services.bind(session="a"), services.bind(session="b")
        for _ in range(3):
            await first["box"].sleep(1)
        await asyncio.gather(first["box"].sleep(5), *(second["box"].sleep(1) for _ in range(2)))
        by = {a.session: set() for a in box.cluster.assignments}
        for assignment in box.cluster.assignments:
            by[assignment.session].add(assignment.member)
        assert [len(members) for members in by.values()] == [1, 1]
        assert by["a"] != by["b"]

    within(2, test)


def test_the_end_of_a_session_reaches_the_broker() -> None:
    """Only of pools that the session has used."""

    async def test(box: Box, services: Services) -> None:
        bound = services.bind(session="a")
        await bound["box"].sleep(0)
        assert len(box.cluster.core.dispatch.sessions) == 1
        await bound.end_session()
        await asyncio.sleep(1)
        assert len(box.cluster.core.dispatch.sessions) == 0
        await bound.end_session()  # nothing is used since
        await services.end_session()  # no session

    within(1, test)


def test_ten_times_the_load_waits_in_the_broker() -> None:
    """A member never has more than `max_in_flight`; all are served in the end."""

    async def test(box: Box, services: Services) -> None:
        tasks = [asyncio.ensure_future(services["box"].sleep(1)) for _ in range(80)]
        await asyncio.sleep(0.5)
        assert (set(box.in_flight().values()), box.cluster.core.dispatch.pending) == ({4}, 72)
        assert await asyncio.gather(*tasks) == ["slept"] * 80
        assert [target.most for target in box.targets] == [4, 4]

    within(2, test, credits=4)


def test_beyond_max_pending_a_caller_waits_for_its_turn() -> None:
    """The queue is bounded, and who finds it full asks again, for as long as it has time."""

    async def test(box: Box, services: Services) -> None:
        other = await box.services(Retry(attempts=2))
        tasks = [asyncio.ensure_future(services["box"].sleep(50)) for _ in range(3)]
        await asyncio.sleep(1)
        with pytest.raises(DeadlineExceeded):
            await other["box"].bind(timeout=5).sleep(0)
        await other["box"].sleep(0)
        await asyncio.gather(*tasks)

    within(1, test, credits=1, max_pending=2)


def test_a_deadline_ends_the_call_on_both_sides() -> None:
    """`bind(timeout=)`; the method is cancelled, and its place is free."""

    async def test(box: Box, services: Services) -> None:
        with pytest.raises(DeadlineExceeded, match="pool 'box' to 'sleep'"):
            await services["box"].bind(timeout=2).sleep(50)
        await asyncio.sleep(1)
        assert box.targets[0].ended == ["cancelled"]
        assert box.in_flight() == {"box-0": 0}

    within(1, test)


def test_cancelling_the_caller_cancels_the_method() -> None:
    """Once, and its place is free."""

    async def test(box: Box, services: Services) -> None:
        task = asyncio.ensure_future(services["box"].sleep(50))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(1)
        assert box.targets[0].ended == ["cancelled"]

    within(1, test)


def test_a_lost_call_is_sent_again_only_if_its_method_is_idempotent() -> None:
    """The others' callers hear `MemberLost`: the method may have begun."""

    async def test(box: Box, services: Services) -> None:
        again = asyncio.ensure_future(services["box"].bind(session="s").nap(50))
        once = asyncio.ensure_future(services["box"].bind(session="s").sleep(50))
        await asyncio.sleep(1)
        first = next(link for link in box.links if box.in_flight()[link.identity.name] == 2)
        first.close()
        with pytest.raises(MemberLost, match="is gone: it said goodbye"):
            await once
        assert await again == "slept"
        assert sum(target.most for target in box.targets) == 3  # two began at the first member, one at the other

    within(2, test)


def test_a_member_that_leaves_says_what_may_be_sent_again() -> None:
    """Its own `MemberLost` is like the broker's."""

    async def test(box: Box, services: Services) -> None:
        again = asyncio.ensure_future(services["box"].bind(session="s").nap(50))
        once = asyncio.ensure_future(services["box"].bind(session="s").sleep(50))
        await asyncio.sleep(1)
        first = next(m for m in box.members if m.in_flight == 2)
        await first.leave("the cluster stops")
        with pytest.raises(MemberLost, match="the cluster stops"):
            await once
        assert await again == "slept"

    within(2, test)


def test_a_call_that_never_reached_its_member_is_sent_again() -> None:
    """Nobody has begun it, whatever its method."""

    async def test(box: Box, services: Services) -> None:
        box.cluster.router.detach(b"d" + box.links[0].nonce)  # its socket is gone, and nobody has noticed
        assert await services["box"].greet("you") == "hello you!"
        assert await services["box"].greet("you") == "hello you!"
        assert box.cluster.core.counters["unsendable"] == 1

    within(2, test)


@pytest.mark.parametrize(("method", "attempts"), [("passes_on", 10), ("raises", 1)])
def test_a_transient_error_within_a_method_follows_the_same_rule(method: str, attempts: int) -> None:
    """A call that the method made was lost: the method has begun all the same."""

    async def test(box: Box, services: Services) -> None:
        with pytest.raises(MemberLost):
            await getattr(services["box"], method)(*(["lost"] if method == "raises" else []))
        assert len(box.cluster.assignments) == attempts

    within(1, test)


def test_calls_wait_while_nobody_is_there() -> None:
    """Between a death and the next life's hello nothing is assigned; then everything is served (pitfall K5)."""

    async def test(box: Box, services: Services) -> None:
        box.links[0].close()
        tasks = [asyncio.ensure_future(services["box"].greet(str(i))) for i in range(3)]
        await asyncio.sleep(10)
        assert box.cluster.core.dispatch.pending == 3
        await box.join(epoch=2)
        assert await asyncio.gather(*tasks) == ["hello 0!", "hello 1!", "hello 2!"]
        assert {a.member for a in box.cluster.assignments} == {"box-0"}
        assert box.targets[0].running == 0

    within(1, test)


def test_an_abandoned_pools_callers_hear_its_last_words() -> None:
    """Those that wait, and those that come later: at once, and not again."""

    async def test(box: Box, services: Services) -> None:
        launcher = await box.cluster.link(Identity(name="launcher", secret=SECRET))
        box.links[0].close()
        waiting = asyncio.ensure_future(services["box"].greet("you"))
        await asyncio.sleep(1)
        launcher.send(Abandoned("box"), encode_body(to_wire(PoolLost("no box is left: cheese"))), control=True)
        for call in (waiting, services["box"].greet("me")):
            with pytest.raises(PoolLost, match="no box is left: cheese"):
                await call

    within(1, test)
