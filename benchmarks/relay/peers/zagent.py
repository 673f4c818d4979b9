"""zagent: `AsyncLLMServerManager.generate` → broker process → `EngineServer` around an engine without latency."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

from benchmarks.processes import Processes
from benchmarks.relay.caller import Caller
from benchmarks.relay.cluster import CallerProcesses, Shape
from benchmarks.relay.traffic import Case, sampling_params
from launcher.quick import COLLECTED
from zagent.client.calls import Calls
from zagent.client.link import Link
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.wire.sockets import DealerChannel

FORMS = (False, True)
PACE = 1.0
ROOM = "benchmarks.processes:room"


def start(processes: Processes, shape: Shape) -> CallerProcesses:
    """A broker, engines, callers."""
    return callers(processes, shape.callers, start_servers(processes, shape))


def start_servers(processes: Processes, shape: Shape) -> str:
    """A broker and engines; the broker's endpoint."""
    settings = broker_settings(f"ipc://{shape.directory}/broker")
    (info,) = processes.start_ready([("broker", ROOM, {"entry": "zagent.broker.server:main", "settings": settings})])
    endpoint: str = info["endpoint"]
    rooms = [
        {"entry": "benchmarks.relay.echo:main", "settings": engine_settings(endpoint, index)}
        for index in range(shape.servers)
    ]
    processes.start_ready([(f"engine-{index}", ROOM, room) for index, room in enumerate(rooms)])
    return endpoint


def callers(processes: Processes, number: int, endpoint: str) -> CallerProcesses:
    """Caller processes of a broker that runs."""
    settings = {"caller": "benchmarks.relay.peers.zagent:caller", "endpoint": endpoint}
    return CallerProcesses(processes, number, settings)


def broker_settings(endpoint: str) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "secret": "benchmark",
        "pools": ["engine", "worker"],
        "max_pending": 100_000,
        "sticky_cache_size": 10_000,
        "incarnation": 1,
        "info": {},
    }


def engine_settings(endpoint: str, index: int) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "secret": "benchmark",
        "pool": "engine",
        "members": [{"name": f"engine-{index}", "index": index, "epoch": 1}],
        "credits": 512,
        "engine": {},
    }


class Client:
    """A worker's: a link to the broker, and the manager that loops are given."""

    def __init__(self, endpoint: str, case: Case) -> None:
        self._connect = partial(DealerChannel, endpoint)
        self._params = sampling_params(case)

    async def open(self) -> None:
        self._link = Link(self._connect)
        self._manager = AsyncLLMServerManager(Calls(self._link))
        await self._link.open()

    async def generate(self, session: str, prompt: Any) -> tuple[Any, Any]:
        output = await self._manager.generate(session, prompt, self._params)
        return output.token_ids, output.log_probs

    async def close(self) -> None:
        self._link.close()


def caller(settings: dict[str, Any]) -> Caller:
    """Made in the caller's process, which collects garbage as a worker's does."""
    gc.set_threshold(*COLLECTED)
    return Caller(partial(Client, settings["endpoint"]))
