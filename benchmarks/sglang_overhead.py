"""One engine of SGLang's, asked in its own process, and through zagent from another: the same engine, in turn."""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.processes import Failed, Processes
from zagent.client.calls import Calls
from zagent.client.link import Link
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.types import TokenOutput
from zagent.wire.sockets import DealerChannel

SECRET = "sglang"
PROMPT, ANSWER = 256, 32
#: Longest start: 20 s where nobody else is at work. Then how often it is looked for, and its end waited for, in s.
START_S, LOOK_S, STOP_S = 600.0, 0.1, 10.0
#: Ids of the tiny model that are plain bytes.
IDS = range(3, 250)

#: Number of the call, prompt -> answer.
Ask = Callable[[int, np.ndarray], Awaitable[TokenOutput]]


@dataclass(frozen=True)
class Round:
    """``calls`` calls, ``in_flight`` at once, with prompts by ``seed``."""

    calls: int
    in_flight: int
    seed: int


@dataclass(frozen=True)
class Timed:
    """A round's tokens per second, and the median latency in ms."""

    tokens_per_s: float
    p50_ms: float


def parameters() -> dict[str, Any]:
    return {"max_new_tokens": ANSWER, "temperature": 1.0, "ignore_eos": True, "logprobs": True}


async def timed(round_: Round, ask: Ask) -> Timed:
    """All calls of a round. Raises `Failed` where an answer has another length or form."""
    prompts = np.random.default_rng(round_.seed).integers(IDS.start, IDS.stop, (round_.calls, PROMPT), np.int32)
    numbers, latencies, answers = iter(range(round_.calls)), [0.0] * round_.calls, [TokenOutput([])] * round_.calls

    async def lane() -> None:
        for number in numbers:
            began = time.monotonic()
            answers[number] = await ask(number, prompts[number])
            latencies[number] = time.monotonic() - began

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(round_.in_flight):
            group.create_task(lane())
    seconds = time.monotonic() - began
    for answer in answers:
        if len(answer.token_ids) != ANSWER or answer.log_probs is None or len(answer.log_probs) != ANSWER:
            raise Failed(f"an answer of {len(answer.token_ids)} tokens instead of {ANSWER}")
    return Timed(round_.calls * ANSWER / seconds, statistics.median(latencies) * 1000)


def engine(settings: dict[str, Any], line: Connection) -> None:
    """Entry point: an engine as a member of the pool, as zagent serves it, which also runs each `Round` received itself
    and answers with `Timed`, or a traceback. Says its pid first, and that it is ready later."""
    from zagent.engine.base import GenerateRequest
    from zagent.engine.server import build, serve

    # Threads wait by spinning: on cores that broker and caller use as well, one for each core is slower than one alone.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    line.send(os.getpid())
    (engine,) = build(settings)  # blocks, before the loop runs

    async def ask(seed: int, number: int, prompt: np.ndarray) -> TokenOutput:
        return await engine.generate(GenerateRequest(f"{seed:016x}{number:016x}", prompt, parameters()))

    async def run(round_: Round) -> None:
        try:
            line.send(await timed(round_, partial(ask, round_.seed)))
        except Exception:
            line.send(traceback.format_exc())

    def ready(info: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()
        loop.add_reader(line.fileno(), lambda: running.add(loop.create_task(run(line.recv()))))
        line.send("ready")

    asyncio.run(serve(settings, [engine], ready))


class Overhead:
    """Engine, broker and a caller. A context manager: when it is left, nothing of SGLang's is."""

    def __init__(self, processes: Processes, directory: str) -> None:
        broker = {
            "endpoint": f"ipc://{directory}/o",
            "secret": SECRET,
            "pools": ["engine"],
            "max_pending": 1000,
            "sticky_cache_size": 1000,
            "incarnation": 1,
            "info": {},
        }
        room = {"entry": "zagent.broker.server:main", "settings": broker}
        (info,) = processes.start_ready([("broker", "benchmarks.processes:room", room)])
        self._endpoint: str = info["endpoint"]
        self._engine = processes.start("engine", "benchmarks.sglang_overhead:engine", _settings(self._endpoint))
        self._pid: int = self._engine.receive()

    def __enter__(self) -> Overhead:
        try:
            self._wait_for_engine(time.monotonic() + START_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _wait_for_engine(self, deadline: float) -> None:
        while not self._engine.has_spoken() and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._engine.receive()

    def _end(self) -> None:
        """In order, then by force: a process of SGLang's that is left when its parent was killed stays for good."""
        import psutil  # SGLang brings it

        started = psutil.Process(self._pid).children(recursive=True) if psutil.pid_exists(self._pid) else []
        self._engine.terminate()
        self._engine.end(time.monotonic() + STOP_S)
        for process in started:
            if process.is_running():
                process.kill()
        psutil.wait_procs(started, STOP_S)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """On the loop that makes the calls."""
        link = Link(partial(DealerChannel, self._endpoint))
        self._manager = AsyncLLMServerManager(Calls(link))
        await link.open()
        try:
            yield
        finally:
            link.close()

    async def timed(self, peer: str, round_: Round) -> Timed:
        """One round by ``peer``. Raises `Failed`."""
        if peer == "zagent":
            return await timed(round_, partial(self._ask, round_.seed))
        self._engine.send(round_)
        found = await asyncio.to_thread(self._engine.receive)
        if not isinstance(found, Timed):
            raise Failed(f"the engine's own process: {found}")
        return found

    async def _ask(self, seed: int, number: int, prompt: np.ndarray) -> TokenOutput:
        return await self._manager.generate(f"{seed}-{number}", prompt, parameters())


def _settings(endpoint: str) -> dict[str, Any]:
    nccl_port, port = _free_ports(2)
    return {
        "endpoint": endpoint,
        "secret": SECRET,
        "pool": "engine",
        "members": [{"name": "engine-0", "index": 0, "epoch": 1}],
        "credits": 512,
        "model": {"path": "tiny"},
        "engine": {"kind": "sglang"},
        "seed": 0,
        "nccl_port": nccl_port,
        "port": port,
    }


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
