"""A broker over TCP lets in who has its client file, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.echo import Echo, Peer
from support.key_files import both, written
from support.processes import eventually
from support.raw_peer import SIGNATURE, RawPeer, greeting, message, ready
from zagent.errors import ConfigError
from zagent.wire.endpoints import parse
from zagent.wire.keys import BrokerKeys, generate
from zagent.wire.sockets import RouterSocket

TCP = "tcp://127.0.0.1:0"


class Guarded(Echo):
    """Over TCP, with keys of its own."""

    def __init__(self, place: Path) -> None:
        path, self.keys = both(place / "k")
        super().__init__(TCP, path)

    def with_client_file(self, path: str) -> str:
        return str(parse(self.endpoint)._replace(keys=path))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Guarded]:
    with Guarded(tmp_path) as guarded:
        yield guarded


async def answers(endpoint: str) -> bool:
    """Whether the broker sends back what is said to it."""
    async with Peer(endpoint) as peer:
        return await peer.ask(b"hello", b"") == [b"hello", b""]


def test_the_endpoint_is_all_one_needs(broker: Guarded, tmp_path: Path) -> None:
    """It names the client file, by its absolute path; nobody was turned away."""
    assert broker.endpoint.endswith(f"?keys={tmp_path}/k.client")
    assert asyncio.run(answers(broker.endpoint))
    assert broker.turned_away == 0


def test_the_client_file_works_from_anywhere(broker: Guarded, tmp_path: Path) -> None:
    """It is copied to another host, under another name."""
    copy = written(tmp_path / "copied", broker.keys.client)
    assert asyncio.run(answers(broker.with_client_file(copy)))


STRANGERS = {
    "another client key": lambda mine, other: other._replace(broker_public=mine.broker_public).client,
    "another broker's key": lambda mine, other: mine._replace(broker_public=other.broker_public).client,
    "another run's keys": lambda mine, other: other.client,
}


@pytest.mark.parametrize("case", STRANGERS)
def test_a_wrong_key_gets_nothing(case: str, broker: Guarded, tmp_path: Path) -> None:
    """Not a byte of a message either way; it is counted, and who has the right one is served beside it."""
    wrong = written(tmp_path / "wrong", STRANGERS[case](broker.keys, generate()))

    async def main() -> None:
        async with Peer(broker.with_client_file(wrong), b"d-stranger") as stranger:
            stranger.channel.send([b"let me in"])
            await asyncio.to_thread(eventually, lambda: broker.turned_away)
            async with Peer(broker.endpoint) as peer:
                await peer.ask(b"hello")
            assert stranger.answers.empty()

    asyncio.run(main())
    assert [identity for identity, _ in broker.received] == [b"d-peer"]


def test_without_a_key_one_gets_nothing(broker: Guarded) -> None:
    """A peer that was told no client file."""

    async def main() -> None:
        async with Peer(parse(broker.endpoint).address) as stranger:
            stranger.channel.send([b"let me in"])
            await asyncio.to_thread(eventually, lambda: broker.turned_away)
            assert stranger.answers.empty()

    asyncio.run(main())
    assert broker.received == []


#: What an older or simpler protocol would begin with, and go on with at once.
DOWNGRADES = {
    "ZMTP 1.0": b"\x01\x00\x06\x00hello",
    "ZMTP 2.0": SIGNATURE + b"\1\5\0\0\0\5hello",
    "ZMTP 3.0 without encryption": greeting(version=b"\3\0") + ready(b"d-peer") + message([b"hello"]),
    "ZMTP 3.1 without encryption": greeting() + ready(b"d-peer") + message([b"hello"]),
    "a password": greeting(b"PLAIN") + b"\x04\x0e\x05HELLO\4user\2pw",
    "encryption that is none": greeting(b"CURVE") + ready(b"d-peer") + message([b"hello"]),
}


@pytest.mark.parametrize("case", DOWNGRADES)
def test_nobody_talks_the_broker_out_of_encryption(case: str, broker: Guarded) -> None:
    """The connection ends, and nothing has arrived."""
    with RawPeer(broker.endpoint) as stranger:
        stranger.send(DOWNGRADES[case])
        said = stranger.rest()
    assert greeting(b"CURVE").startswith(said[:12])
    assert b"READY" not in said
    assert broker.received == []
    assert asyncio.run(answers(broker.endpoint))


def test_a_broker_needs_its_own_file(tmp_path: Path) -> None:
    """The client's will not do, and neither will none; nothing is bound then."""
    path, keys = both(tmp_path / "k")
    for wrong in (f"{path}.client", f"{tmp_path}/none"):
        with pytest.raises(ConfigError, match=f"key file '{wrong}'"):
            RouterSocket(TCP, wrong)
    assert isinstance(keys, BrokerKeys)


def test_a_peer_whose_file_is_gone_is_told(tmp_path: Path) -> None:
    """As `ConfigError`, which names it; a relative path is one from here."""

    async def main() -> None:
        for missing in (f"{tmp_path}/none", "none"):
            with pytest.raises(ConfigError, match=f"key file '{missing}' cannot be read: No such file"):
                Peer(f"tcp://127.0.0.1:1?keys={missing}")

    asyncio.run(main())


def test_the_endpoint_of_a_former_life_can_be_bound_again(tmp_path: Path) -> None:
    """The launcher knows the port from there, and the client file with it."""
    path, _ = both(tmp_path / "odd:1?&")
    with Echo(TCP, path) as first:
        assert asyncio.run(answers(first.endpoint))
    with Echo(first.endpoint, path) as second:
        assert second.endpoint == first.endpoint
        assert asyncio.run(answers(first.endpoint))


def test_the_endpoint_of_a_broker_whose_file_is_given_by_a_relative_path_works_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers may run in another directory."""
    both(tmp_path / "k")
    monkeypatch.chdir(tmp_path)
    with Echo(TCP, "k") as broker:
        monkeypatch.chdir("/")
        assert asyncio.run(answers(broker.endpoint))


def test_a_gate_that_nobody_keeps_is_closed(tmp_path: Path) -> None:
    """Even to who has the right key: libzmq itself would let everybody in who can encrypt."""
    router = RouterSocket(TCP, both(tmp_path / "k")[0])
    assert router._gate is not None
    router._poll.unregister(router._gate.socket)
    router._gate.socket.close()
    router._gate = None

    async def main() -> None:
        async with Peer(router.endpoint) as peer:
            peer.channel.send([b"hello"])
            await asyncio.sleep(0)
            assert eventually(lambda: router.turned_away() or router.receive(20)) == 1

    try:
        asyncio.run(main())
    finally:
        router.close()
