"""Whole batches of `generate_sequences` on a trace with long-tailed lengths, on simulated engines: makespan against the
least that these engines could need, and against rows cut into one chunk per worker beforehand.

    python -m benchmarks.run --only rollout [--trace FILE]
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.rollout import cluster, trace
from benchmarks.rollout.bounds import Engines, bound, cached_share
from benchmarks.rollout.cluster import Clusters, Plan, Result
from benchmarks.rollout.shown import BOUND, TIMELINE, plots, table
from benchmarks.rollout.timeline import running, tail
from benchmarks.rollout.trace import Row
from benchmarks.suite import Figure, Options, Record

__all__ = ["NAME", "PEERS", "plots", "run", "table"]

NAME = "rollout"
PEERS = tuple(cluster.PEERS)
REPEATS = 3
ROWS, QUICK_ROWS = 1024, 100
ENGINES = 8
#: Seconds that the bound takes here: the trace's time is compressed to that. What is not compressed with it (messages,
#: start of the rows, padding into tensors) counts so many times more than it would in the trace's world.
QUICK_BOUND_S = 3.0
#: Points in time of the plot.
POINTS = 300


@dataclass(frozen=True)
class Case:
    """The trace's first rows, so many of them (1 / ``part``), on engines with so many slots each."""

    part: int
    slots: int
    bound_s: float
    peers: tuple[str, ...] = ("zagent", "static")

    def name(self, rows: int) -> str:
        return f"{rows} rows, {ENGINES} × {self.slots} slots"


#: Of the default trace: work fills the engines nearly to the end, and the longest row is a sixth of it; work and the
#: longest row are near each other; the longest row decides.
CASES = (Case(1, 4, 30.0, PEERS), Case(4, 4, 12.0), Case(4, 16, 12.0))


def run(options: Options, record: Record) -> None:
    """Every case, on a trace of its own each time; its peers in turn, on clusters that are up beside one another.

    Raises:
        RolloutError: a row failed.
        ValueError: a line of the user's trace is no row.
    """
    traces = traces_of(options)
    (options.out / TIMELINE).unlink(missing_ok=True)
    for case in CASES[:1] if options.quick else CASES:
        plans = planned(traces, case, QUICK_BOUND_S if options.quick else case.bound_s)
        with tempfile.TemporaryDirectory(prefix="rollout-") as directory, Clusters(plans, Path(directory)) as clusters:
            _run_case(case, plans, clusters, options, record)


def traces_of(options: Options) -> list[list[Row]]:
    """One for each repeat: another seed, or the user's rows again."""
    repeats = options.repeats or (1 if options.quick else REPEATS)
    count = QUICK_ROWS if options.quick else ROWS
    if options.trace is None:
        return [trace.generate(seed, count) for seed in range(repeats)]
    rows = trace.read(options.trace)
    return [rows[:QUICK_ROWS] if options.quick else rows] * repeats


def planned(traces: Sequence[Sequence[Row]], case: Case, bound_s: float) -> list[Plan]:
    """The case for each trace, as fast as makes the first one's bound ``bound_s``, but not slower than the trace."""
    engines = Engines(ENGINES, case.slots)
    rows = [rows[: max(1, len(rows) // case.part)] for rows in traces]
    speedup = max(1.0, bound(rows[0], engines).seconds / bound_s)
    return [Plan(some, engines, speedup) for some in rows]


def _run_case(case: Case, plans: Sequence[Plan], clusters: Clusters, options: Options, record: Record) -> None:
    peers = [peer for peer in case.peers if peer in options.peers]
    for repeat, plan in enumerate(plans):
        name, least_s = case.name(len(plan.rows)), plan.bound.seconds
        for fact in facts(plan):
            record(Figure(NAME, name, BOUND, repeat, *fact))
        for peer in reversed(peers) if repeat % 2 else peers:
            result = clusters.run(plan, cluster.PEERS[peer])
            print(f"{name}, {peer}: {result.timeline.makespan_s:.1f} s of {least_s:.1f}", file=sys.stderr)
            for fact in measured(result, plan):
                record(Figure(NAME, name, peer, repeat, *fact))
            if repeat == 0:
                write_timeline(options.out / TIMELINE, name, peer, result, plan)


def facts(plan: Plan) -> list[tuple[str, float, str]]:
    """What can be said without running anything: name, value, unit. Times as they run here."""
    least = plan.bound
    return [
        ("work_s", least.work_s, "s"),
        ("longest_s", least.longest_s, "s"),
        ("cached_share", cached_share(plan.rows), ""),
        ("speedup", plan.speedup, ""),
        ("rows", float(len(plan.rows)), ""),
        ("calls", float(sum(len(row.turns) for row in plan.rows)), ""),
    ]


def measured(result: Result, plan: Plan) -> list[tuple[str, float, str]]:
    """Name, value, unit. `tail_share` is of all slots over the whole makespan; `answered_s` is when the last engine
    call had its answer: what follows is the way back, and the padding."""
    makespan_s, least_s = result.timeline.makespan_s, plan.bound.seconds
    answered_s = max(span.end for span in result.timeline.spans)
    dry_s, idle_s = tail(result.timeline, plan.running)
    return [
        ("makespan_s", makespan_s, "s"),
        ("over_bound", makespan_s / least_s, ""),
        ("answered_s", answered_s, "s"),
        ("answered_over_bound", answered_s / least_s, ""),
        ("dry_s", dry_s, "s"),
        ("tail_idle_s", idle_s, "s"),
        ("tail_share", idle_s / (plan.engines.all_slots * makespan_s), ""),
        ("tokens_per_s", result.sampled_tokens / makespan_s, "1/s"),
        ("cached_share", result.cached_share, ""),
    ]


def write_timeline(file: Path, case: str, peer: str, result: Result, plan: Plan) -> None:
    """Append what each engine ran over time (`shown.TIMELINE`)."""
    times = np.linspace(0.0, result.timeline.makespan_s, POINTS)
    with file.open("a", newline="", encoding="utf-8") as target:
        rows = csv.writer(target)
        for engine in plan.names:
            counts = running(result.timeline, engine, times)
            rows.writerows([case, peer, engine, f"{at:.3f}", n] for at, n in zip(times, counts, strict=True))
