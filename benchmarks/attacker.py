"""A process that sends a broker what no honest peer would, over several connections, and reads no answers."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing.connection import Connection
from typing import Any

import zmq

from benchmarks.fuzz import Frames, Fuzz
from zagent import __version__
from zagent.wire.codec import encode_body, encode_header
from zagent.wire.messages import Hello

#: Connections, half of which say hello as callers, which everybody may.
PEERS = 8
#: Each of those says it again after so many messages, for what it said in between may have been goodbye.
HELLO_EVERY = 50
#: Connections of noise below the messages: one in so many messages.
NOISE_EVERY = 100
#: Connections of noise that are open at once.
NOISY = 50
#: Messages made beforehand where the rate counts, and sent again and again.
PREPARED = 10_000
#: At a rate, what is due is sent so often, in s.
BEAT_S = 0.01
#: A broker that takes nothing for so long, in ms, is none.
PATIENCE_MS = 30_000


@dataclass(frozen=True)
class Attack:
    """``count`` messages, ``rate`` of them a second (0: as fast as they are taken), or until the line says stop."""

    seed: int
    count: int
    rate: int = 0


@dataclass(frozen=True)
class Attacked:
    """What was done."""

    messages: int
    seconds: float


class Peer:
    """Two lanes of one name."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, seed: int, *, says_hello: bool) -> None:
        self.nonce = os.urandom(8)
        self._lanes = [self._lane(context, endpoint, name + self.nonce) for name in (b"d", b"c")]
        self._hello = [encode_header(Hello("", "", 0, 0, "", __version__)), *encode_body({})] if says_hello else None
        self._random = random.Random(seed)
        self._sent = 0

    @staticmethod
    def _lane(context: zmq.Context[Any], endpoint: str, name: bytes) -> zmq.Socket[Any]:
        lane = context.socket(zmq.DEALER)
        lane.setsockopt(zmq.IDENTITY, name)
        lane.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
        lane.connect(endpoint)
        return lane

    def send(self, frames: Frames) -> None:
        """On either lane. Raises `zmq.Again` where the broker takes nothing."""
        if self._hello is not None and self._sent % HELLO_EVERY == 0:
            for lane in self._lanes:
                lane.send_multipart(self._hello)
        self._sent += 1
        self._random.choice(self._lanes).send_multipart(frames)


class Noise:
    """Connections that say something else than ZMTP, or begin and do not go on; the oldest are closed."""

    def __init__(self, path: str, seed: int) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._open: list[socket.socket] = []

    def make(self) -> None:
        """One more."""
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        self._open.append(one)
        with suppress(OSError):
            one.connect(self._path)
            greeting = b"\xff" + bytes(8) + b"\x7f\3\1NULL" + bytes(48)
            one.send(self._random.choice([b"", greeting[:10], greeting, greeting + self._random.randbytes(100)]))
        if len(self._open) > NOISY:
            self._open.pop(0).close()

    def close(self) -> None:
        for one in self._open:
            one.close()


def main(settings: dict[str, Any], line: Connection) -> None:
    """Entry point. For each `Attack` received: prepares, says so, waits for the start, answers with an `Attacked`."""
    while True:
        attack = line.recv()
        context = zmq.Context()
        noise = Noise(settings["endpoint"].removeprefix("ipc://"), attack.seed)
        peers = [Peer(context, settings["endpoint"], i, says_hello=i % 2 == 0) for i in range(PEERS)]
        messages = _messages(attack, peers)
        line.send("prepared")
        line.recv()
        line.send(_attack(attack, messages, noise, line))
        noise.close()
        context.destroy(linger=PATIENCE_MS if attack.rate == 0 else 0)


def _messages(attack: Attack, peers: list[Peer]) -> Iterator[tuple[Peer, Frames]]:
    made = (
        (peer, fuzz.message())
        for peer, fuzz in cycle([(peer, Fuzz(attack.seed * PEERS + i, peer.nonce)) for i, peer in enumerate(peers)])
    )
    if attack.rate:
        made = cycle(list(islice(made, PREPARED)))
    return islice(made, attack.count)


def _attack(attack: Attack, messages: Iterator[tuple[Peer, Frames]], noise: Noise, line: Connection) -> Attacked:
    start, sent = time.monotonic(), 0
    for peer, frames in messages:
        peer.send(frames)
        sent += 1
        if sent % NOISE_EVERY == 0:
            noise.make()
        while attack.rate and sent > (time.monotonic() - start) * attack.rate:
            time.sleep(BEAT_S)
        if sent % NOISE_EVERY == 0 and line.poll():
            line.recv()
            break
    return Attacked(sent, time.monotonic() - start)
