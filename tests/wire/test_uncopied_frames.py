"""Real sockets: large frames pass the broker's socket uncopied and arrive as what was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.processes import eventually
from zagent.wire.channel import Frames
from zagent.wire.codec import decode_body, encode_body
from zagent.wire.multipart import UNCOPIED_FROM
from zagent.wire.sockets import DealerChannel, RouterSocket

#: Only a failing test waits as long.
PATIENCE_S = 10.0


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterSocket]:
    socket = RouterSocket(f"ipc://{tmp_path}/broker")
    yield socket
    socket.close()


def received(router: RouterSocket) -> tuple[bytes, Frames]:
    (message,) = eventually(lambda: router.receive(1000))
    return message


async def answered(router: RouterSocket, frames: Frames) -> tuple[Frames, Frames]:
    """A dealer sends ``frames`` and the router sends them back: what the router got, what the dealer got."""
    channel = DealerChannel(router.endpoint, b"d-peer")
    answer: asyncio.Future[Frames] = asyncio.get_running_loop().create_future()
    channel.open(lambda batch: answer.set_result(batch[0]), lambda: None)
    try:
        channel.send(frames)
        identity, middle = await asyncio.to_thread(received, router)
        assert identity == b"d-peer"
        assert router.send(identity, middle)
        return middle, await asyncio.wait_for(answer, PATIENCE_S)
    finally:
        channel.close()


@pytest.mark.parametrize("size", [0, 1, UNCOPIED_FROM - 1, UNCOPIED_FROM, 1_000_000])
def test_frames_of_any_size_come_back_as_sent(router, size):
    """Frames below and above the size from which none is copied arrive byte for byte, in order, next to each other."""
    frames = [b"header", np.random.default_rng(0).bytes(size), b"", np.random.default_rng(1).bytes(size)]
    middle, back = asyncio.run(answered(router, frames))
    assert [bytes(frame) for frame in middle] == frames
    assert [bytes(frame) for frame in back] == frames


def test_large_frames_are_not_copied_on_their_way_through(router):
    """The router hands on libzmq's own memory; small frames are bytes, so that keeping one keeps no neighbours."""
    middle, _ = asyncio.run(answered(router, [b"header", bytes(UNCOPIED_FROM - 1), bytes(UNCOPIED_FROM)]))
    assert [type(frame).__name__ for frame in middle] == ["bytes", "bytes", "Frame"]


@pytest.mark.parametrize("tokens", [10, 100_000])
def test_received_arrays_are_read_only(router, tokens):
    """Whether its frame was copied or not, an array cannot be written to."""
    body = encode_body({"ids": np.arange(tokens, dtype=np.int32), "text": "x" * tokens})
    _, back = asyncio.run(answered(router, [b"header", *body]))
    value = decode_body(back[1:])
    np.testing.assert_array_equal(value["ids"], np.arange(tokens))
    assert not value["ids"].flags.writeable
    assert value["text"] == "x" * tokens


def test_messages_sent_in_one_turn_keep_their_order(router):
    """Sends wait for the end of the loop's turn and then go out first in, first out."""

    async def send() -> list[bytes]:
        channel = DealerChannel(router.endpoint, b"d-peer")
        channel.open(lambda batch: None, lambda: None)
        try:
            for number in range(100):
                channel.send([str(number).encode()])
            await asyncio.sleep(0)
            got: list[bytes] = []
            while len(got) < 100:
                batch = await asyncio.to_thread(eventually, lambda: router.receive(1000))
                got += [bytes(frames[0]) for _, frames in batch]
            return got
        finally:
            channel.close()

    assert asyncio.run(send()) == [str(number).encode() for number in range(100)]


def test_what_was_sent_just_before_closing_arrives(router):
    """Closing sends what still waits for the end of the turn."""

    async def send() -> None:
        channel = DealerChannel(router.endpoint, b"d-peer")
        channel.open(lambda batch: None, lambda: None)
        channel.send([b"goodbye"])
        channel.close()

    asyncio.run(send())
    assert received(router)[1] == [b"goodbye"]
