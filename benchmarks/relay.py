"""What zagent costs between coroutine and engine: calls per second and latency of `AsyncLLMServerManager.generate` on
zero-latency simulated engines, against the same traffic on bare pyzmq sockets, in pairs in one run.

    python -m benchmarks.relay [--quick] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.processes import Failed, Process, Processes
from benchmarks.traffic import VOCABULARY, Case, Result, Round

CALLERS = 2
SERVERS = 2
IN_FLIGHT = 64
WAYS = ("zagent", "sockets")


@dataclass(frozen=True)
class Plan:
    """A case, and how many calls each caller makes in one round: about a second on two cores."""

    case: Case
    calls: int
    single: int  #: calls of the round with one call at a time


PLANS = (
    Plan(Case(1024, 128, as_lists=False), 6000, 600),
    Plan(Case(1024, 128, as_lists=True), 4000, 600),
    Plan(Case(8192, 1024, as_lists=False), 3000, 400),
    Plan(Case(8192, 1024, as_lists=True), 800, 400),
)


@dataclass(frozen=True)
class Measured:
    """One round of one way. Latencies in ms."""

    calls_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float  #: processor time of all processes per call; less shaken by neighbours than the clock


def measured(results: list[Result], served_s: float) -> Measured:
    """All callers' results of one round as one; ``served_s`` is the other processes' processor time.

    Raises:
        Failed: a reply was wrong.
    """
    wrong = sum(result.wrong for result in results)
    if wrong:
        raise Failed(f"{wrong} replies with a wrong token")
    latencies = np.concatenate([result.latencies for result in results]) * 1000
    seconds = max(result.end for result in results) - min(result.start for result in results)
    p50, p99 = (float(q) for q in np.percentile(latencies, (50, 99)))
    cpu = served_s + sum(result.cpu for result in results)
    return Measured(latencies.size / seconds, p50, p99, cpu / latencies.size * 1e6)


class Bench:
    """Both clusters, up and idle, and the callers that use one of them at a time."""

    def __init__(self, processes: Processes, directory: str) -> None:
        self._seed = 0
        bare = f"ipc://{directory}/bare"
        processes.start_ready([("relay", "benchmarks.bare_sockets:relay", {"endpoint": bare})])
        room = "benchmarks.processes:room"
        broker = {"entry": "zagent.broker.server:main", "settings": broker_settings(f"ipc://{directory}/broker")}
        (info,) = processes.start_ready([("broker", room, broker)])
        members: list[tuple[str, str, dict[str, Any]]] = []
        for index in range(SERVERS):
            settings = engine_settings(info["endpoint"], index, directory)
            members.append((f"engine-{index}", room, {"entry": "zagent.engine.server:main", "settings": settings}))
            members.append((f"server-{index}", "benchmarks.bare_sockets:serve", {"endpoint": bare, "name": str(index)}))
        processes.start_ready(members)
        ends = {"endpoint": info["endpoint"], "bare_endpoint": bare}
        self._servers = list(processes.started)
        self._callers = [processes.start(f"caller-{i}", "benchmarks.caller:main", ends) for i in range(CALLERS)]

    def pair(self, case: Case, calls: int, in_flight: int, callers: int, swap: bool) -> dict[str, Measured]:
        """One round each way, one after the other."""
        order = reversed(WAYS) if swap else WAYS
        return {way: self._round(way, case, calls, in_flight, self._callers[:callers]) for way in order}

    def _round(self, way: str, case: Case, calls: int, in_flight: int, callers: list[Process]) -> Measured:
        for caller in callers:
            self._seed += 1
            caller.send(Round(way, case, calls, in_flight, self._seed))
        for caller in callers:
            caller.receive()
        before = sum(process.cpu_s() for process in self._servers)
        for caller in callers:
            caller.send("go")
        results = [caller.receive() for caller in callers]
        return measured(results, sum(process.cpu_s() for process in self._servers) - before)


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


def engine_settings(endpoint: str, index: int, model: str) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "secret": "benchmark",
        "pool": "engine",
        "members": [{"name": f"engine-{index}", "index": index, "epoch": 1}],
        "credits": 512,
        "model": {"path": model},
        "engine": {"kind": "sim", "sim": {"vocab_size": VOCABULARY, "kv_capacity_tokens": 0}},
        "seed": 0,
        "nccl_port": 0,
        "port": 0,
    }


@dataclass(frozen=True)
class Row:
    """All pairs of one case: under load, and one call at a time."""

    case: Case
    loaded: list[dict[str, Measured]]
    single: list[dict[str, Measured]]

    def ratios(self) -> list[float]:
        """Calls per second of zagent over those of the sockets, pair by pair."""
        return [pair["zagent"].calls_per_s / pair["sockets"].calls_per_s for pair in self.loaded]

    def median(self, way: str, name: str, *, single: bool = False) -> float:
        pairs = self.single if single else self.loaded
        return float(statistics.median(getattr(pair[way], name) for pair in pairs))


def measure(bench: Bench, plans: list[Plan], repeats: int) -> list[Row]:
    """Every case ``repeats`` times, all cases once before any a second time."""
    rows = [Row(plan.case, [], []) for plan in plans]
    for repeat in range(repeats):
        for plan, row in zip(plans, rows, strict=True):
            print(f"pair {repeat + 1}/{repeats}: {plan.case}", file=sys.stderr)
            swap = repeat % 2 == 1
            row.loaded.append(bench.pair(plan.case, plan.calls, IN_FLIGHT, CALLERS, swap))
            row.single.append(bench.pair(plan.case, plan.single, 1, 1, swap))
    return rows


def table(rows: list[Row]) -> str:
    """Markdown. Medians over the pairs, zagent / sockets; of the ratio also the lowest and highest pair."""
    head = [
        "prompt/response",
        "calls/s",
        "ratio",
        "lowest–highest",
        "p50 ms",
        "p99 ms",
        "CPU µs a call",
        "single p50 ms",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    def both(name: str, form: str, *, single: bool = False) -> str:
        return " / ".join(format(row.median(way, name, single=single), form) for way in WAYS)

    ratios = row.ratios()
    return [
        str(row.case),
        both("calls_per_s", ",.0f"),
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}–{max(ratios):.2f}",
        both("p50_ms", ".1f"),
        both("p99_ms", ".1f"),
        both("cpu_us", ".0f"),
        both("p50_ms", ".2f", single=True),
    ]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls: does it run, not how fast")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="pairs of each case (5)")
    parser.add_argument("--json", metavar="FILE", help="also write every round's figures there")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name has TEXT in it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run and print."""
    options = _arguments(argv)
    part = 10 if options.quick else 1
    plans = [Plan(p.case, p.calls // part, p.single // part) for p in PLANS if options.only in str(p.case)]
    try:
        with tempfile.TemporaryDirectory(prefix="relay-") as directory, Processes() as processes:
            rows = measure(Bench(processes, directory), plans, options.repeats)
    except Failed as error:
        sys.exit(f"relay: {error}")
    command = shlex.join(["python", "-m", "benchmarks.relay", *(sys.argv[1:] if argv is None else argv)])
    print(table(rows))
    setting = f"{CALLERS} callers x {IN_FLIGHT} in flight, {SERVERS} engines"
    print(f"\nzagent / sockets; {setting}; medians of {options.repeats} pairs.")
    print(f"{machine()}. `{command}`")
    if options.json:
        report = {"machine": machine(), "command": command, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
