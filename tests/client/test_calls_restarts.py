"""The broker is killed, or forgets somebody: every call still ends once, and is not run twice where a member has it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.calls import Calls, Retry
from zagent.client.link import CONTROL, DATA, Link
from zagent.client.member import Member, Method
from zagent.errors import DeadlineExceeded, MemberLost
from zagent.wire.messages import Call

Tasks = list[asyncio.Task[Any]]


class Runs:
    """Methods that count: how often each call (by its argument) was begun, finished and cancelled, and where."""

    def __init__(self) -> None:
        self.begun: Counter[Any] = Counter()
        self.finished: Counter[Any] = Counter()
        self.cancelled: Counter[Any] = Counter()
        self.where: list[tuple[Any, str]] = []
        self.attempts: list[int] = []

    def at(self, name: str) -> dict[str, Method]:
        async def work(argument: Any, call: Call) -> Any:
            """[what, seconds] → what."""
            what, seconds = argument
            self.begun[what] += 1
            self.where.append((what, name))
            self.attempts.append(call.attempt)
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.cancelled[what] += 1
                raise
            self.finished[what] += 1
            return what

        return {"work": work}


async def asked(calls: Calls, *whats: Any, seconds: float = 1.0, **options: Any) -> Tasks:
    tasks = [asyncio.create_task(calls.call("engine", "work", [what, seconds], **options)) for what in whats]
    await asyncio.sleep(0)
    return tasks


async def link_of(cluster: Cluster, runs: Runs, name: str, **options: Any) -> tuple[Member, Link]:
    member = await cluster.member(name, runs.at(name), **options)
    return member, cluster.links[-1]


LATENCIES = pytest.mark.parametrize("latency", [0.0, 0.01])


@LATENCIES
def test_what_runs_and_what_waits_outlives_the_broker(latency: float) -> None:
    """One credit, three calls: each runs once, and the caller notices nothing but the time."""

    async def main() -> None:
        async with Cluster(latency) as cluster:
            runs = Runs()
            member, _ = await link_of(cluster, runs, "m", credits=1)
            calls = await cluster.caller()
            tasks = await asked(calls, 1, 2, 3)
            await asyncio.sleep(0.5)
            await cluster.restart_broker()
            await asyncio.sleep(0.2)
            assert (cluster.in_flight(), cluster.core.dispatch.pending, member.in_flight) == ({"m": 1}, 2, 1)
            assert await asyncio.gather(*tasks) == [1, 2, 3]
            assert runs.begun == runs.finished == Counter({1: 1, 2: 1, 3: 1})
            assert runs.attempts == [1, 1, 1]
            assert calls.retries == calls.late == 0
            assert asyncio.get_running_loop().time() < 3.5
            assert cluster.quiet()

    run(main())


@pytest.mark.parametrize("finishes", [0.3, 0.95, 1.05, 1.15, 1.25, 1.35, 1.45, 1.55, 2.5])
def test_an_answer_that_the_broker_took_with_it_comes_again(finishes: float) -> None:
    """Wherever it was: not begun, running, on its way to the broker, with it, or on its way to the caller; finished
    while no broker was there, or while the member said hello."""

    async def main() -> None:
        async with Cluster(0.1) as cluster:
            runs = Runs()
            await link_of(cluster, runs, "m")
            calls = await cluster.caller()
            start = asyncio.get_running_loop().time()
            (task,) = await asked(calls, "x", seconds=finishes - 0.2)
            await asyncio.sleep(1.3 + start - asyncio.get_running_loop().time())
            await cluster.restart_broker(after_s=0.1)
            assert await task == "x"
            assert runs.begun == {"x": 1}
            assert (calls.retries, calls.late) == (0, 0)
            await asyncio.sleep(1)
            assert cluster.quiet()

    run(main())


def test_calls_while_there_is_no_broker_wait_for_the_next() -> None:
    """And run once. Their deadlines hold."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            await link_of(cluster, runs, "m")
            calls = await cluster.caller()
            cluster.kill_broker()
            tasks = await asked(calls, 1, 2)
            (hasty,) = await asked(calls, 3, timeout=5)
            with pytest.raises(DeadlineExceeded, match=r"no answer from pool 'engine' to 'work' in time \(attempt 1\)"):
                await hasty
            await asyncio.sleep(5)
            cluster.start_broker()
            assert await asyncio.gather(*tasks) == [1, 2]
            assert runs.begun == {1: 1, 2: 1}
            await asyncio.sleep(1)
            assert cluster.quiet()

    run(main())


def test_broker_after_broker() -> None:
    """However many die while a call runs, it runs once."""

    async def main() -> None:
        async with Cluster(0.003) as cluster:
            runs = Runs()
            await link_of(cluster, runs, "a", credits=2)
            await link_of(cluster, runs, "b", credits=2)
            calls = await cluster.caller()
            tasks = await asked(calls, *range(6), seconds=2)
            for number in range(60):
                await asyncio.sleep(0.01 * (1 + number % 9))
                await cluster.restart_broker(after_s=0.005 * (number % 3))
            assert await asyncio.gather(*tasks) == list(range(6))
            assert set(runs.begun.values()) == {1}
            assert calls.link.incarnation == 61
            assert calls.retries == 0
            await asyncio.sleep(1)
            assert cluster.quiet()

    run(main())


def test_a_member_that_dies_with_the_broker_is_not_waited_for_long() -> None:
    """Its calls run elsewhere, as soon as the launcher has said so or two seconds have passed."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            dying, link = await link_of(cluster, runs, "a")
            calls = await cluster.caller()
            (task,) = await asked(calls, "x", seconds=5)
            await asyncio.sleep(0.5)
            await link_of(cluster, runs, "b")
            cluster.kill_broker()
            cluster.die(link, dying)
            cluster.start_broker([["engine", "a", 1], ["engine", "b", 1]])
            start = asyncio.get_running_loop().time()
            await asyncio.sleep(1)
            assert runs.where == [("x", "a")]
            await asyncio.sleep(1.5)
            assert runs.where == [("x", "a"), ("x", "b")]
            assert await task == "x"
            assert asyncio.get_running_loop().time() - start < 7.5
            assert cluster.quiet()

    run(main())


def test_sessions_stay_where_they_run() -> None:
    """The new broker knows their member by what it runs, or keeps."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            for name in "abcd":
                await link_of(cluster, runs, name)
            calls = await cluster.caller()
            tasks = [(await asked(calls, number, session=f"s{number % 8}"))[0] for number in range(16)]
            await asyncio.sleep(0.5)
            await cluster.restart_broker()
            await asyncio.gather(*tasks)
            await asyncio.gather(*[(await asked(calls, number, session=f"s{number % 8}"))[0] for number in range(8)])
            for number in range(8):
                assert len({name for what, name in runs.where if what % 8 == number}) == 1
            assert cluster.quiet()

    run(main())


def test_who_gives_up_without_a_broker_is_heard_by_the_next() -> None:
    """The member stops; nobody else's call does."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            member, _ = await link_of(cluster, runs, "m")
            calls = await cluster.caller()
            given_up, other = await asked(calls, "given up", "other", seconds=9)
            await asyncio.sleep(1)
            cluster.kill_broker()
            given_up.cancel()
            await asyncio.wait([given_up])
            cluster.start_broker()
            await asyncio.sleep(1)
            assert runs.cancelled == {"given up": 1}
            assert (member.in_flight, cluster.in_flight()) == (1, {"m": 1})
            assert await other == "other"
            assert cluster.quiet()

    run(main())


def test_what_nobody_comes_back_for_is_stopped() -> None:
    """The caller died with the broker: ten seconds later the member is told."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            member, _ = await link_of(cluster, runs, "m")
            calls = await cluster.caller()
            (task,) = await asked(calls, "x", seconds=1000)
            await asyncio.sleep(1)
            cluster.kill_broker()
            cluster.die(calls.link)
            task.cancel()
            await asyncio.wait([task])
            cluster.start_broker()
            await asyncio.sleep(5)
            assert runs.cancelled == {}
            await asyncio.sleep(6)
            assert runs.cancelled == {"x": 1}
            assert member.in_flight == 0
            assert cluster.quiet()

    run(main())


# ---- the same broker ------------------------------------------------------------------------------------------------


async def restart_without(cluster: Cluster, link: Link, seconds: float) -> None:
    """The next broker hears of that peer only so many seconds after its start."""
    cluster.kill_broker()
    lanes = [lane + link.nonce for lane in (DATA, CONTROL)]
    said = {lane: cluster.router._waiting.pop(lane) for lane in lanes}
    cluster.start_broker()
    await asyncio.sleep(seconds)
    cluster.router._waiting |= said
    for lane in lanes:
        cluster.router.connected(lane)
    await asyncio.sleep(0.2)


def test_what_was_stopped_as_another_has_it_answers_for_nobody() -> None:
    """A member comes too late, and stops what runs elsewhere by then. The next broker hears of it first: the call is
    found where it runs, and no further attempt begins beside it."""

    async def main() -> None:
        async with Cluster() as cluster:
            runs = Runs()
            links = {name: (await link_of(cluster, runs, name))[1] for name in ("a", "b")}
            calls = await cluster.caller()
            (task,) = await asked(calls, "x", seconds=20)
            await asyncio.sleep(0.5)
            ((_, late),) = runs.where
            await restart_without(cluster, links[late], 3.0)
            assert [name for _, name in runs.where] == [late, "ab".replace(late, "")]
            assert runs.cancelled == {"x": 1}
            await restart_without(cluster, links["ab".replace(late, "")], 1.0)
            assert await task == "x"
            assert runs.attempts == [1, 1]
            assert runs.finished == {"x": 1}
            assert cluster.quiet()

    run(main())


@LATENCIES
def test_a_caller_that_was_forgotten_sends_its_calls_again(latency: float) -> None:
    """As the next attempt: the broker has stopped the last. Waiting or running, each ends once."""

    async def main() -> None:
        async with Cluster(latency, pulses=True) as cluster:
            runs = Runs()
            await link_of(cluster, runs, "m", credits=1)
            calls = await cluster.caller(Retry(attempts=1))
            tasks = await asked(calls, 1, 2)
            await asyncio.sleep(0.5)
            cluster.forget(calls.link)
            calls.end_session("engine", "any message")
            assert await asyncio.gather(*tasks) == [1, 2]
            assert runs.finished == {1: 1, 2: 1}
            assert runs.cancelled == {1: 1}
            assert runs.attempts == [1, 2, 2]
            assert calls.retries == 2
            assert cluster.quiet()

    run(main())


@LATENCIES
def test_a_member_that_was_forgotten_is_back_with_its_next_word(latency: float) -> None:
    """Its calls run elsewhere meanwhile; what it still runs is stopped, and it gets calls again."""

    async def main() -> None:
        async with Cluster(latency) as cluster:
            runs = Runs()
            forgotten, link = await link_of(cluster, runs, "a")
            calls = await cluster.caller()
            (task,) = await asked(calls, "x", seconds=5)
            await asyncio.sleep(0.5)
            await link_of(cluster, runs, "b")
            cluster.forget(link)
            await asyncio.sleep(2)
            assert runs.where == [("x", "a"), ("x", "b")]
            (quick,) = await asked(calls, "y", seconds=0.1)
            await quick
            assert await task == "x"
            assert runs.cancelled == {}  # it has not spoken yet
            await asyncio.sleep(1)
            assert (await cluster.caller()).late == calls.late == 0
            assert forgotten.in_flight == 0
            (last,) = await asked(calls, "z", seconds=0.1, session="s")
            await last
            assert cluster.quiet()

    run(main())


@LATENCIES
def test_what_a_forgotten_member_still_runs_is_stopped(latency: float) -> None:
    """Once it has said hello again: somebody else has its calls."""

    async def main() -> None:
        async with Cluster(latency) as cluster:
            runs = Runs()
            forgotten, link = await link_of(cluster, runs, "a")
            calls = await cluster.caller()
            (task,) = await asked(calls, "x", seconds=50)
            await asyncio.sleep(0.5)
            await link_of(cluster, runs, "b")
            cluster.forget(link)
            forgotten.progress(Call(b"", 0, "", ""), "nothing of that sort runs")
            link._greet()
            await asyncio.sleep(2)
            assert runs.cancelled == {"x": 1}
            assert cluster.in_flight() == {"a": 0, "b": 1}
            assert await task == "x"
            assert runs.attempts == [1, 2]
            assert cluster.quiet()

    run(main())


@pytest.mark.parametrize("peer", ["caller", "member"])
def test_a_connection_that_was_lost_took_messages_with_it(peer: str) -> None:
    """Though nobody died, and the broker never noticed: what was under way is sent again, and ends once."""

    async def main() -> None:
        async with Cluster(0.1) as cluster:
            runs = Runs()
            _, link = await link_of(cluster, runs, "m")
            calls = await cluster.caller()
            tasks = await asked(calls, "running", seconds=5)
            await asyncio.sleep(1)
            tasks += await asked(calls, "on its way")
            await asyncio.sleep(0.05 if peer == "caller" else 0.15)
            cluster.router._under_way.clear()
            lost = calls.link if peer == "caller" else link
            for lane in (b"d", b"c"):
                cluster.router._channels[lane + lost.nonce].reconnected()
            assert await asyncio.gather(*tasks) == ["running", "on its way"]
            assert runs.finished == {"running": 1, "on its way": 1}
            await asyncio.sleep(1)
            assert cluster.quiet()

    run(main())


# ---- methods that must not be run twice -----------------------------------------------------------------------------

ONCE = {"idempotent": []}


def test_a_method_that_may_not_repeat_is_found_where_it_runs() -> None:
    """So nothing is lost by a broker's death alone."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            await link_of(cluster, runs, "m", facts=ONCE)
            calls = await cluster.caller()
            (task,) = await asked(calls, "x")
            await asyncio.sleep(0.5)
            await cluster.restart_broker()
            assert await task == "x"
            assert runs.begun == {"x": 1}

    run(main())


def test_a_method_that_may_not_repeat_is_lost_with_its_member() -> None:
    """Its caller is told, and it does not run again; one that was held back by the hello is fresh, and runs."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            dying, link = await link_of(cluster, runs, "a", facts=ONCE)
            calls = await cluster.caller()
            (begun,) = await asked(calls, "begun")
            await asyncio.sleep(0.5)
            await link_of(cluster, runs, "b", facts=ONCE)
            cluster.kill_broker()
            cluster.die(link, dying)
            cluster.start_broker()
            calls.link._greet()
            (fresh,) = await asked(calls, "fresh")
            with pytest.raises(MemberLost):
                await begun
            assert await fresh == "fresh"
            assert runs.begun == {"begun": 1, "fresh": 1}

    run(main())


def test_a_method_that_may_not_repeat_is_not_sent_again_by_a_forgotten_caller() -> None:
    """The broker has stopped it in the middle."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            await link_of(cluster, runs, "m", facts=ONCE)
            calls = await cluster.caller()
            (task,) = await asked(calls, "x")
            await asyncio.sleep(0.5)
            cluster.forget(calls.link)
            calls.link._greet()
            with pytest.raises(MemberLost):
                await task
            assert runs.begun == {"x": 1}
            await asyncio.sleep(1)
            assert cluster.quiet()

    run(main())


# ---- members that leave ---------------------------------------------------------------------------------------------


def test_a_leaving_member_gets_nothing_from_the_next_broker() -> None:
    """And finishes what it has."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            leaving, _ = await link_of(cluster, runs, "a")
            calls = await cluster.caller()
            (first,) = await asked(calls, "first", seconds=3)
            await asyncio.sleep(0.5)
            await link_of(cluster, runs, "b")
            end = asyncio.create_task(leaving.leave("bye", grace=10))
            await asyncio.sleep(0.1)
            await cluster.restart_broker()
            await asyncio.sleep(0.1)
            tasks = await asked(calls, *range(5))
            assert await asyncio.gather(*tasks) == list(range(5))
            assert {name for what, name in runs.where if what != "first"} == {"b"}
            assert await first == "first"
            await end

    run(main())


def test_a_member_whose_life_is_over_is_refused_and_ends() -> None:
    """The launcher has reported its end, so another may have its calls: it must not go on."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            _, link = await link_of(cluster, Runs(), "a")
            await cluster.exited(link)
            await asyncio.sleep(0.1)
            link._greet()
            assert "epoch 1" in await link.wait_closed()

    run(main())


def test_a_crash_makes_suspects_of_what_was_aboard() -> None:
    """Through `leave_at_once`: the broker blames, the caller sends the suspect again, and it ends well elsewhere."""

    async def main() -> None:
        async with Cluster(0.01) as cluster:
            runs = Runs()
            dying, link = await link_of(cluster, runs, "a")
            calls = await cluster.caller()
            (task,) = await asked(calls, "x")
            await asyncio.sleep(0.5)
            dying.leave_at_once("the scheduler died", crashed=True)
            cluster.die(link, dying)
            seen: list[bool] = []
            feed = cluster.router.receiver
            assert feed is not None

            def watch(batch: Any) -> None:
                seen.extend(m.suspect for _, frames in batch if isinstance(m := decode_header(frames[0]), Call))
                feed(batch)

            from zagent.wire.codec import decode_header

            cluster.router.receiver = watch
            await link_of(cluster, runs, "b")
            assert await task == "x"
            assert seen == [True]

    run(main())
