"""`start`'s Ray side, in a process of its own: the actors of verl's agent loop, without what verl's own import.

Two server actors and four worker actors, asynchronous, workers holding the servers' handles. They are empty where
verl's load torch, transformers and a tokenizer, and no dashboard is started: both in Ray's favour.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from benchmarks.resident import Resident, cpu_s, descendants
from benchmarks.start_plan import ENGINES, PROMPT, ROWS, WORKERS, Started, megabytes

#: The smallest object store that Ray takes without a word: nothing here is large enough to go there.
OBJECT_STORE_BYTES = 100 * 2**20
#: Longest any answer may take, in s.
PATIENCE_S = 100.0


class Server:
    """An engine's actor; answers at once."""

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> list[int]:
        return [token + 1 for token in prompt_ids[: sampling_params["max_new_tokens"]]]

    async def pid(self) -> int:
        return os.getpid()


class Worker:
    """A worker's actor: a row is one call to one of the servers."""

    def __init__(self, servers: list[Any]) -> None:
        self._servers = servers

    async def run(self, row: int) -> list[int]:
        server = self._servers[row % len(self._servers)]
        ids: list[int] = await server.generate.remote(PROMPT, {"max_new_tokens": 8}, str(row))
        return ids

    async def pid(self) -> int:
        return os.getpid()


def main(settings: Mapping[str, Any], line: Connection) -> None:
    """Entry point for `benchmarks.processes`: sends a `Started`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    line.send(start(settings["directory"]))


def start(directory: str) -> Started:
    """Initialize, ask, look, shut down. Raises whatever Ray raises."""
    before = time.monotonic()
    import ray

    began = time.monotonic()
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=directory,
    )
    try:
        ready = time.monotonic()
        servers: list[Any] = [ray.remote(num_cpus=0)(Server).remote() for _ in range(ENGINES)]
        workers: list[Any] = [ray.remote(num_cpus=0)(Worker).remote(servers) for _ in range(WORKERS)]
        ray.get(servers[0].generate.remote(PROMPT, {"max_new_tokens": 8}, "first"), timeout=PATIENCE_S)
        generated = time.monotonic()
        calls = [workers[row % WORKERS].run.remote(row) for row in range(ROWS)]
        ray.wait(calls, num_returns=1, timeout=PATIENCE_S)
        finished = time.monotonic()
        used = cpu_s([os.getpid(), *descendants(os.getpid())])
        if any(len(ids) != 8 for ids in ray.get(calls, timeout=PATIENCE_S)):
            raise RuntimeError("a row without its 8 tokens")
        pids = [ray.get([actor.pid.remote() for actor in actors], timeout=PATIENCE_S) for actors in (workers, servers)]
        memory = _memory(*pids)
    finally:
        ray.shutdown()
    times = {"import": began - before, "ready": ready - began, "cpu": used}
    return Started(times | {"first_generate": generated - began, "first_row": finished - began}, memory)


def _memory(workers: list[int], servers: list[int]) -> dict[str, float]:
    held: dict[int, Resident] = {}
    for pid in descendants(os.getpid()):
        try:
            held[pid] = Resident.of(pid)
        except OSError:  # a helper of a moment
            continue
    found: dict[str, float] = {}
    for room, pids in (("worker", workers), ("engine", servers)):
        found[f"{room}_rss"] = megabytes(median(held[pid].rss for pid in pids))
        found[f"{room}_pss"] = megabytes(median(held[pid].pss for pid in pids))
    rest = sum(one.pss for pid, one in held.items() if pid not in (*workers, *servers))
    total = sum(one.pss for one in held.values())
    return found | {"rest_pss": megabytes(rest), "total_pss": megabytes(total)}
