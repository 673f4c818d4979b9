"""Two lanes, one hello each; whoever waits for a broker is told what went wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from support.broker_driver import SECRET
from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent import __version__
from zagent.client.calls import Calls
from zagent.client.link import Identity, Link
from zagent.errors import ConnectionLost, ProtocolError, RemoteError, VersionMismatch, to_wire
from zagent.wire.channel import MemoryRouter
from zagent.wire.codec import encode_body, encode_header
from zagent.wire.messages import Failure, Hello, Reply, Welcome


def test_the_welcome_brings_the_clusters_facts() -> None:
    """Facts and incarnation of the broker."""

    async def main() -> None:
        async with Cluster(facts={"run_id": "r"}, incarnation=3) as cluster:
            link = await cluster.link()
            assert (link.facts, link.incarnation) == ({"run_id": "r"}, 3)

    run(main())


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        (Identity("engine", "m", 1, 8, "wrong"), "wrong join secret"),
        (Identity("judge", "m", 1, 8, SECRET), "no pool 'judge'"),
        (Identity("engine", "m", 1, 0, SECRET), "0 credits"),
    ],
)
def test_a_refused_hello_raises_the_brokers_reason(identity: Identity, text: str) -> None:
    """At once, as `ProtocolError`; the link is closed."""

    async def main() -> None:
        async with Cluster() as cluster:
            with pytest.raises(ProtocolError, match=text):
                await cluster.link(identity)
            assert asyncio.get_running_loop().time() < 1
            with pytest.raises(ConnectionLost):
                cluster.links[-1].send(Reply(b"x", 1))

    run(main())


def test_no_welcome_is_a_lost_connection() -> None:
    """After the timeout, naming it."""

    async def main() -> None:
        link = Link(MemoryRouter().connect)
        with pytest.raises(ConnectionLost, match="did not answer hello within 7 s"):
            await link.open(timeout=7)
        assert asyncio.get_running_loop().time() == pytest.approx(7)
        assert link.closed

    run(main())


def answering(frames: list[bytes]) -> MemoryRouter:
    """A broker that says the same to everybody."""
    router = MemoryRouter()
    router.receiver = lambda batch: [router.send(sender, frames) for sender, _ in batch] and None
    return router


def test_a_broker_of_another_version_is_named_at_once() -> None:
    """Its refusal cannot be read here, but its version can."""

    async def main() -> None:
        link = Link(answering([msgpack.packb([99, 3, b"", 0, False])]).connect)
        with pytest.raises(VersionMismatch, match="99"):
            await link.open()
        assert asyncio.get_running_loop().time() < 1
        assert link.closed

    run(main())


def test_a_refusal_of_an_unknown_class_closes_the_link_too() -> None:
    """Whatever ends the hello, no lane stays open."""

    async def main() -> None:
        body = encode_body({**to_wire(ProtocolError("no")), "type": "FromTheFuture"})
        link = Link(answering([encode_header(Failure(b"", 0, False)), *body]).connect)
        with pytest.raises(RemoteError):
            await link.open()
        assert link.closed

    run(main())


def test_cancelling_open_closes_the_lanes() -> None:
    """Nothing is left half open."""

    async def main() -> None:
        router = MemoryRouter()
        link = Link(router.connect)
        task = asyncio.create_task(link.open())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert not router.send(b"d" + link.nonce, [b"x"])
        assert not router.send(b"c" + link.nonce, [b"x"])

    run(main())


def test_both_lanes_say_hello_and_the_control_lane_goodbye() -> None:
    """Closing twice says it once."""

    async def main() -> None:
        async with Cluster() as cluster:
            seen: list[tuple[bytes, str]] = []
            feed = cluster.router.receiver
            assert feed is not None
            from zagent.wire.codec import decode_header

            def watch(batch: Any) -> None:
                seen.extend((sender[:1], type(decode_header(frames[0])).__name__) for sender, frames in batch)
                feed(batch)

            cluster.router.receiver = watch
            link = await cluster.link()
            link.close()
            link.close()
            await asyncio.sleep(0.1)
            assert seen == [(b"d", "Hello"), (b"c", "Hello"), (b"c", "Goodbye")]

    run(main())


def test_a_failure_during_hello_does_not_reach_the_calls() -> None:
    """And afterwards failures are theirs again."""

    async def main() -> None:
        async with Cluster() as cluster:
            link = Link(cluster.router.connect)
            calls = Calls(link)
            cluster.links.append(link)
            await link.open()
            cluster.router.send(b"d" + link.nonce, [encode_header(Failure(b"x", 1)), b"\x80"])
            await asyncio.sleep(0.1)
            assert calls.late == 1

    run(main())


def test_what_is_no_message_is_counted_and_dropped() -> None:
    """Garbage, kinds nobody here takes, empty messages: the link goes on."""

    async def main() -> None:
        async with Cluster() as cluster:
            link = await cluster.link()
            hello = encode_header(Hello("", "x", 0, 0, "", __version__))
            for frames in ([], [b""], [b"\xc1"], [hello], [b"\x90"], [encode_header(Welcome(1)), b"\xc1"]):
                cluster.router.send(b"d" + link.nonce, frames)
            await asyncio.sleep(0.1)
            assert link.malformed == 6
            assert link.closed == ""

    run(main())


def test_one_handler_per_kind() -> None:
    """A second one is a mistake in the program."""
    link = Link(MemoryRouter().connect)
    link.on(Reply, lambda message, body: None)
    with pytest.raises(ValueError, match="Reply already has a handler"):
        link.on(Reply, lambda message, body: None)


def test_a_channel_that_cannot_be_opened_is_a_lost_connection() -> None:
    """The error of the first lane gets through, and closing is still possible."""

    class Broken:
        def open(self, receiver: Any, reconnected: Any) -> None:
            raise ConnectionLost("no endpoint")

        def send(self, frames: Any) -> None:
            raise ConnectionLost("closed")

        def close(self) -> None:
            pass

    async def main() -> None:
        link = Link(lambda identity: Broken())
        with pytest.raises(ConnectionLost, match="no endpoint"):
            await link.open()
        link.close()

    run(main())
