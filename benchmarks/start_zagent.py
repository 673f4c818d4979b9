"""`start`'s zagent side, in a process of its own: a cluster, its first call, its first rows, and what it holds."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from benchmarks.procfs import of_run
from benchmarks.resident import Resident, cpu_s
from benchmarks.start_plan import ENGINES, PROMPT, ROWS, WORKERS, Started, megabytes

OVERRIDES = (
    *("model.path=tiny", "engine.kind=sim", f"engine.count={ENGINES}", f"worker.count={WORKERS}"),
    *("rollout.prompt_length=128", "rollout.response_length=128"),
)


def main(settings: Mapping[str, Any], line: Connection) -> None:
    """Entry point for `benchmarks.processes`: sends a `Started`."""
    line.send(start(settings["directory"]))


def start(directory: str) -> Started:
    """Launch, ask, look, close. Raises whatever zagent raises."""
    before = time.monotonic()
    import zagent

    config = zagent.Config.load(overrides=[*OVERRIDES, f"logs.dir={directory}"])
    launched = time.monotonic()
    with zagent.AgentLoopManager.launch(config) as manager:
        ready = time.monotonic()
        asyncio.run(_generate(manager))
        generated = time.monotonic()
        rows = manager.stream(_batch(ROWS))
        outcomes = [next(rows)]
        finished = time.monotonic()
        used = cpu_s([os.getpid(), *of_run(manager.run_id)])
        outcomes += rows  # each worker has worked by then: its lazy imports are part of what it holds
        bad = [outcome for outcome in outcomes if outcome.status != "ok"]
        if bad or len(outcomes) != ROWS:
            raise RuntimeError(f"{len(outcomes)} of {ROWS} rows came back, {len(bad)} of them failed: {bad[:1]}")
        memory = _memory(manager.run_id)
    times = {"import": launched - before, "ready": ready - launched, "cpu": used}
    return Started(times | {"first_generate": generated - launched, "first_row": finished - launched}, memory)


async def _generate(manager: Any) -> None:
    answer = await manager.server_manager.generate("first", PROMPT, {"max_new_tokens": 8, "temperature": 1.0})
    if len(answer.token_ids) != 8:
        raise RuntimeError(f"asked for 8 tokens, got {len(answer.token_ids)}")


def _batch(rows: int) -> Any:
    import zagent

    prompts = [[{"role": "user", "content": f"What is {row} + {row}?"}] for row in range(rows)]
    return zagent.DataProto(non_tensor_batch={"raw_prompt": prompts})


def _memory(run_id: str) -> dict[str, float]:
    rooms: dict[str, list[Resident]] = {}
    for pid, name in of_run(run_id).items():  # this process, the trainer's, is not among them
        try:
            rooms.setdefault(name.partition("-")[0] or "launcher", []).append(Resident.of(pid))
        except OSError:  # a helper of a moment
            continue
    found: dict[str, float] = {}
    for room in ("worker", "engine", "broker", "launcher"):
        found[f"{room}_rss"] = megabytes(median(held.rss for held in rooms[room]))
        found[f"{room}_pss"] = megabytes(median(held.pss for held in rooms[room]))
    return found | {"total_pss": megabytes(sum(held.pss for room in rooms.values() for held in room))}
