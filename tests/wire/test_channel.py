"""The in-memory twin behaves as a ROUTER with DEALERs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.virtual_clock import run
from zagent.errors import ConnectionLost
from zagent.wire.channel import Frames, MemoryChannel, MemoryRouter


def test_messages_keep_their_order_with_latency() -> None:
    """Delivery takes the latency, and what was sent first arrives first."""

    async def main() -> list[tuple[float, bytes]]:
        router, got, loop = MemoryRouter(latency=0.25), [], asyncio.get_running_loop()
        router.receiver = lambda batch: got.extend((loop.time(), frames[0]) for _, frames in batch)
        channel = router.connect(b"a")
        channel.open(lambda batch: None, lambda: None)
        for i in range(5):
            channel.send([b"%d" % i])
        await asyncio.sleep(1)
        return got

    assert run(main()) == [(0.25, b"%d" % i) for i in range(5)]


def test_an_unknown_identity_is_unsendable() -> None:
    """As ROUTER_MANDATORY: the sender is told (pitfall I7)."""

    async def main() -> tuple[bool, bool, bool]:
        router = MemoryRouter()
        channel = router.connect(b"a")
        before = router.send(b"a", [b"x"])
        channel.open(lambda batch: None, lambda: None)
        there = router.send(b"a", [b"x"])
        channel.close()
        return before, there, router.send(b"a", [b"x"])

    assert run(main()) == (False, True, False)


def test_a_closed_channel_refuses() -> None:
    """Sending before open and after close raises."""

    async def main() -> None:
        channel = MemoryRouter().connect(b"a")
        with pytest.raises(ConnectionLost):
            channel.send([b"x"])
        channel.open(lambda batch: None, lambda: None)
        channel.close()
        with pytest.raises(ConnectionLost):
            channel.send([b"x"])

    run(main())


def test_the_channel_keeps_no_reference_to_the_memory() -> None:
    """Frames are copied when sent: the caller's buffer may change at once."""

    async def main() -> list[Frames]:
        router, got = MemoryRouter(), []
        router.receiver = lambda batch: got.extend(frames for _, frames in batch)
        channel = router.connect(b"a")
        channel.open(lambda batch: None, lambda: None)
        buffer = bytearray(b"old")
        channel.send([memoryview(buffer)])
        buffer[:] = b"new"
        await asyncio.sleep(0)
        return got

    assert run(main()) == [[b"old"]]


def test_a_message_to_a_channel_that_closes_on_the_way_is_dropped() -> None:
    """As on a socket."""

    async def main() -> list[Frames]:
        router, got = MemoryRouter(latency=1), []
        channel = router.connect(b"a")
        channel.open(got.extend, lambda: None)
        router.send(b"a", [b"x"])
        channel.close()
        await asyncio.sleep(2)
        return got

    assert run(main()) == []


def told(router: MemoryRouter, identity: bytes) -> tuple[MemoryChannel, list[Any]]:
    """A channel, and what it hears: frames, and None where it was connected again."""
    channel, heard = router.connect(identity), []
    channel.open(heard.extend, lambda: heard.append(None))
    return channel, heard


def test_a_broker_that_goes_takes_with_it_what_is_under_way() -> None:
    """In both directions. What was sent without it reaches the next, in order; all channels hear of that."""

    async def main() -> None:
        router, got = MemoryRouter(latency=1), []
        router.receiver = lambda batch: got.extend((sender, frames[0]) for sender, frames in batch)
        (a, at_a), (b, at_b) = told(router, b"a"), told(router, b"b")
        a.send([b"lost"])
        assert router.send(b"b", [b"lost"])
        await asyncio.sleep(0.5)
        router.cut()
        for number in range(3):
            a.send([b"%d" % number])
            b.send([b"%d" % number])
        await asyncio.sleep(2)
        assert (got, at_a, at_b) == ([], [], [])
        router.mend()
        await asyncio.sleep(0.7)
        assert (got, at_a, at_b) == ([], [None], [None])
        await asyncio.sleep(0.7)
        assert sorted(got) == [(name, b"%d" % number) for name in (b"a", b"b") for number in range(3)]

    run(main())


def test_messages_after_the_cut_take_their_full_time() -> None:
    """The timers of those that were lost deliver nothing."""

    async def main() -> None:
        router = MemoryRouter(latency=1)
        heard = told(router, b"a")[1]
        assert router.send(b"a", [b"lost"])
        await asyncio.sleep(0.5)
        router.cut()
        router.mend()
        assert router.send(b"a", [b"x"])
        await asyncio.sleep(0.9)
        assert heard == [None]
        await asyncio.sleep(0.2)
        assert heard == [None, [b"x"]]

    run(main())


def test_without_a_broker_nobody_can_be_reached() -> None:
    """Nor after it, until the connection is there again; a channel that was opened meanwhile is treated alike."""

    async def main() -> None:
        router, got = MemoryRouter(), []
        router.receiver = lambda batch: got.extend(frames for _, frames in batch)
        told(router, b"a")
        router.cut()
        late, _ = told(router, b"late")
        late.send([b"x"])
        assert not router.send(b"a", [b"x"])
        assert not router.send(b"late", [b"x"])
        await asyncio.sleep(1)
        assert got == []
        router.mend()
        assert router.send(b"a", [b"x"])
        assert router.send(b"late", [b"x"])
        await asyncio.sleep(1)
        assert got == [[b"x"]]

    run(main())


def test_a_channel_that_closes_without_a_broker_has_said_its_last_word() -> None:
    """The next broker hears it, and the channel no more."""

    async def main() -> None:
        router, got = MemoryRouter(), []
        router.receiver = lambda batch: got.extend(frames for _, frames in batch)
        channel, heard = told(router, b"a")
        router.cut()
        channel.send([b"bye"])
        channel.close()
        router.mend()
        await asyncio.sleep(1)
        assert (got, heard) == ([[b"bye"]], [])

    run(main())
