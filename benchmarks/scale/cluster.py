"""The whole product at scale: a cluster of simulated engines, and batches of trajectories that are all in flight at
once, each waiting for its engine."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import zagent
from benchmarks.procfs import Holdings, of_run
from benchmarks.scale import agent, cpu
from benchmarks.scale.figures import GROUPS

#: Simulated engines of one process: about eight descriptors each, so that the usual limit of 1024 is enough.
PER_PROCESS = 64
WORKERS = 2
#: How often the cluster is looked at while rows start, in s.
LOOK_S = 0.25
#: Longest wait for the last member, and how long its start may go on, in s.
PATIENCE_S, SETTLE_S = 300.0, 2.0
#: Rows a second that start on any machine, before it is known how many do here.
FIRST_RATE = 100.0
#: How much longer an answer takes than all rows take to start, and the least it takes, in s.
MARGIN, LEAST_S = 2.0, 4
#: Tokens that a row may sample, hence seconds that an answer may take.
LONGEST_S = 1800


def config(engines: int, rows: int, logs: Path) -> zagent.Config:
    """A cluster of ``engines`` that takes ``rows`` trajectories at once."""
    return zagent.Config.load(
        overrides=[
            "model.path=tiny",
            "engine.kind=sim",
            f"engine.count={engines}",
            f"engine.sim.per_process={PER_PROCESS}",
            f"engine.sim.decode_tokens_per_s={agent.TOKENS_PER_S}",
            f"engine.sim.max_batch={max(256, rows)}",
            f"engine.max_in_flight={max(512, rows)}",
            f"worker.count={WORKERS}",
            f"worker.max_in_flight={max(1024, rows)}",
            f"routing.sticky_cache_size={max(10_000, rows)}",
            f"rollout.agent={agent.NAME}",
            f"rollout.imports=[{agent.__name__}]",
            "rollout.prompt_length=128",
            f"rollout.response_length={LONGEST_S}",
            f"logs.dir={logs}",
        ]
    )


def group_of(child: str) -> str:
    """The group of a process that zagent calls ``child``."""
    kinds = {"broker": "broker", "worker": "workers", "engine": "engines"}
    return kinds.get(child.partition("-")[0], "launcher")


def hold_s(rows: int, rate: float) -> int:
    """How long an answer must take so that all ``rows`` wait for theirs at once, where ``rate`` start a second."""
    return min(LONGEST_S, max(LEAST_S, math.ceil(MARGIN * rows / rate)))


@dataclass(frozen=True)
class Held:
    """What a cluster holds at a moment, by group: resident bytes and open descriptors."""

    memory: Counter[str]
    descriptors: Counter[str]


@dataclass(frozen=True)
class Flight:
    """One batch. Times in s from the first `next` on: until all rows waited for their engine at once (NaN if they never
    did), and until the last outcome; how long each answer took; processor time by group."""

    rows: int
    peak: int
    all_up_s: float
    total_s: float
    answer_s: int
    cpu_s: Counter[str]
    held: Held

    @property
    def beyond_s(self) -> float:
        """What it took longer than one answer."""
        return self.total_s - self.answer_s


class Fleet:
    """A cluster that is up; a context manager."""

    def __init__(self, engines: int, rows: int, logs: Path) -> None:
        began = time.monotonic()
        self._manager = zagent.AgentLoopManager.launch(config(engines, rows, logs))
        self.start_s = time.monotonic() - began
        self._rate = FIRST_RATE
        try:
            self._wait_for_all(engines)
        except BaseException:
            self._manager.close()
            raise
        self._groups = {os.getpid(): "trainer"}
        self._groups |= {pid: group_of(name) for pid, name in of_run(self._manager.run_id).items()}

    def _wait_for_all(self, engines: int) -> None:
        """A cluster serves before its last member is there. Raises `RuntimeError` where one does not come."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            pools = self._manager.status()["pools"]
            if [len(pools[pool]) for pool in ("engine", "worker")] == [engines, WORKERS]:
                return
            time.sleep(LOOK_S)
        raise RuntimeError(f"not all of {engines} engines and {WORKERS} workers are here after {PATIENCE_S:g} s")

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._manager.close()

    def held(self) -> Held:
        """Now."""
        found = Held(Counter(), Counter())
        for pid, group in self._groups.items():
            one = Holdings.of(pid)
            found.memory[group] += one.memory
            found.descriptors[group] += one.descriptors
        return found

    def cpu_s(self) -> Counter[str]:
        """So far, by group."""
        found: Counter[str] = Counter()
        for pid, group in self._groups.items():
            found[group] += cpu.whole(pid)  # type: ignore[assignment]
        return found

    def idle(self, seconds: float) -> dict[str, float]:
        """Cores that each group takes while nothing is asked of the cluster, over so long."""
        time.sleep(SETTLE_S)
        before = self.cpu_s()
        time.sleep(seconds)
        after = self.cpu_s()
        return {group: (after[group] - before[group]) / seconds for group in GROUPS}

    def fly(self, rows: int) -> Flight:
        """Run a batch of ``rows``. Raises `RuntimeError` where a row is not `ok`."""
        answer_s = hold_s(rows, self._rate)
        prompts = [[{"role": "user", "content": f"What of number {row}?"}] for row in range(rows)]
        batch = zagent.DataProto(non_tensor_batch={"raw_prompt": prompts, "seconds": [answer_s] * rows})
        gc.collect()
        before = self.cpu_s()
        with _Lookout(self, rows) as lookout:
            statuses = Counter(outcome.status for outcome in self._manager.stream(batch))
            total_s = lookout.elapsed_s
        if statuses != {"ok": rows}:
            raise RuntimeError(f"of {rows} rows only some are ok: {dict(statuses)}")
        spent = self.cpu_s()
        spent.subtract(before)
        if lookout.all_up_s > 4 * LOOK_S:  # else it says little
            self._rate = rows / lookout.all_up_s
        held = lookout.held or self.held()
        return Flight(rows, lookout.peak, lookout.all_up_s, total_s, answer_s, spent, held)

    def in_flight(self) -> int:
        """Calls at the engines, by the broker's count."""
        return sum(engine["in_flight"] for engine in self._manager.status()["pools"]["engine"].values())


@dataclass
class _Lookout:
    """Looks at a ``fleet`` from a thread of its own until all ``rows`` are in flight."""

    fleet: Fleet
    rows: int
    peak: int = 0
    all_up_s: float = math.nan
    held: Held | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def __enter__(self) -> _Lookout:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._look, name="lookout")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while self.held is None and not self._ended.wait(LOOK_S):
            now = self.fleet.in_flight()
            self.peak = max(self.peak, now)
            if now >= self.rows:
                self.all_up_s, self.held = self.elapsed_s, self.fleet.held()
