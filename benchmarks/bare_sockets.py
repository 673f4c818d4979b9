"""The yardstick: the same traffic on pyzmq sockets and nothing else.

DEALER (callers) — ROUTER (least-busy relay) — DEALER (servers). Frames: header and prompt in, header, ids and
log-probabilities out. Each process polls once, then takes all that has arrived.
"""

from __future__ import annotations

import struct
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from benchmarks.traffic import Result, Round, header_bytes

#: No queue of the comparison ever fills.
HIGH_WATER = 200_000
#: Number of the call, tokens wanted; padded to the size of zagent's header and skeleton.
HEADER = struct.Struct("<II")
SERVER = b"s"


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def answer(prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The servers' rule: each id of the prompt's beginning plus one, and minus that as log-probability."""
    ids = prompt[:count] + np.int32(1)
    return ids, np.negative(ids, dtype=np.float32)


def relay(settings: dict[str, Any], line: Connection) -> None:
    """Entry point. A server says hello; a call goes to the server with the fewest in flight; an answer carries its
    caller's identity."""
    socket = _socket(zmq.ROUTER)
    socket.bind(settings["endpoint"])
    line.send({})
    busy: dict[bytes, int] = {}
    while True:
        socket.poll()
        try:
            while True:
                sender, *frames = socket.recv_multipart(zmq.NOBLOCK)
                if sender[:1] != SERVER:
                    server = min(busy, key=busy.__getitem__)
                    busy[server] += 1
                    socket.send_multipart([server, sender, *frames], zmq.NOBLOCK)
                elif len(frames) == 1:
                    busy[sender] = 0
                else:
                    busy[sender] -= 1
                    socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            pass


def serve(settings: dict[str, Any], line: Connection) -> None:
    """Entry point."""
    socket = _socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, SERVER + settings["name"].encode())
    socket.connect(settings["endpoint"])
    socket.send(b"hello")
    line.send({})
    while True:
        socket.poll()
        try:
            while True:
                caller, header, prompt = socket.recv_multipart(zmq.NOBLOCK)
                _, count = HEADER.unpack_from(header)
                ids, log_probs = answer(np.frombuffer(prompt, np.int32), count)
                socket.send_multipart([caller, header, ids.data, log_probs.data], zmq.NOBLOCK)
        except zmq.Again:
            pass


class Caller:
    """Keeps ``in_flight`` calls under way over one DEALER."""

    def __init__(self, endpoint: str, round_: Round) -> None:
        self._round = round_
        self._padding = bytes(header_bytes(round_.case, f"session-{round_.seed}-{round_.calls}") - HEADER.size)
        self._socket = _socket(zmq.DEALER)
        self._socket.connect(endpoint)

    def run(self, prompts: list[Any]) -> tuple[Result, list[Any]]:
        """All calls; timings, and the replies in the prompts' order."""
        total = len(prompts)
        sent, latencies, replies = [0.0] * total, [0.0] * total, [None] * total
        number = done = 0
        start, cpu = time.monotonic(), time.process_time()
        while number < min(self._round.in_flight, total):
            sent[number] = self._send(number, prompts[number])
            number += 1
        while done < total:
            self._socket.poll()
            try:
                while True:
                    header, ids, log_probs = self._socket.recv_multipart(zmq.NOBLOCK)
                    which, _ = HEADER.unpack_from(header)
                    replies[which] = self._reply(ids, log_probs)
                    latencies[which] = time.monotonic() - sent[which]
                    done += 1
                    if number < total:
                        sent[number] = self._send(number, prompts[number])
                        number += 1
            except zmq.Again:
                pass
        return Result(start, time.monotonic(), time.process_time() - cpu, latencies), replies

    def _send(self, number: int, prompt: Any) -> float:
        now = time.monotonic()
        header = HEADER.pack(number, self._round.case.response) + self._padding
        self._socket.send_multipart([header, np.asarray(prompt, np.int32).data], zmq.NOBLOCK)
        return now

    def _reply(self, ids: bytes, log_probs: bytes) -> Any:
        arrays = np.frombuffer(ids, np.int32), np.frombuffer(log_probs, np.float32)
        return tuple(array.tolist() for array in arrays) if self._round.case.as_lists else arrays

    def close(self) -> None:
        self._socket.close()
