"""Hundreds of thousands of calls through broker, workers and engines: does anything grow that should not? Memory,
descriptors, threads and tasks of every process, sampled when nothing runs.

    python -m benchmarks.soak [--calls N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zagent
from benchmarks.machine import machine
from benchmarks.procfs import Holdings, of_run, parent_of

#: Calls of one row: to its worker, and two to an engine.
CALLS_PER_ROW = 3
#: Memory may grow by this share after the first tenth; the rest not at all.
MEMORY_SHARE = 0.05
#: Samples over the whole run, and how many of them are one point: the median of a tenth. In single ones the broker has
#: up to 3 MB more, which it had needed for a moment; over 900 000 calls it stays at 47 MB.
SAMPLES = 100
WINDOW = 10
ANSWER_TOKENS = 32
OVERRIDES = (
    "model.path=tiny",
    "engine.kind=sim",
    "engine.sim.kv_capacity_tokens=65536",  # full long before the first tenth is over
    "rollout.agent=soak",
    "rollout.imports=[benchmarks.soak]",
    "rollout.prompt_length=128",
    "rollout.response_length=128",
)


@zagent.register("soak")
class TwoCalls(zagent.AgentLoopBase):
    """Two engine calls of one session; also says how many tasks its process has, and which that is."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> zagent.AgentLoopOutput:
        prompt = await self.apply_chat_template(row["raw_prompt"])
        ids: list[int] = []
        for _ in range(2):
            params = {**sampling_params, "max_new_tokens": ANSWER_TOKENS}
            ids += (await self.server_manager.generate(self.session, prompt + ids, params)).token_ids
        return zagent.AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=[1] * len(ids),
            response_logprobs=[0.0] * len(ids),
            num_turns=4,
            extra_fields={"tasks": len(asyncio.all_tasks()), "pid": os.getpid()},
        )


@dataclass(frozen=True)
class Sample:
    """What one process holds after so many calls; ``tasks`` where they can be counted."""

    calls: int
    memory: int
    descriptors: int
    threads: int
    tasks: int | None = None


@dataclass(frozen=True)
class Growth:
    """Of one process from the first tenth to the end: memory as a share, the others in numbers. Negative: it shrank."""

    name: str
    memory_mb: tuple[float, float]
    memory: float
    descriptors: int
    threads: int
    tasks: int | None

    @property
    def too_much(self) -> bool:
        return self.memory > MEMORY_SHARE or max(self.descriptors, self.threads, self.tasks or 0) > 0


def growth(name: str, samples: Sequence[Sample]) -> Growth:
    """Medians over a few samples are compared, right after the first tenth and at the end. Pure."""
    first = samples[len(samples) // 10 :][:WINDOW]
    last = samples[-WINDOW:]

    def middle(of: Sequence[Sample], field: str) -> float:
        return float(statistics.median_low([getattr(sample, field) for sample in of]))

    memory = middle(first, "memory"), middle(last, "memory")
    grown = {field: int(middle(last, field) - middle(first, field)) for field in ("descriptors", "threads")}
    counted = samples[0].tasks is not None
    tasks = int(middle(last, "tasks") - middle(first, "tasks")) if counted else None
    return Growth(name, (memory[0] / 1e6, memory[1] / 1e6), memory[1] / memory[0] - 1, **grown, tasks=tasks)


class Soak:
    """A cluster under steady load."""

    def __init__(self, manager: zagent.AgentLoopManager) -> None:
        self._manager = manager
        self._pids = _processes(manager.run_id)
        self.samples: dict[str, list[Sample]] = {name: [] for name in ("trainer", *self._pids)}
        self.calls = 0
        self._step = 0

    def work(self, rows: int) -> list[Mapping[str, Any]]:
        """Run a batch; `extra_fields` of each row. Raises `RolloutError` if a single row fails."""
        self._step += 1
        names = [f"{self._step}-{row}" for row in range(rows)]
        prompts = [[{"role": "user", "content": f"What of {name}?"}] for name in names]
        batch = zagent.DataProto(non_tensor_batch={"raw_prompt": prompts, "uid": names})
        columns = self._manager.generate_sequences(batch).non_tensor_batch
        self.calls += CALLS_PER_ROW * rows
        return [{"tasks": tasks, "pid": pid} for tasks, pid in zip(columns["tasks"], columns["pid"], strict=True)]

    def sample(self) -> None:
        """Ask the workers one by one, each alone with what it has to do, and look at everybody."""
        workers = sum(name.startswith("worker") for name in self._pids)
        rows = [row for _ in range(2 * workers) for row in self.work(1)]
        tasks = {int(row["pid"]): int(row["tasks"]) for row in rows}
        tasks[os.getpid()] = _own_tasks()
        for name, pid in {"trainer": os.getpid(), **self._pids}.items():
            held = Holdings.of(pid)
            self.samples[name].append(Sample(self.calls, held.memory, held.descriptors, held.threads, tasks.get(pid)))


def _processes(run_id: str) -> dict[str, int]:
    """Those that stay, by name."""
    time.sleep(1.0)  # a process of a moment may be among them
    found = {name: pid for pid, name in of_run(run_id).items() if name}
    launcher = parent_of(found["broker"])
    assert launcher is not None
    return {**dict(sorted(found.items())), "launcher": launcher}


def _own_tasks() -> int:
    """Unfinished tasks on any loop of this process; the manager has one of its own."""
    gc.collect()
    tasks = [
        thing for thing in gc.get_objects() if issubclass(type(thing), asyncio.Task)
    ]  # lazy modules have odd classes
    return sum(not task.done() for task in tasks)


def soak(calls: int, engines: int, workers: int, directory: Path) -> dict[str, list[Sample]]:
    """``calls`` calls, some more for the samples; by process. Raises `OSError` if a process is gone."""
    counts = (f"engine.count={engines}", f"worker.count={workers}", f"logs.dir={directory}")
    config = zagent.Config.load(overrides=[*OVERRIDES, *counts])
    with zagent.AgentLoopManager.launch(config) as manager:
        load = Soak(manager)
        for number in range(1, SAMPLES + 1):
            while load.calls < calls * number / SAMPLES:
                load.work(min(1000, -(-calls // (SAMPLES * CALLS_PER_ROW))))
            load.sample()
            if number % 10 == 0:
                print(f"{load.calls} calls", file=sys.stderr, flush=True)
        return load.samples


def table(found: Sequence[Growth]) -> str:
    """Markdown; memory after the first tenth and at the end, and what has been added of the rest in between."""
    lines = ["| process | memory MB | growth | descriptors | threads | tasks |", "|---|---|---|---|---|---|"]
    for one in found:
        memory = "{:.1f} → {:.1f}".format(*one.memory_mb)
        rest = " | ".join("" if n is None else f"{n:+d}" for n in (one.descriptors, one.threads, one.tasks))
        lines.append(f"| {one.name} | {memory} | {one.memory:+.1%} | {rest} |{' TOO MUCH' if one.too_much else ''}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; the exit status: 1 if something grows too much."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--calls", type=int, default=300_000, help="calls in all (300000)")
    parser.add_argument("--engines", type=int, default=2, help="(2)")
    parser.add_argument("--workers", type=int, default=2, help="(2)")
    parser.add_argument("--json", metavar="FILE", help="also write every sample there")
    options = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        samples = soak(options.calls, options.engines, options.workers, Path(directory))
    found = [growth(name, of_one) for name, of_one in samples.items()]
    print(table(found))
    print(f"\n{samples['trainer'][-1].calls} calls in {time.monotonic() - began:.0f} s. {machine()}.")
    if options.json:
        rows = {name: [asdict(sample) for sample in of_one] for name, of_one in samples.items()}
        Path(options.json).write_text(json.dumps(rows, indent=1))
    return int(any(one.too_much for one in found))


if __name__ == "__main__":
    sys.exit(main())
