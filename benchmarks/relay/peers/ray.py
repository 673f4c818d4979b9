"""What both Ray peers share: a cluster of its own on this host, asyncio actors as servers and as callers.

The driver is a process of ours, whose end is Ray's: raylet and GCS die with it, and workers with the raylet.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.processes import Failed, Process, Processes
from benchmarks.relay.caller import Caller, Client
from benchmarks.relay.cluster import Shape
from benchmarks.relay.traffic import Case, Round, Timing, answer, list_answer

#: Lists are what verl sends; arrays (numpy, int32) are what Ray could be sent.
FORMS = (False, True)
#: More calls at a server than all callers have in flight; Ray's own limit is 1000.
MAX_CONCURRENCY = 2000
#: Nothing but prompts of 100 KB and more goes there.
OBJECT_STORE_BYTES = 256 * 1024 * 1024
#: Ray gives its own start 30 s, which no setting changes; a machine that is busy with other things may need more.
TRIES = 3
TOO_SLOW = "timed out during startup"


class RayCallers:
    """Actors, reached through the driver."""

    def __init__(self, driver: Process) -> None:
        self._driver = driver

    def each(self, step: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        self._driver.send((step, arguments))
        answers: list[Any] = self._driver.receive()
        return answers


def start(processes: Processes, shape: Shape, peer: str) -> RayCallers:
    """Ray, servers, callers; ``peer`` is the module that has `shared` and `Client`."""
    for attempt in range(TRIES):
        driver = processes.start(f"ray-{attempt}", f"{__name__}:drive", {"peer": peer, "shape": shape})
        try:
            driver.receive()
            break
        except Failed as error:
            if TOO_SLOW not in str(error) or attempt == TRIES - 1:
                raise
    return RayCallers(driver)


class Server:
    """An engine's actor."""

    async def generate(self, request_id: str, prompt_ids: Any, sampling_params: dict[str, Any]) -> tuple[Any, Any]:
        """Ids and log-probabilities, in the prompt's form; verl wraps them in a pydantic model, which costs more."""
        rule = list_answer if isinstance(prompt_ids, list) else answer
        ids, log_probs = rule(prompt_ids, sampling_params["max_new_tokens"])
        return ids, log_probs


class Worker:
    """A caller's actor, as verl's AgentLoopWorker: its own `Caller`."""

    def __init__(self, peer: str, servers: list[Any], shared: Any) -> None:
        module = importlib.import_module(peer)

        def connect(case: Case) -> Client:
            client: Client = module.Client(servers, shared, case)
            return client

        self._caller = Caller(connect)

    async def prepare(self, round_: Round) -> None:
        await self._caller.prepare(round_)

    async def run(self) -> Timing:
        return await self._caller.run()

    async def check(self) -> int:
        return await self._caller.check()


def drive(settings: dict[str, Any], line: Connection) -> None:
    """Entry point of the driver: says that all is up, then answers each (step, arguments by caller)."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # what Ray will do; unset, it says so each time
    import ray

    shape: Shape = settings["shape"]
    ray.init(
        address="local",
        num_cpus=1,  # how many workers it starts in advance; actors ask for none
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=f"{shape.directory}/ray",
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())  # Ray's own handler prints a stack
    try:
        workers = _actors(ray, settings["peer"], shape)
        line.send("ready")
        while True:
            step, arguments = line.recv()
            busy = zip(workers, arguments, strict=False)
            line.send(ray.get([getattr(worker, step).remote(*given) for worker, given in busy]))
    finally:
        ray.shutdown()


def _actors(ray: Any, peer: str, shape: Shape) -> list[Any]:
    options = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}
    server, worker = (ray.remote(**options)(kind) for kind in (Server, Worker))
    servers = [server.remote() for _ in range(shape.servers)]
    shared = importlib.import_module(peer).shared(ray, shape.servers)
    workers = [worker.remote(peer, servers, shared) for _ in range(shape.callers)]
    ray.get([actor.__ray_ready__.remote() for actor in (*servers, *workers)])
    return workers
