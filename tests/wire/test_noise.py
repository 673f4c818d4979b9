"""Noise below the messages: what is no ZMTP, or wrong ZMTP, ends its own connection and nobody else's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from support.echo import Echo, Peer
from support.key_files import both
from support.processes import eventually
from support.raw_peer import SIGNATURE, RawPeer, frame, greeting, message, ready
from zagent.wire import options
from zagent.wire.codec import MAX_FRAME
from zagent.wire.sockets import RouterSocket


@pytest.fixture(params=["ipc", "tcp", "curve"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Echo]:
    keys = both(tmp_path / "k")[0] if request.param == "curve" else None
    with Echo(f"ipc://{tmp_path}/b" if request.param == "ipc" else "tcp://127.0.0.1:0", keys) as serving:
        yield serving


def noise(seed: int, size: int = 5000) -> bytes:
    return random.Random(seed).randbytes(size)


#: What never becomes a connection.
BEGINNINGS = {
    "nothing": b"",
    "one byte": b"\xff",
    "half a greeting": SIGNATURE,
    "noise": noise(0),
    "more noise": noise(1),
    "a greeting, then noise": greeting() + noise(2),
    "HTTP": b"GET / HTTP/1.1\r\nHost: b\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise(3, 500),
    "a version of the future": greeting(version=b"\x7f\x7f") + ready(b"d-x"),
    "an unknown mechanism": greeting(b"XYZZY") + ready(b"d-x"),
    "another kind of socket": greeting() + ready(b"d-x", b"PUB"),
    "a name of 4 GB": greeting() + frame(b"\5READY\x08Identity\xff\xff\xff\xff", flags=4),
    "a command of 2⁶³ bytes": greeting() + b"\x06" + b"\x7f" + b"\xff" * 7,
    "a message before its time": greeting() + ready(b"d-x") + message([b"too early"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BEGINNINGS)
def test_what_does_not_come_in_disturbs_nobody(case: str, echo: Echo) -> None:
    """It stays, half said, or goes; a peer that comes meanwhile is served, and one that was there before."""

    async def main() -> None:
        async with Peer(echo.endpoint) as peer:
            await peer.ask(b"before")
            with RawPeer(echo.endpoint) as stranger:
                stranger.send(BEGINNINGS[case])
                assert await peer.ask(b"beside") == [b"beside"]
                async with Peer(echo.endpoint, b"d-2") as other:
                    assert await other.ask(b"too") == [b"too"]
            assert await peer.ask(b"after") == [b"after"]
            assert peer.reconnections == 0

    asyncio.run(main())


#: What comes in, and then says something impossible.
IMPOSSIBLE = {
    "a frame beyond the limit": b"\2" + (MAX_FRAME + 1).to_bytes(8, "big"),
    "a frame of 2⁶³ bytes": b"\2" + b"\x7f" + b"\xff" * 7,
    "a frame of −1 bytes": b"\2" + b"\xff" * 8,
    "an unknown command": frame(b"\5XYZZY", flags=4),
    "half a command": frame(b"\5PI", flags=4),
    "a ping without its time": frame(b"\4PING", flags=4),
    "another READY": ready(b"d-peer"),
    "all flags": bytes([255]) + noise(4, 300),
    "noise": noise(5),
    "more noise": noise(6),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_says_something_impossible_disturbs_nobody(case: str, tmp_path: Path) -> None:
    """Whatever becomes of it."""

    async def main() -> None:
        with Echo(f"ipc://{tmp_path}/b") as echo:
            async with Peer(echo.endpoint) as peer:
                await peer.ask(b"before")
                with RawPeer(echo.endpoint).shake_hands(b"d-x") as stranger:
                    stranger.send(message([b"first"]))
                    stranger.send(IMPOSSIBLE[case])
                    await asyncio.to_thread(eventually, lambda: (b"d-x", [b"first"]) in echo.received)
                    assert await peer.ask(b"beside") == [b"beside"]
                assert peer.reconnections == 0

    asyncio.run(main())


def test_a_frame_beyond_the_limit_is_not_waited_for(tmp_path: Path) -> None:
    """Its announcement is enough: the connection ends before anything is taken up; one at the limit may come."""
    with Echo(f"ipc://{tmp_path}/b") as echo:
        with RawPeer(echo.endpoint).shake_hands(b"d-x") as stranger:
            stranger.send(b"\2" + (MAX_FRAME + 1).to_bytes(8, "big"))
            assert stranger.rest() == b""
        with RawPeer(echo.endpoint).shake_hands(b"d-y") as other:
            other.send(message([b"small"]) + b"\2" + MAX_FRAME.to_bytes(8, "big"))
            assert other.read(7) == frame(b"small")


def test_a_message_that_ends_in_the_middle_is_none(tmp_path: Path) -> None:
    """Two of three frames, or half a frame, and the connection is gone: nothing has arrived."""
    with Echo(f"ipc://{tmp_path}/b") as echo:
        for number, said in enumerate((frame(b"a", flags=1) + frame(b"b", flags=1), message([b"c" * 9])[:-1])):
            with RawPeer(echo.endpoint).shake_hands(b"d-%d" % number) as stranger:
                stranger.send(said)
        with RawPeer(echo.endpoint).shake_hands(b"d-9") as peer:
            peer.send(message([b"whole"]))
            assert peer.read(7) == frame(b"whole")
        assert [frames for _, frames in echo.received] == [[b"whole"]]


def test_any_name_will_do(tmp_path: Path) -> None:
    """Also none, one of 255 bytes, and one that libzmq gives to the nameless: each gets its own answers."""
    names = [b"", b"\0", b"\0\0\0\0\1", b"d" * 255, b"\xff" * 9]
    with Echo(f"ipc://{tmp_path}/b") as echo, ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(echo.endpoint)).shake_hands(name) for name in names]
        for number, peer in enumerate(peers):
            peer.send(message([b"%d" % number]))
        assert [peer.read(3) for peer in peers] == [frame(b"%d" % number) for number in range(len(peers))]


@pytest.mark.parametrize("handshake", [b"", SIGNATURE, greeting()], ids=["nothing", "a tenth", "a greeting"])
def test_many_that_never_finish_are_cut_off(handshake: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Peers come in between them; after a while (longer than a busy machine keeps a peer waiting) all are cut off, and
    counted."""
    monkeypatch.setattr(options, "_OPTIONS", {**options._OPTIONS, zmq.HANDSHAKE_IVL: 2000})
    count = 200

    async def main() -> None:
        with Echo(f"ipc://{tmp_path}/quick") as quick, ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(RawPeer(quick.endpoint)).send(handshake)
            async with Peer(quick.endpoint) as peer:
                assert await peer.ask(b"hello") == [b"hello"]
                await asyncio.to_thread(eventually, lambda: quick.turned_away == count)
                assert peer.reconnections == 0

    asyncio.run(main())


def test_a_broker_that_is_busy_with_itself_shakes_hands_all_the_same(tmp_path: Path) -> None:
    """However many came and went since it has looked: libzmq does not wait until it is told that they did."""
    router = RouterSocket(f"ipc://{tmp_path}/b")
    for _ in range(1500):
        RawPeer(router.endpoint).socket.close()
    with RawPeer(router.endpoint).shake_hands(b"d-x"):
        eventually(lambda: router.turned_away() == 1500)
    router.close()
