"""What strangers and liars do to a whole cluster: it is counted and refused, and whoever is honest is served."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zagent
from support.clusters import questions, sim_config, sim_overrides
from support.echo import Echo, Peer
from support.key_files import both
from support.processes import PATIENCE_S, Popen, eventually, with_run_id
from support.raw_peer import RawPeer, message
from zagent import __version__, errors
from zagent.wire.codec import decode_body, decode_header, encode_body, encode_header
from zagent.wire.endpoints import parse
from zagent.wire.messages import (
    BROKER,
    Abandoned,
    Call,
    Cancel,
    Exited,
    Failure,
    Health,
    Hello,
    HelloWanted,
    Message,
    Reply,
    Welcome,
)

#: Peers that say half a hello.
HALVES = 2000
#: Tokens of a call that runs for a while: at `SPEED` a second.
LONG, SPEED = 1000, 1000
#: Answers asked for by the peer that reads none.
UNREAD = 20_000


def said(what: Message, body: Any = None) -> bytes:
    return message([bytes(frame) for frame in (encode_header(what), *encode_body(body))])


class Caller:
    """An honest hello, which needs no secret; what follows is up to the test."""

    def __init__(self, endpoint: str, stack: ExitStack, hello: Hello | None = None) -> None:
        self.nonce = os.urandom(8)
        self.data, self.control = (
            stack.enter_context(RawPeer(endpoint)).shake_hands(lane + self.nonce) for lane in (b"d", b"c")
        )
        for lane in (self.data, self.control):
            lane.send(said(hello or Hello("", "", 0, 0, "", __version__), {}))

    def welcomed(self) -> Caller:
        assert type(self.answer(self.control)[0]) is Welcome
        return self

    def call(self, number: int, **fields: Any) -> Call:
        made = Call(self.nonce + number.to_bytes(8, "big"), 1, "engine", "stats")
        return made._replace(**fields)

    @staticmethod
    def answer(lane: RawPeer) -> tuple[Any, Any]:
        """The next message and its body; the broker's pulses are passed over."""
        while True:
            header, *body = lane.receive()
            found = decode_header(header)
            if type(found).__name__ != "Pulse":
                return found, decode_body(body) if body else None


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zagent.AgentLoopManager]:
    config = sim_config(tmp_path_factory.mktemp("shared"), f"engine.sim.decode_tokens_per_s={SPEED}")
    with zagent.AgentLoopManager.launch(config) as manager:
        yield manager


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def nobody_died(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test on the shared cluster its processes are the same, ready and idle, and rows are answered."""
    if "manager" not in request.fixturenames:
        yield
        return
    manager = request.getfixturevalue("manager")
    before = members(manager)
    yield
    assert {o.status for o in manager.stream(questions(20))} == {"ok"}
    eventually(lambda: members(manager) == before)
    assert manager.status()["incarnation"] == 1


def members(manager: zagent.AgentLoopManager) -> dict[str, tuple[Any, ...]]:
    pools = manager.status()["pools"]
    return {
        name: (m["state"], m["pid"], m["epoch"], m["in_flight"]) for pool in pools.values() for name, m in pool.items()
    }


def callers_left(manager: zagent.AgentLoopManager) -> int:
    """How many peers there are once those of former tests are forgotten: the members, the manager, the launcher."""
    count = len(members(manager)) + 2
    eventually(lambda: manager.status()["callers"] == count)
    return count


def counted(manager: zagent.AgentLoopManager, name: str) -> int:
    found: int = manager.status()["counters"][name]
    return found


@pytest.mark.parametrize("secret", ["", "guessed", "0" * 64])
@pytest.mark.parametrize("name", ["engine-0", "engine-7"])
def test_nobody_joins_without_the_secret(
    secret: str, name: str, manager: zagent.AgentLoopManager, stack: ExitStack
) -> None:
    """A member's hello, under a member's name or a new one, is answered with a refusal; there is no such member."""
    before = counted(manager, "refused")
    forger = Caller(manager.endpoint, stack, Hello("engine", name, 99, 512, secret, __version__))
    kind, error = forger.answer(forger.data)
    assert (type(kind), error["type"]) == (Failure, "ProtocolError")
    assert f"'{name}' may not join pool 'engine': wrong join secret" in error["message"]
    assert error["traceback"] == ""
    assert counted(manager, "refused") >= before + 1
    assert sorted(manager.status()["pools"]["engine"]) == ["engine-0", "engine-1"]


@pytest.mark.parametrize(
    "word",
    [
        Exited("engine", "engine-0", 1, "it is dead", True),
        Health("engine", "engine-0", 1, True),
        Abandoned("engine"),
        Hello("", "launcher", 0, 0, "guessed", __version__),
    ],
    ids=lambda word: type(word).__name__,
)
def test_nobody_speaks_for_the_launcher(word: Message, manager: zagent.AgentLoopManager, stack: ExitStack) -> None:
    """Who is dead or slow, or will not come back, is the launcher's to say; a caller of its name knows no more."""
    liar = Caller(manager.endpoint, stack).welcomed()
    liar.control.send(said(word, {}) + said(Exited("engine", "engine-0", 1, "it is dead")))
    found = [liar.answer(liar.control) for _ in range(2 if type(word) is not Hello else 1)]
    assert {type(kind) for kind, _ in found} <= {Failure, Welcome}
    if type(word) is not Hello:
        assert {body["type"] for _, body in found} == {"ProtocolError"}


def test_strangers_are_told_to_say_hello(manager: zagent.AgentLoopManager, stack: ExitStack) -> None:
    """What they said is counted, and not done."""
    before = counted(manager, "strangers")
    stranger = stack.enter_context(RawPeer(manager.endpoint)).shake_hands(b"d" + bytes(8))
    for what in (Call(bytes(16), 1, "engine", "stats"), Reply(bytes(16), 1), Cancel(bytes(16), 1)):
        stranger.send(said(what))
        assert decode_header(stranger.receive()[0]) == HelloWanted()
    assert counted(manager, "strangers") == before + 3


MALFORMED: dict[str, list[bytes]] = {
    "noise": [b"\xc1\xff\x00noise"],
    "nothing": [b""],
    "half a header": [encode_header(Call(bytes(16), 1, "engine", "stats"))[:-3]],
    "an unknown kind": [b"\x92\x01\x63"],
    "a header beyond the limit": [encode_header(Cancel(bytes(16), 1)) + bytes(70_000)],
    "lists in lists": [b"\x91" * 3000],
    "four billion entries": [b"\xdd\xff\xff\xff\xff"],
    "six thousand frames": [b"\xc0"] * 6000,
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("known", [False, True])
def test_what_is_no_message_is_counted(
    case: str, known: bool, manager: zagent.AgentLoopManager, stack: ExitStack
) -> None:
    """From strangers and from callers; the next thing they say is understood."""
    before = counted(manager, "malformed")
    peer = Caller(manager.endpoint, stack).welcomed()
    lane = peer.data if known else stack.enter_context(RawPeer(manager.endpoint)).shake_hands(b"d" + os.urandom(8))
    lane.send(message(MALFORMED[case]))
    eventually(lambda: counted(manager, "malformed") == before + 1)
    lane.send(said(peer.call(1)))
    assert type(peer.answer(lane)[0]) is (Reply if known else HelloWanted)


BODIES: dict[str, list[bytes]] = {
    "none": [],
    "noise": [b"\xc1\xff"],
    "lists in lists": [b"\x91" * 3000],
    "half a million maps": [b"\xdd\x00\x08\x00\x00" + b"\x80" * 0x80000],
    "four billion bytes": [b"\xc6\xff\xff\xff\xff"],
    "arrays that are not there": [b"\x91\xd6\x01\x93\x01\xa1b"],
    "five thousand frames": [b"\xc0"] * 5000,
}


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("pool", ["engine", "worker", BROKER])
def test_a_body_that_cannot_be_read_fails_its_own_call(
    case: str, pool: str, manager: zagent.AgentLoopManager, stack: ExitStack
) -> None:
    """Members look into them: each answers with an error, and goes on."""
    peer = Caller(manager.endpoint, stack).welcomed()
    method = {"engine": "generate", "worker": "run", BROKER: "status"}[pool]
    header = encode_header(peer.call(1, pool=pool, method=method))
    peer.data.send(message([header, *BODIES[case]]))
    kind, error = peer.answer(peer.data)
    assert type(kind) is Failure
    assert kind.call == peer.call(1).call
    assert error["type"] in ("DecodeError", "UnknownMethod")


def test_a_call_that_is_sent_again_is_answered_once(manager: zagent.AgentLoopManager, stack: ExitStack) -> None:
    """The same id and attempt while it runs."""
    peer = Caller(manager.endpoint, stack).welcomed()
    before = counted(manager, "replayed")
    argument = [np.arange(1, 50, dtype=np.int32), {"max_new_tokens": LONG, "ignore_eos": True}, None, None]
    peer.data.send(said(peer.call(1, method="generate"), argument) * 5)
    answer = peer.answer(peer.data)[0]
    assert answer == Reply(peer.call(1).call, 1, answer.number)
    peer.data.send(said(peer.call(2)))
    assert peer.answer(peer.data)[0].call == peer.call(2).call
    assert counted(manager, "replayed") == before + 4


def test_nobody_uses_anothers_ids(manager: zagent.AgentLoopManager, stack: ExitStack) -> None:
    """Neither to call nor to cancel: refused and counted, and the one whose id it is gets his answer."""
    peer, thief = (Caller(manager.endpoint, stack).welcomed() for _ in range(2))
    before = counted(manager, "refused")
    argument = [np.arange(1, 50, dtype=np.int32), {"max_new_tokens": LONG, "ignore_eos": True}, None, None]
    peer.data.send(said(peer.call(1, method="generate"), argument))
    thief.control.send(said(Cancel(peer.call(1).call, 1)))
    thief.data.send(said(peer.call(1)))
    assert thief.answer(thief.data)[1]["message"] == "a call's id begins with its caller's nonce"
    eventually(lambda: counted(manager, "refused") == before + 2)
    answer = peer.answer(peer.data)[0]
    assert answer == Reply(peer.call(1).call, 1, answer.number)


def test_half_a_hello_from_thousands(manager: zagent.AgentLoopManager, stack: ExitStack) -> None:
    """One lane, and never the other: they are no callers, and cost those who are nothing."""
    before = callers_left(manager)
    for _ in range(HALVES):
        with RawPeer(manager.endpoint).shake_hands(b"d" + os.urandom(8)) as half:
            half.send(said(Hello("", "", 0, 0, "", __version__), {}))
    whole = Caller(manager.endpoint, stack).welcomed()
    whole.data.send(said(whole.call(1)))
    assert type(whole.answer(whole.data)[0]) is Reply
    assert manager.status()["callers"] == before + 1


def test_a_peer_that_reads_nothing_holds_nobody_up(manager: zagent.AgentLoopManager, stack: ExitStack) -> None:
    """It asks and asks; the others' rows are answered meanwhile, and it is forgotten when it hangs up."""
    callers_left(manager)
    with ExitStack() as short:
        deaf = Caller(manager.endpoint, short).welcomed()
        for number in range(UNREAD):
            deaf.data.send(said(deaf.call(number, pool=BROKER, method="status")))
        assert {o.status for o in manager.stream(questions(20))} == {"ok"}
    callers_left(manager)


# ---- over TCP -------------------------------------------------------------------------------------------------------


def test_over_tcp_the_client_file_is_the_way_in(tmp_path: Path) -> None:
    """Made by the launcher, for its owner only. The endpoint names it; a copy does as well on another host; without it,
    or with another one, nobody answers, and that is counted."""
    overrides = sim_overrides(tmp_path, "broker.endpoint=tcp://127.0.0.1:0", f"broker.keys={tmp_path}/k")
    copy, other = tmp_path / "copy", both(tmp_path / "other")[0]
    with Popen([sys.executable, "-m", "zagent.launch", *overrides], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        endpoint = run.stdout.readline().split()[3]
        try:
            assert parse(endpoint).keys == f"{tmp_path}/k.client"
            assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
            shutil.copy(parse(endpoint).keys, copy)
            address = parse(endpoint).address
            for stranger in (address, f"{address}?keys={other}.client"):
                with pytest.raises(errors.ConnectionLost, match="no cluster at"):
                    zagent.AgentLoopManager.connect(stranger, timeout=1)
            with pytest.raises(errors.ConfigError, match=f"key file '{tmp_path}/none' cannot be read"):
                zagent.AgentLoopManager.connect(f"{address}?keys={tmp_path}/none")
            for way in (endpoint, f"{address}?keys={copy}"):
                with zagent.AgentLoopManager.connect(way) as manager:
                    assert {o.status for o in manager.stream(questions(20))} == {"ok"}
                    assert counted(manager, "turned_away") > 0
        finally:
            run.send_signal(signal.SIGINT)
        assert run.wait(20) == 0


def test_over_tcp_a_broker_that_was_killed_is_back_at_its_port(tmp_path: Path) -> None:
    """With its keys; nobody is told anything new."""
    config = sim_config(tmp_path, "broker.endpoint=tcp://127.0.0.1:0", f"broker.keys={tmp_path}/k")
    with zagent.AgentLoopManager.launch(config) as manager:
        (broker,) = (pid for pid in with_run_id(manager.run_id) if child_name(pid) == "broker")
        os.kill(broker, signal.SIGKILL)
        assert {o.status for o in manager.stream(questions(20))} == {"ok"}
        assert manager.status()["incarnation"] == 2


def child_name(pid: int) -> str:
    """What the launcher calls it."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries).get("ZAGENT_CHILD", "")


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Before anything is started; the message says what to do."""
    path, _ = both(tmp_path / "k")
    os.chmod(path, 0o644)
    overrides = sim_overrides(tmp_path, "broker.endpoint=tcp://127.0.0.1:0", f"broker.keys={path}")
    done = subprocess.run(
        [sys.executable, "-m", "zagent.launch", *overrides], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"zagent: broker.keys: key file '{path}' is open to others (mode 0644): chmod 600 it\n"


SERVING = """
import sys
from zagent.wire.sockets import RouterSocket
router = RouterSocket(sys.argv[1], sys.argv[2] or None)
print(router.endpoint, flush=True)
while True:
    for sender, frames in router.receive(100):
        router.send(sender, frames)
    router.turned_away()
"""


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_broker_without_files_to_open_lives(kind: str, tmp_path: Path) -> None:
    """More connections than it may have files, all of which say nothing: a peer that is there is served, and another
    one once they are gone."""
    endpoint = f"ipc://{tmp_path}/b" if kind == "ipc" else "tcp://127.0.0.1:0"
    command = ["bash", "-c", 'ulimit -n 800 && exec "$@"', "-", sys.executable, "-c", SERVING, endpoint, ""]

    async def main(broker: subprocess.Popen[str]) -> None:
        assert broker.stdout is not None
        endpoint = broker.stdout.readline().strip()
        async with Peer(endpoint) as peer:
            assert await peer.ask(b"before") == [b"before"]
            with ExitStack() as flood:
                for number in range(1000):
                    if number % 5 == 0:
                        await asyncio.sleep(0.001)  # 200 spare files are 40 ms then: enough for a turn of the broker's
                    with suppress(OSError):
                        flood.enter_context(RawPeer(endpoint))
                assert await peer.ask(b"beside") == [b"beside"]
            async with Peer(endpoint, b"d-new") as other:
                assert await other.ask(b"after") == [b"after"]
            assert peer.reconnections == 0

    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as broker:
        try:
            asyncio.run(main(broker))
            assert broker.poll() is None
        finally:
            broker.kill()


@pytest.mark.parametrize("kind", ["ipc", "tcp", "curve"])
def test_an_endpoint_can_be_bound_again_right_after_kill_9(kind: str, tmp_path: Path) -> None:
    """The file is still there, and the port had connections; whoever had one speaks with the next broker."""
    keys = both(tmp_path / "k")[0] if kind == "curve" else ""
    endpoint = f"ipc://{tmp_path}/b" if kind == "ipc" else "tcp://127.0.0.1:0"
    command = [sys.executable, "-c", SERVING, endpoint, keys]

    async def main(broker: subprocess.Popen[str]) -> None:
        assert broker.stdout is not None
        endpoint = broker.stdout.readline().strip()
        async with Peer(endpoint) as peer:
            assert await peer.ask(b"hello") == [b"hello"]
            broker.kill()
            broker.wait()
            with Echo(endpoint, keys or None) as again:
                assert again.endpoint == endpoint
                await asyncio.wait_for(peer.reconnected.wait(), PATIENCE_S)
                assert await peer.ask(b"again") == [b"again"]

    with Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            asyncio.run(main(broker))
        finally:
            broker.kill()
