"""Clusters of simulated engines, a batch, and what became of it.

The peers differ in who chooses the engine, and in nothing else: same launcher, broker, workers, loop and engines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import zagent
from benchmarks.rollout.agent import NAME, Done
from benchmarks.rollout.bounds import Bound, Engines, bound
from benchmarks.rollout.timeline import Timeline, spans
from benchmarks.rollout.trace import Row, Turn, plain
from zagent.trainer.links import open_calls
from zagent.trainer.manager import check_failures
from zagent.trainer.rollout import ROW_FIELDS, WORKER_POOL, read_outcome
from zagent.trainer.rows import rows_of

WORKERS = 4
WARM_UP = Row(8, (Turn(1),))
#: Longest until they are all there.
WORKERS_S = 60.0
#: Who got which call, by the broker.
RECORD = "assignments.jsonl"
#: Two processes for eight engines: sleeping is most of what they do.
ENGINES_PER_PROCESS = 4
#: A session leaves its engine, and the cache there, for one with so many fewer calls: about what an engine of the first
#: case decodes at once. A call that waits its turn loses more than the prefill of all that it has.
REBIND = ("routing.rebind_over.abs=4", "routing.rebind_over.rel=1.2")


@dataclass(frozen=True)
class Peer:
    """Who chooses: ``way`` is the loop's (`agent.WAYS`); ``chunked``: rows are bound to workers beforehand."""

    way: str
    chunked: bool = False
    overrides: tuple[str, ...] = ()


PEERS = {
    "zagent": Peer("session", overrides=REBIND),
    "sticky": Peer("session"),
    "static": Peer("local", chunked=True),
    "least-requests": Peer("calls"),
    "random": Peer("random"),
}


@dataclass(frozen=True)
class Plan:
    """What is replayed on what. ``engines`` as in the trace's world; here they and the tools run ``speedup`` times as
    fast."""

    rows: Sequence[Row]
    engines: Engines
    speedup: float
    workers: int = WORKERS

    @property
    def running(self) -> Engines:
        """The engines as they run here."""
        there, faster = self.engines, self.speedup
        return replace(
            there,
            prefill_tokens_per_s=there.prefill_tokens_per_s * faster,
            decode_tokens_per_s=there.decode_tokens_per_s * faster,
        )

    @property
    def bound(self) -> Bound:
        """In s, as it runs here."""
        return Bound(*(seconds / self.speedup for seconds in bound(self.rows, self.engines)))

    @property
    def names(self) -> list[str]:
        """Of the engines."""
        return [f"engine-{index}" for index in range(self.engines.count)]


@dataclass(frozen=True)
class Result:
    """Of one peer. Times in s, as they ran here."""

    timeline: Timeline
    calls: list[Done]

    @property
    def sampled_tokens(self) -> int:
        return sum(call.new for call in self.calls)

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens."""
        return sum(call.cached for call in self.calls) / sum(call.prompt for call in self.calls)


class Clusters:
    """A context manager: one cluster for all peers that need the same one, launched when it is first used, closed at
    the end. They stay up beside one another, since an idle one costs nothing and a start costs seconds.

    ``plans`` are those that will run; they differ in their rows only.
    """

    def __init__(self, plans: Sequence[Plan], directory: Path) -> None:
        self._all = replace(plans[0], rows=[row for plan in plans for row in plan.rows])
        self._directory = directory
        self._running: dict[tuple[str, ...], tuple[zagent.AgentLoopManager, Path]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Clusters:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def run(self, plan: Plan, peer: Peer) -> Result:
        """Replay the plan's rows once, beginning with empty caches. Raises `RolloutError` if any row fails."""
        manager, record = self._cluster(peer.overrides)
        replay(manager, [WARM_UP] * 2 * plan.workers, plan, peer)  # imports, connections; torch, which collates
        manager.clear_kv_cache()
        began = time.monotonic()
        batch = replay(manager, plan.rows, plan, peer)
        makespan_s = time.monotonic() - began
        calls = [Done(*call) for row in batch.non_tensor_batch["calls"] for call in row]
        found = spans(calls, members_of(record), plan.running, began)
        return Result(Timeline(found, makespan_s), calls)

    def _cluster(self, overrides: tuple[str, ...]) -> tuple[zagent.AgentLoopManager, Path]:
        if overrides not in self._running:
            directory = self._directory / f"cluster-{len(self._running)}"
            directory.mkdir()
            manager = zagent.AgentLoopManager.launch(config_of(self._all, overrides, directory))
            self._running[overrides] = self._stack.enter_context(manager), directory / RECORD
            wait_for_workers(manager, self._all.workers)
        return self._running[overrides]


def wait_for_workers(manager: zagent.AgentLoopManager, count: int) -> None:
    """A cluster takes rows before all of its workers are there. Raises `TimeoutError`."""
    deadline = time.monotonic() + WORKERS_S
    while sum(worker["state"] == "ready" for worker in manager.status()["pools"]["worker"].values()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {count} workers are ready within {WORKERS_S:g} s")
        time.sleep(0.05)


def config_of(plan: Plan, more: Sequence[str], directory: Path) -> zagent.Config:
    """A cluster's, with logs and the broker's record in ``directory``; ``more`` are overrides that win."""
    engines = plan.running
    ours = (
        "model.path=tiny",
        "engine.kind=sim",
        f"engine.count={engines.count}",
        f"engine.sim.per_process={ENGINES_PER_PROCESS}",
        f"engine.sim.max_batch={engines.slots}",
        f"engine.sim.prefill_tokens_per_s={engines.prefill_tokens_per_s}",
        f"engine.sim.decode_tokens_per_s={engines.decode_tokens_per_s}",
        f"engine.max_in_flight={len(plan.rows)}",
        f"worker.count={plan.workers}",
        f"worker.max_in_flight={len(plan.rows)}",
        f"rollout.agent={NAME}",
        "rollout.imports=[benchmarks.rollout.agent]",
        f"rollout.prompt_length={max(row.prompt_tokens for row in plan.rows)}",
        f"rollout.response_length={max(row.response_tokens for row in plan.rows)}",
        f"logs.dir={directory / 'logs'}",
        f"routing.record={directory / RECORD}",
    )
    return zagent.Config.load(overrides=[*ours, *more])


def replay(manager: zagent.AgentLoopManager, rows: Sequence[Row], plan: Plan, peer: Peer) -> zagent.DataProto:
    """One batch, in input order: `generate_sequences`, or what does the same with chunks."""
    batch = batch_of(rows, plan, peer)
    return _chunked(manager, batch, plan.workers) if peer.chunked else manager.generate_sequences(batch)


def batch_of(rows: Sequence[Row], plan: Plan, peer: Peer) -> zagent.DataProto:
    """Rows for the loop; every one has tokens of its own."""
    columns: dict[str, list[Any]] = {
        "raw_prompt": [[{"role": "user", "content": ""}]] * len(rows),
        "trace": [plain(row) for row in rows],
        "content": list(range(len(rows))),
        "speedup": [plan.speedup] * len(rows),
        "way": [peer.way] * len(rows),
        "engines": [plan.names] * len(rows),
    }
    return zagent.DataProto(non_tensor_batch=columns)


def _chunked(manager: zagent.AgentLoopManager, batch: zagent.DataProto, workers: int) -> zagent.DataProto:
    """As verl does it: one contiguous chunk a worker, cut before anything runs; then collated as ever."""
    rows = rows_of(batch, manager.config.rollout)
    owners = [index for index, chunk in enumerate(np.array_split(range(len(rows)), workers)) for _ in chunk]

    async def all_rows() -> list[zagent.Outcome]:
        calls = await open_calls(manager.endpoint, timeout=10.0, patience_s=10.0)

        async def one(number: int) -> zagent.Outcome:
            row = {key: getattr(rows[number], key) for key in ROW_FIELDS}
            return read_outcome(
                rows[number], await calls.call(WORKER_POOL, "run", row, member=f"worker-{owners[number]}")
            )

        try:
            return await asyncio.gather(*map(one, range(len(rows))))
        finally:
            calls.link.close("the batch is over")

    outcomes = asyncio.run(all_rows())
    check_failures(outcomes, 0.0)
    widths = {key: getattr(manager.config.rollout, key) for key in ("prompt_length", "response_length")}
    return zagent.collate(outcomes, **widths, batch=batch)


def members_of(record: Path) -> dict[str, list[str]]:
    """Session -> the engines of its calls, in order, as the broker has written them down."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in record.read_text(encoding="utf-8").splitlines():
        assigned = json.loads(line)
        if assigned["pool"] == "engine":
            found[assigned["session"]].append(assigned["member"])
    return found
