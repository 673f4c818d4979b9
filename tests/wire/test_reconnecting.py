"""Connections that are lost come back, and those that only seem to be there are found dead. Real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from support.echo import PATIENCE_S, Echo, Peer
from support.key_files import both
from support.processes import eventually
from support.raw_peer import RawPeer, frame, greeting, message, ready
from zagent.errors import ConnectionLost
from zagent.wire import options, sockets
from zagent.wire.sockets import DealerChannel, RouterSocket


@pytest.fixture(params=["ipc", "tcp", "curve"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str | None]:
    """An endpoint that can be bound again and again, and the key file."""
    if request.param == "ipc":
        return f"ipc://{tmp_path}/b", None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    if request.param == "tcp":
        return endpoint, None
    path, _ = both(tmp_path / "k")
    return f"{endpoint}?keys={path}.client", path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed in a fraction of a second."""
    short = {zmq.HEARTBEAT_IVL: 50, zmq.HEARTBEAT_TIMEOUT: 300, zmq.HEARTBEAT_TTL: 300, zmq.HANDSHAKE_IVL: 300}
    assert short.keys() <= options._OPTIONS.keys()
    monkeypatch.setattr(options, "_OPTIONS", {**options._OPTIONS, **short})


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    with Echo(f"ipc://{tmp_path}/b") as serving:
        yield serving


def test_nothing_is_waited_for_longer_than_it_must(echo: Echo) -> None:
    """Both kinds of sockets: silence is noticed in 12 s, a broker that is back in a third of a second."""

    async def main() -> None:
        async with Peer(echo.endpoint) as peer:
            for found in (peer.channel._socket, echo.router._socket):
                assert found is not None
                silence = found.getsockopt(zmq.HEARTBEAT_IVL) + found.getsockopt(zmq.HEARTBEAT_TIMEOUT)
                assert silence == 2000 + found.getsockopt(zmq.HEARTBEAT_TTL) == 12_000
                assert found.getsockopt(zmq.HANDSHAKE_IVL) == 10_000
                assert 0 < found.getsockopt(zmq.RECONNECT_IVL) < found.getsockopt(zmq.RECONNECT_IVL_MAX) <= 300

    asyncio.run(main())


def test_a_peer_is_told_of_each_connection_but_the_first(place: tuple[str, str | None]) -> None:
    """The broker goes and another one comes at the same endpoint, at once; what was said in between arrives then."""

    async def main() -> None:
        async with Peer(place[0]) as peer:
            for life in range(3):
                peer.channel.send([b"%d" % life])
                with Echo(*place):
                    assert await asyncio.wait_for(peer.answers.get(), PATIENCE_S) == [b"%d" % life]
                    if life:
                        await asyncio.wait_for(peer.reconnected.wait(), PATIENCE_S)
                    peer.reconnected.clear()
                    assert peer.reconnections == life

    asyncio.run(main())


def test_what_a_lost_connection_brought_comes_before_the_word_of_a_new_one(echo: Echo) -> None:
    """Both are there when the loop looks, and it looks at the monitor first."""

    async def main() -> list[str]:
        seen: list[str] = []
        channel = DealerChannel(echo.endpoint, b"d-peer")
        channel.open(lambda batch: seen.append("message"), lambda: seen.append("reconnected"))
        assert channel._socket is not None
        assert channel._monitor is not None
        channel._socket.send(b"hello")
        assert channel._socket.poll(PATIENCE_S * 1000)
        channel._monitor.take = lambda: Counter({sockets._MADE: 2})  # type: ignore[method-assign]
        channel._hear()
        channel.close()
        return seen

    assert asyncio.run(main()) == ["message", "reconnected"]


def test_a_peer_takes_its_name_over_from_a_dead_connection(echo: Echo) -> None:
    """Its former connection still seems to be there: what is sent to it goes to the new one."""

    async def main() -> None:
        answer = frame(b"from the former")
        with RawPeer(echo.endpoint).shake_hands(b"d-peer") as former:
            former.send(message([b"from the former"]))
            await asyncio.to_thread(eventually, lambda: echo.received)
            async with Peer(echo.endpoint) as peer:
                assert await peer.ask(b"from the new one") == [b"from the new one"]
            assert former.read(len(answer)) == answer
            former.socket.setblocking(False)
            with pytest.raises(BlockingIOError):
                former.read(1)

    asyncio.run(main())


def test_a_peer_that_falls_silent_is_gone(quick: None, tmp_path: Path) -> None:
    """It shook hands and answers no ping: its connection is cut, and it cannot be sent to."""
    router = RouterSocket(f"ipc://{tmp_path}/b")
    with RawPeer(router.endpoint) as peer:
        peer.send(greeting() + ready(b"d-peer"))
        eventually(lambda: router.receive(1) or router.send(b"d-peer", [b"x"]))
        eventually(lambda: router.receive(1) or not router.send(b"d-peer", [b"x"]))
        assert b"\4PING" in peer.rest()
    router.close()


def test_a_peer_that_answers_stays(quick: None, tmp_path: Path) -> None:
    """However long it has nothing to say, libzmq answers for it: a busy member is not cut off."""

    async def main() -> None:
        with Echo(f"ipc://{tmp_path}/b") as echo:
            async with Peer(echo.endpoint) as peer, Peer(echo.endpoint, b"d-2") as other:
                await peer.ask(b"1")
                with RawPeer(echo.endpoint) as silent:
                    silent.send(greeting() + ready(b"d-silent"))
                    await asyncio.to_thread(silent.rest)  # until its silence is noticed
                await other.ask(b"2")
                assert await peer.ask(b"3") == [b"3"]
                assert peer.reconnections == other.reconnections == 0

    asyncio.run(main())


def listening(tmp_path: Path) -> tuple[str, socket.socket]:
    """A broker that does nothing: its endpoint and its socket."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{tmp_path}/b")
    server.listen()
    server.settimeout(PATIENCE_S)
    return f"ipc://{tmp_path}/b", server


def accepted(server: socket.socket) -> RawPeer:
    """The broker's end of the next connection."""
    end = RawPeer.__new__(RawPeer)
    end.socket, _ = server.accept()
    end.socket.settimeout(PATIENCE_S)
    return end


def test_a_peer_says_how_long_it_may_be_silent(quick: None, tmp_path: Path) -> None:
    """With each ping, in tenths of a second: a broker that cannot ping it, for it reads nothing, needs not."""
    endpoint, server = listening(tmp_path)

    async def main() -> None:
        async with Peer(endpoint):
            with server, await asyncio.to_thread(accepted, server) as broker:
                broker.send(greeting() + ready(b"", b"ROUTER"))
                said = await asyncio.to_thread(broker.rest)  # the peer hangs up: nobody answers its pings
                assert b"\4PING\0\3" in said

    asyncio.run(main())


def test_a_broker_that_does_not_speak_is_tried_again(quick: None, tmp_path: Path) -> None:
    """It accepts, and says nothing: it may be stopped, and be another one by the next time."""
    endpoint, server = listening(tmp_path)

    async def main() -> None:
        async with Peer(endpoint):
            with server:
                for _ in range(2):
                    with await asyncio.to_thread(accepted, server) as broker:
                        assert await asyncio.to_thread(broker.rest)  # until it hangs up

    asyncio.run(main())


def test_a_peer_whose_broker_takes_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded; once the broker is there, it gets all that was accepted, in order."""
    monkeypatch.setattr(options, "_OPTIONS", {**options._OPTIONS, zmq.SNDHWM: 10})
    monkeypatch.setattr(sockets, "BACKLOG_MAX", 5)

    async def main() -> int:
        async with Peer(f"ipc://{tmp_path}/b") as peer:
            sent = 0
            with pytest.raises(ConnectionLost, match=r"the broker takes nothing: \d+ messages wait for it"):
                while True:
                    peer.channel.send([b"%d" % sent])
                    sent += 1
            with Echo(f"ipc://{tmp_path}/b") as echo:
                await asyncio.to_thread(eventually, lambda: len(echo.received) == sent)
                assert [frames for _, frames in echo.received] == [[b"%d" % i] for i in range(sent)]
                assert await peer.ask(b"more")
        return sent

    assert asyncio.run(main()) == 15


def test_a_burst_in_one_turn_is_no_broker_that_takes_nothing(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """More at once than may wait: libzmq's queue takes it."""
    monkeypatch.setattr(sockets, "BACKLOG_MAX", 5)

    async def main() -> None:
        async with Peer(echo.endpoint) as peer:
            for number in range(100):
                peer.channel.send([b"%d" % number])
            for number in range(100):
                assert await asyncio.wait_for(peer.answers.get(), PATIENCE_S) == [b"%d" % number]

    asyncio.run(main())
