"""The link outlives its broker: hello again, what waits meanwhile, and who hears of it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgpack
import pytest

from support.alone import Peer
from support.virtual_clock import run
from zagent.client.link import Identity
from zagent.errors import ConnectionLost, ProtocolError, to_wire
from zagent.wire.codec import encode_header
from zagent.wire.messages import (
    Call,
    Cancel,
    EndSession,
    Failure,
    Goodbye,
    Hello,
    HelloWanted,
    Progress,
    Pulse,
    Reply,
    Welcome,
)


def call(number: int) -> Call:
    return Call(b"%d" % number, 1, "p", "m")


def rejoins(peer: Peer) -> list[bool]:
    """What `on_rejoin` is told, as it comes."""
    told: list[bool] = []
    peer.link.on_rejoin(told.append)
    return told


@pytest.mark.parametrize("lane", [b"d", b"c"])
def test_a_connection_that_is_there_again_says_hello_on_both_lanes(lane: bytes) -> None:
    """Whichever lane it is: a broker knows a peer by both. With the same identity, and its facts of now."""

    async def main() -> None:
        peer = await Peer(Identity("engine", "m", 2, 5, "s", {"a": 1})).open()
        peer.link.hello_facts = lambda: {"a": 2}
        lanes: list[bytes] = []

        def got(batch: Any) -> None:
            lanes.extend(sender[:1] for sender, _ in batch)
            peer._got(batch)

        peer.router.receiver = got
        peer.router._channels[lane + peer.link.nonce].reconnected()
        await asyncio.sleep(1)
        assert lanes == [b"d", b"c"]
        assert [(type(m), m.pool, m.name, m.epoch, m.credits, m.secret, body) for m, body in peer.said] == [
            (Hello, "engine", "m", 2, 5, "s", {"a": 2})
        ] * 2

    run(main())


def test_a_broker_that_wants_a_hello_gets_one() -> None:
    """One, however often it says so before it has said welcome; afterwards again."""

    async def main() -> None:
        peer = await Peer().open()
        for _ in range(2):
            for lane in (b"d", b"d", b"c"):
                peer.send(HelloWanted(), lane=lane)
            await asyncio.sleep(1)
            assert [type(message) for message, _ in peer.take()] == [Hello, Hello]
            peer.welcome()
            await asyncio.sleep(1)

    run(main())


def test_a_connection_that_comes_back_during_a_hello_says_it_again() -> None:
    """The first may have gone with the other connection."""

    async def main() -> None:
        peer = await Peer().open()
        for channel in list(peer.router._channels.values()):
            channel.reconnected()
        await asyncio.sleep(1)
        assert len(peer.of(Hello)) == 4

    run(main())


def test_connections_are_counted_for_the_broker() -> None:
    """Both lanes together are one; after the welcome each is a new one. Hellos for other reasons keep the number."""

    async def main() -> None:
        peer = await Peer().open(incarnation=7)
        data, control = peer.router._channels.values()
        steps: list[tuple[str, int]] = [
            ("data", 1), ("control", 1), ("welcome", 1), ("wanted", 1), ("welcome", 1),
            ("control", 2), ("welcome", 2), ("control", 3), ("data", 3), ("data", 4), ("control", 4), ("control", 5),
            ("welcome", 5), ("data", 6),
        ]  # fmt: skip
        for step, connection in steps:
            if step == "welcome":
                peer.welcome(incarnation=7, known=True)
                await asyncio.sleep(1)
                continue
            if step == "wanted":
                peer.send(HelloWanted())
            else:
                (data if step == "data" else control).reconnected()
            await asyncio.sleep(1)
            assert {(m.incarnation, m.connection) for m in peer.of(Hello)} == {(7, connection)}, (step, connection)
            peer.take()

    run(main())


def test_a_connection_that_is_heard_of_with_its_welcome_is_no_further_one() -> None:
    """The loop may see the message before the news of the lane that it has come over."""

    async def main() -> None:
        peer = await Peer().open(incarnation=7)
        data, control = peer.router._channels.values()
        data.reconnected()
        control._anew = True  # made, and not heard of
        peer.welcome(incarnation=8)
        await asyncio.sleep(1)
        control.notice()
        await asyncio.sleep(1)
        assert {m.connection for m in peer.of(Hello)} == {1}
        assert not peer.link.greeting

    run(main())


def test_the_first_hello_knows_no_broker() -> None:
    """Neither its incarnation nor a connection that was lost."""

    async def main() -> None:
        peer = Peer()
        opening = asyncio.create_task(peer.link.open())
        await asyncio.sleep(1)
        assert [(m.incarnation, m.connection) for m in peer.of(Hello)] == [(0, 0)] * 2
        peer.welcome()
        await opening

    run(main())


@pytest.mark.parametrize(
    ("welcome", "told"),
    [
        (Welcome(1, known=True), []),
        (Welcome(1, known=False), [True]),
        (Welcome(2, known=False), [False]),
        (Welcome(2, known=True), [False]),  # its first welcome was lost
    ],
)
def test_who_was_forgotten_is_told(welcome: Welcome, told: list[bool]) -> None:
    """By the same broker (True) or because it is another one; not at the first welcome."""

    async def main() -> None:
        peer = Peer()
        seen = rejoins(peer)
        await peer.open()
        assert seen == []
        peer.send(HelloWanted())
        peer.send(welcome, {"run": 2}, lane=b"c")
        await asyncio.sleep(1)
        assert seen == told
        assert (peer.link.incarnation, peer.link.facts) == (welcome.incarnation, {"run": 2})

    run(main())


@pytest.mark.parametrize("known", [True, False])
def test_what_is_sent_during_a_hello_waits_for_the_welcome(known: bool) -> None:
    """In its order, after what those say who were forgotten. Calls then are theirs to send."""

    async def main() -> None:
        peer = await Peer().open()
        peer.link.on_rejoin(lambda same: peer.link.send(EndSession("p", "told")))
        peer.link.send(call(0))
        peer.send(HelloWanted())
        await asyncio.sleep(1)
        assert [type(message) for message, _ in peer.take()] == [Call, Hello, Hello]
        body = [b"\x93\x01\x02\x03"]
        peer.link.send(Reply(b"1", 1), body)
        peer.link.send(call(1))
        peer.link.send(Cancel(b"1", 1), control=True)
        peer.link.send(Reply(b"2", 1))
        body.clear()
        await asyncio.sleep(1)
        assert peer.said == []
        peer.welcome(known=known)
        await asyncio.sleep(1)
        peer.link.send(call(2))
        await asyncio.sleep(1)
        told, mine = ([], [call(1)]) if known else ([EndSession("p", "told")], [])
        before, after = Reply(b"1", 1), [Cancel(b"1", 1), Reply(b"2", 1)]
        assert [message for message, _ in peer.said] == [*told, before, *mine, *after, call(2)]
        assert peer.said[len(told)][1] == [1, 2, 3]

    run(main())


def test_what_was_held_back_keeps_its_lane() -> None:
    """Cancels do not queue behind data."""

    async def main() -> None:
        peer = await Peer().open()
        peer.send(HelloWanted())
        await asyncio.sleep(1)
        lanes: list[bytes] = []
        peer.router.receiver = lambda batch: lanes.extend(sender[:1] for sender, _ in batch)
        peer.link.send(Cancel(b"1", 1), control=True)
        peer.link.send(Reply(b"1", 1))
        peer.welcome(known=True)
        await asyncio.sleep(1)
        assert lanes == [b"c", b"d"]

    run(main())


def test_progress_is_not_held_back() -> None:
    """It would pile up while no broker is there; a missing piece is noticed, and costs no more than its work."""

    async def main() -> None:
        peer = await Peer().open()
        peer.send(HelloWanted())
        await asyncio.sleep(1)
        peer.take()
        for _ in range(1000):
            peer.link.send(Progress(b"1", 1))
        assert peer.link._held_back == []
        peer.welcome(known=True)
        peer.link.send(Reply(b"1", 1))
        await asyncio.sleep(1)
        assert [message for message, _ in peer.said] == [Reply(b"1", 1)]

    run(main())


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_refused_hello_closes_the_link() -> None:
    """Whoever waits for its end is told the broker's reason, whenever he asks."""

    async def main() -> None:
        peer = await Peer().open()
        waiting = asyncio.create_task(peer.link.wait_closed())
        peer.send(HelloWanted())
        peer.send(Failure(b"", 0, False), to_wire(ProtocolError("epoch 1 comes after epoch 2")), lane=b"c")
        reason = await waiting
        assert reason == await peer.link.wait_closed() == peer.link.closed
        assert "refused the hello: epoch 1 comes after epoch 2" in reason
        with pytest.raises(ConnectionLost, match="epoch 2"):
            peer.link.send(call(1))

    run(main())


def test_a_broker_of_another_version_refuses_in_its_own_words() -> None:
    """They cannot be read, but the version can. Outside of a hello they are just no message."""

    async def main() -> None:
        peer = await Peer().open()
        foreign = [msgpack.packb([99, 3, b"", 0, False])]
        peer.router.send(b"c" + peer.link.nonce, foreign)
        await asyncio.sleep(1)
        assert (peer.link.malformed, peer.link.closed) == (1, "")
        peer.send(HelloWanted())
        peer.router.send(b"c" + peer.link.nonce, foreign)
        assert "99" in await peer.link.wait_closed()

    run(main())


def test_answers_during_a_hello_are_no_refusals() -> None:
    """They reach whoever takes failures; without one they are nothing, as is a refusal that nobody waits for."""

    async def main() -> None:
        peer = await Peer().open()
        body = to_wire(ProtocolError("no"))
        peer.send(HelloWanted())
        peer.send(Failure(b"1", 1), body)
        await asyncio.sleep(1)
        assert peer.link.malformed == 1
        taken: list[Any] = []
        peer.link.on(Failure, lambda message, body: taken.append(message))
        with pytest.raises(ValueError, match="Failure already has a handler"):
            peer.link.on(Failure, lambda message, body: None)
        peer.send(Failure(b"1", 1), body)
        peer.welcome()
        peer.send(Failure(b"", 0), body)
        await asyncio.sleep(1)
        assert taken == [Failure(b"1", 1), Failure(b"", 0)]
        assert peer.link.closed == ""

    run(main())


# ---- signs of life --------------------------------------------------------------------------------------------------


async def hellos(peer: Peer, seconds: float) -> list[float]:
    """When hello is said during the next ``seconds``."""
    loop = asyncio.get_running_loop()
    start, times = loop.time(), []

    def got(batch: Any) -> None:
        times.extend(loop.time() - start for sender, _ in batch if sender[:1] == b"c")

    former, peer.router.receiver = peer.router.receiver, got
    await asyncio.sleep(seconds)
    peer.router.receiver = former
    return times


def test_a_silent_broker_is_asked_every_two_seconds() -> None:
    """From the fifth second without a pulse on; not before `keep`."""

    async def main() -> None:
        peer = await Peer().open()
        assert await hellos(peer, 20) == []
        peer.link.keep()
        assert await hellos(peer, 10.5) == pytest.approx([5, 7, 9])
        peer.link.close()

    run(main())


def test_a_broker_with_a_pulse_is_left_alone() -> None:
    """And one that has just said welcome."""

    async def main() -> None:
        peer = await Peer().open()
        peer.link.keep(patience_s=6)
        await asyncio.sleep(0.5)
        for _ in range(20):
            peer.pulse()
            assert await hellos(peer, 4) == []
        assert await hellos(peer, 1) == [pytest.approx(0.5)]
        peer.welcome(known=True)
        assert await hellos(peer, 4) == []
        assert peer.link.closed == ""
        peer.link.close()

    run(main())


def test_a_hello_that_is_not_answered_is_said_again() -> None:
    """After two seconds, whatever the pulse says."""

    async def main() -> None:
        peer = await Peer().open()
        peer.link.keep()
        peer.send(HelloWanted())
        await asyncio.sleep(0.5)
        times = []
        for _ in range(5):
            peer.pulse()
            times.append(len(await hellos(peer, 1)))
        assert sum(times) == 2
        peer.link.close()

    run(main())


@pytest.mark.parametrize("patience_s", [3, 30])
def test_patience_ends_when_the_broker_stays_silent(patience_s: float) -> None:
    """Counted from its last sign of life; the reason names it."""

    async def main() -> None:
        peer = await Peer().open()
        peer.link.keep(patience_s)
        await asyncio.sleep(2.5)
        peer.pulse()
        start = asyncio.get_running_loop().time()
        assert await peer.link.wait_closed() == f"no sign of life from the broker for {patience_s} s"
        assert asyncio.get_running_loop().time() - start == pytest.approx(patience_s - 0.5)
        await asyncio.sleep(1)
        assert peer.of(Goodbye) == [Goodbye()]

    run(main())


def test_a_process_that_was_suspended_does_not_take_the_broker_for_silent() -> None:
    """It has not looked meanwhile."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        peer = await Peer().open()
        peer.link.keep(patience_s=4)
        for _ in range(3):
            loop._jump.now += 1000
            await asyncio.sleep(0.1)
        assert peer.link.closed == ""
        peer.link.close()

    run(main())


def test_a_closed_link_looks_no_more() -> None:
    """Nothing is left on the loop, however it was closed; and `keep` twice is once."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        for patience_s in (math.inf, 3):
            peer = await Peer().open()
            peer.link.keep(patience_s)
            peer.link.keep(patience_s)
            await asyncio.sleep(5)
            peer.link.close()
            peer.link.keep()
            assert [timer for timer in loop._scheduled if not timer.cancelled()] == []

    run(main())


def test_pulses_are_passed_on() -> None:
    """To whoever asked."""

    async def main() -> None:
        peer = await Peer().open()
        pulses: list[int] = []
        peer.link.on_pulse(lambda: pulses.append(1))
        peer.link.on_pulse(lambda: pulses.append(2))
        peer.pulse()
        peer.send(Pulse(1), lane=b"c")
        await asyncio.sleep(1)
        assert pulses == [1, 2, 1, 2]

    run(main())


def test_a_closed_link_says_no_more_hello() -> None:
    """A connection that comes back while it closes changes nothing."""

    async def main() -> None:
        peer = await Peer().open()
        channel = peer.router._channels[b"c" + peer.link.nonce]
        peer.link.close("over", Goodbye("over", crashed=True))
        channel.reconnected()
        await asyncio.sleep(1)
        assert [message for message, _ in peer.said] == [Goodbye("over", True)]

    run(main())


def test_a_welcome_without_facts_is_no_welcome() -> None:
    """It is malformed, and the hello goes on."""

    async def main() -> None:
        peer = await Peer().open()
        peer.send(HelloWanted())
        peer.router.send(b"c" + peer.link.nonce, [encode_header(Welcome(2)), b"\xc1"])
        await asyncio.sleep(1)
        assert (peer.link.malformed, peer.link.greeting, peer.link.incarnation) == (1, True, 1)

    run(main())
