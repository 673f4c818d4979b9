"""What a call costs, in counts, which no neighbour on the machine changes: encodings, frames, wake-ups."""

from __future__ import annotations

import asyncio
import select
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.echo import PATIENCE_S, Echo, Peer
from support.processes import eventually
from support.virtual_clock import run
from zagent.broker import core, dispatch, leases
from zagent.client import calls, link, member
from zagent.wire import multipart
from zagent.wire.sockets import DealerChannel, RouterSocket

PROMPT = np.arange(10, 1034, dtype=np.int32)
PARAMS = {"max_new_tokens": 128, "temperature": 1.0, "logprobs": True}
#: Calls counted together, so that pulses and ticks do not matter.
CALLS = 100


def counted(monkeypatch: pytest.MonkeyPatch, *functions: tuple[ModuleType | type, str]) -> Counter[str]:
    """Counts this thread's calls of these functions from now on, by the end of their module's name and their own."""
    counts: Counter[str] = Counter()
    here = threading.get_ident()

    def spy(where: ModuleType | type, name: str) -> Callable[..., Any]:
        function = getattr(where, name)
        key = f"{where.__name__.rpartition('.')[2]}.{name}"

        def counting(*args: Any, **options: Any) -> Any:
            counts[key] += threading.get_ident() == here
            return function(*args, **options)

        return counting

    for where, name in functions:
        monkeypatch.setattr(where, name, spy(where, name))
    return counts


def test_a_call_is_encoded_and_decoded_once_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its two messages has one header and one body, made and read once; the broker reads the headers and makes
    nothing."""
    broker = [
        *((core, name) for name in ("encode_header", "encode_body", "decode_header")),
        *((module, name) for module in (dispatch, leases) for name in ("encode_header",)),
        (dispatch, "encode_body"),
    ]
    peers = [
        *((link, name) for name in ("encode_header", "decode_header")),
        *((module, name) for module in (calls, member) for name in ("encode_body", "decode_body")),
    ]

    async def main() -> Counter[str]:
        async with Cluster() as cluster:
            await cluster.engine()
            manager = await cluster.manager()
            await manager.generate("warm", PROMPT, PARAMS)
            counts = counted(monkeypatch, *broker, *peers)
            await asyncio.gather(*(manager.generate(f"s{i}", PROMPT, PARAMS) for i in range(CALLS)))
            return Counter(counts)

    assert run(main()) == {
        "core.decode_header": 2 * CALLS,
        "link.encode_header": 2 * CALLS,
        "link.decode_header": 2 * CALLS,
        "calls.encode_body": CALLS,
        "calls.decode_body": CALLS,
        "member.encode_body": CALLS,
        "member.decode_body": CALLS,
    }


@pytest.mark.parametrize(("prompt", "answer", "frames"), [(1024, 128, 4), (8192, 1024, 5), (8192, 2048, 7)])
def test_frames_of_a_call(prompt: int, answer: int, frames: int) -> None:
    """Two for each message, and one for each array of more than 4 KiB; each is one step at every socket it passes."""
    seen: Counter[str] = Counter()

    class Watched(Cluster):
        def _arrived(self, batch: list[Any]) -> None:
            seen["frames"] += sum(len(parts) for _, parts in batch)
            super()._arrived(batch)

    async def main() -> int:
        async with Watched() as cluster:
            await cluster.engine(context_length=32_768)
            manager = await cluster.manager()
            await manager.generate("warm", PROMPT, PARAMS)
            seen.clear()
            params = {**PARAMS, "max_new_tokens": answer, "ignore_eos": True}
            await asyncio.gather(
                *(manager.generate(f"s{i}", np.arange(prompt, dtype=np.int32), params) for i in range(CALLS))
            )
            return seen["frames"]

    assert run(main()) == frames * CALLS


def test_the_broker_hands_on_the_frames_that_it_got() -> None:
    """Not copies of them, and not one frame more."""
    arrived: list[Any] = []  # they are kept, so that no two have one id
    sent: list[Any] = []

    class Watched(Cluster):
        def _arrived(self, batch: list[Any]) -> None:
            arrived.extend(frames for _, frames in batch)
            super()._arrived(batch)

    async def main() -> tuple[list[Any], list[Any]]:
        async with Watched() as cluster:
            await cluster.engine()
            manager = await cluster.manager()
            await manager.generate("warm", PROMPT, PARAMS)
            send = cluster.router.send
            cluster.router.send = lambda to, frames: (sent.append(frames), send(to, frames))[1]  # type: ignore[method-assign]
            arrived.clear()
            await asyncio.gather(*(manager.generate(f"s{i}", PROMPT, PARAMS) for i in range(CALLS)))
            return list(arrived), list(sent)

    taken, given = run(main())
    assert len(taken) == len(given) == 2 * CALLS
    frames = {id(frame) for message in taken for frame in message}
    assert {id(frame) for message in given for frame in message} == frames


def test_what_one_turn_of_the_loop_sends_goes_out_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred messages: one look at the socket after the turn that sent them."""

    async def main() -> tuple[int, int]:
        async with Peer(f"ipc://{tmp_path}/b") as peer:
            await peer.ask(b"hello")
            counts = counted(monkeypatch, (DealerChannel, "_drain"), (multipart, "send"))
            for number in range(CALLS):
                peer.channel.send([b"%d" % number])
            await asyncio.sleep(0)
            return counts["DealerChannel._drain"], counts["multipart.send"]

    with Echo(f"ipc://{tmp_path}/b"):
        assert asyncio.run(main()) == (1, CALLS)


def test_who_sends_one_message_at_a_time_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is with libzmq before the turn of the loop ends; after a turn with many, they wait for its end once more."""

    async def main() -> list[int]:
        async with Peer(f"ipc://{tmp_path}/b") as peer:
            await peer.ask(b"hello")
            counts = counted(monkeypatch, (multipart, "send"))
            sent = []
            for burst in (1, 1, 5, 1):
                for _ in range(burst):
                    peer.channel.send([b"x"])
                sent.append(counts["multipart.send"])
                await asyncio.sleep(0)
            return sent

    with Echo(f"ipc://{tmp_path}/b"):
        assert asyncio.run(main()) == [1, 2, 3, 7]


def test_a_message_is_acted_upon_before_anybody_looks_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one look serves both for what came behind it and for arrivals whose edge the answer's sending has hidden."""
    router = RouterSocket(f"ipc://{tmp_path}/b")
    seen: list[str] = []

    def spy(name: str, what: str) -> None:
        function = getattr(multipart, name)
        monkeypatch.setattr(multipart, name, lambda *args: (seen.append(what), function(*args))[1])

    async def main() -> list[list[str]]:
        channel = DealerChannel(router.endpoint, b"d-peer")
        channel.open(lambda batch: channel.send([b"thanks"]), lambda: None)
        channel.send([b"hello"])
        await asyncio.sleep(0)
        eventually(lambda: router.receive(100))
        router.send(b"d-peer", [b"answer"])
        assert channel._socket is not None
        assert channel._socket.poll(PATIENCE_S * 1000)
        spy("send", "sent")
        spy("_get_option", "looked")
        channel._arrived()
        at_once = list(seen)
        await asyncio.sleep(0)
        channel.close()
        return [at_once, list(seen)]

    try:
        assert asyncio.run(main()) == [["sent"], ["sent", "looked"]]
    finally:
        router.close()


def test_the_broker_takes_one_look_for_a_message_that_it_has_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it waits: what the descriptor tells of then is taken and acted upon, without looking for more."""
    router = RouterSocket(f"ipc://{tmp_path}/b")

    async def main() -> tuple[list[Any], int]:
        async with Peer(router.endpoint) as peer:
            peer.channel.send([b"hello"])
            eventually(lambda: router.receive(100))
            fd = router._socket.fileno()

            def poll(timeout_ms: int) -> list[tuple[int, int]]:
                assert peer.channel._socket is not None
                peer.channel._socket.send(b"late")
                return [(ready, select.POLLIN) for ready in select.select([fd], [], [], PATIENCE_S)[0]]

            router._poll = SimpleNamespace(poll=poll)  # type: ignore[assignment]
            counts = counted(monkeypatch, (multipart, "_get_option"))
            return router.receive(100), counts["multipart._get_option"]

    try:
        assert asyncio.run(main()) == ([(b"d-peer", [b"late"])], 1)
    finally:
        router.close()
