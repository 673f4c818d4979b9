"""The in-memory twin behaves as a ROUTER with DEALERs."""

from __future__ import annotations

import asyncio

import pytest

from support.virtual_clock import run
from zagent.errors import ConnectionLost
from zagent.wire.channel import Frames, MemoryRouter


def test_messages_keep_their_order_with_latency() -> None:
    """Delivery takes the latency, and what was sent first arrives first."""

    async def main() -> list[tuple[float, bytes]]:
        router, got, loop = MemoryRouter(latency=0.25), [], asyncio.get_running_loop()
        router.receiver = lambda batch: got.extend((loop.time(), frames[0]) for _, frames in batch)
        channel = router.connect(b"a")
        channel.open(lambda batch: None)
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
        channel.open(lambda batch: None)
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
        channel.open(lambda batch: None)
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
        channel.open(lambda batch: None)
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
        channel.open(got.extend)
        router.send(b"a", [b"x"])
        channel.close()
        await asyncio.sleep(2)
        return got

    assert run(main()) == []
