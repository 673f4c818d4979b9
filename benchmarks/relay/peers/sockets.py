"""The yardstick: the same traffic on pyzmq sockets and nothing else.

DEALER (callers) — ROUTER (least-busy relay) — DEALER (servers). Frames: header and prompt in, header, ids and
log-probabilities out. Each process polls once, then takes all that has arrived.
"""

from __future__ import annotations

import gc
import os
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq

from benchmarks.processes import Processes
from benchmarks.relay.caller import freeze, warm_up
from benchmarks.relay.cluster import CallerProcesses, Shape
from benchmarks.relay.traffic import Case, Round, Timing, answer, prompts, sampling_params, wrong_replies
from zagent.wire.codec import encode_body, encode_header
from zagent.wire.messages import Call

FORMS = (False, True)
PACE = 1.0

#: No queue of the comparison ever fills.
HIGH_WATER = 200_000
#: Number of the call, tokens wanted; padded to the size of zagent's header and skeleton.
HEADER = struct.Struct("<II")
SERVER = b"s"


def start(processes: Processes, shape: Shape) -> CallerProcesses:
    """A relay, servers, callers."""
    endpoint = f"ipc://{shape.directory}/bare"
    processes.start_ready([("relay", f"{__name__}:relay", {"endpoint": endpoint})])
    settings = [{"endpoint": endpoint, "name": str(index)} for index in range(shape.servers)]
    processes.start_ready([(f"server-{i}", f"{__name__}:serve", one) for i, one in enumerate(settings)])
    return CallerProcesses(processes, shape.callers, {"caller": f"{__name__}:caller", "endpoint": endpoint})


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


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


class SocketCaller:
    """As `benchmarks.relay.caller.Caller`, but without an event loop: one DEALER, polled."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def prepare(self, round_: Round) -> None:
        """Make prompts, connect, warm up."""
        self._round = round_
        self._given = prompts(round_)
        self._padding = bytes(header_bytes(round_.case, round_.session(round_.calls)) - HEADER.size)
        self._socket = _socket(zmq.DEALER)
        self._socket.connect(self._endpoint)
        self._call_all(prompts(warm_up(round_)))
        freeze()

    def run(self) -> Timing:
        """All calls."""
        timing, self._replies = self._call_all(self._given)
        return timing

    def check(self) -> int:
        """Disconnect; how many replies were wrong."""
        self._socket.close()
        wrong = wrong_replies(self._round, self._given, self._replies)
        del self._given, self._replies
        gc.unfreeze()
        return wrong

    def _call_all(self, given: list[Any]) -> tuple[Timing, list[Any]]:
        """Timing, and the replies in the prompts' order."""
        total = len(given)
        sent, latencies, replies = [0.0] * total, [0.0] * total, [None] * total
        number = done = 0
        start, cpu = time.monotonic(), time.process_time()
        while number < min(self._round.in_flight, total):
            sent[number] = self._send(number, given[number])
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
                        sent[number] = self._send(number, given[number])
                        number += 1
            except zmq.Again:
                pass
        return Timing(start, time.monotonic(), time.process_time() - cpu, latencies, os.getpid()), replies

    def _send(self, number: int, prompt: Any) -> float:
        now = time.monotonic()
        header = HEADER.pack(number, self._round.case.response) + self._padding
        self._socket.send_multipart([header, np.asarray(prompt, np.int32).data], zmq.NOBLOCK)
        return now

    def _reply(self, ids: bytes, log_probs: bytes) -> Any:
        arrays = np.frombuffer(ids, np.int32), np.frombuffer(log_probs, np.float32)
        return tuple(array.tolist() for array in arrays) if self._round.case.as_lists else arrays


def header_bytes(case: Case, session: str) -> int:
    """Bytes of a call that are no token ids: zagent's header and the skeleton of its body."""
    header = encode_header(Call(bytes(16), 1, "engine", "generate", session, -1, "", 1))
    prompt = np.zeros(case.prompt, np.int32)
    body = encode_body([prompt, sampling_params(case), None, None])
    return len(header) + sum(memoryview(part).nbytes for part in body) - prompt.nbytes


def caller(settings: dict[str, Any]) -> SocketCaller:
    """Made in the caller's process."""
    return SocketCaller(settings["endpoint"])
