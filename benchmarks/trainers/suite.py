"""Trainers on a trace with long-tailed lengths, on simulated engines: how long a step takes, and how busy the engines
are, for one that waits for its batches, one that is a step ahead, and a fully asynchronous one. The engines get weights
at each step.

    python -m benchmarks.run --only trainers [--trace FILE]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import zagent
from benchmarks.drawing import drawing
from benchmarks.rollout import trace
from benchmarks.rollout.agent import Done
from benchmarks.rollout.bounds import Engines, bound
from benchmarks.rollout.cluster import REBIND, Plan, config_of, wait_for_workers
from benchmarks.rollout.trace import Row
from benchmarks.suite import Figure, Options, Record, markdown, median, peers, ratios, spread
from benchmarks.trainers.agent import NAME as AGENT
from benchmarks.trainers.loops import LOOPS, Trained, Work
from zagent.models import PACKAGED

NAME = "trainers"
#: The first is the fully asynchronous one.
PEERS = tuple(LOOPS)
REPEATS = 3
ENGINES, SLOTS = 4, 4
GROUPS, SAMPLES = 16, 8
#: In which the fully asynchronous trainer takes them: verl's `trigger_parameter_sync_step`.
PARTS = 4
STEPS, QUICK_STEPS = 12, 3
#: Seconds in which these engines could generate a batch at best; the trace's time is compressed to that.
BATCH_S, QUICK_BATCH_S = 4.0, 1.0
#: Training takes this part of it: generation is what one waits for.
TRAIN_PART = 0.8


def run(options: Options, record: Record) -> None:
    """Each trainer on the same prompts, on a cluster of its own."""
    for repeat in range(options.repeats or (1 if options.quick else REPEATS)):
        plan = planned(repeat, options)
        least_s = plan.bound.work_s
        work = work_of(plan, BATCH_S if not options.quick else QUICK_BATCH_S)
        for peer in PEERS if repeat % 2 == 0 else reversed(PEERS):
            if peer not in options.peers:
                continue
            seen = train(peer, plan, work)
            for name, value, unit in measured(seen, plan, work):
                record(Figure(NAME, case_of(work), peer, repeat, name, value, unit))
            print(f"{peer}: {seen.ended - seen.began:.1f} s, of generation alone {least_s:.1f}", file=sys.stderr)


def planned(repeat: int, options: Options) -> Plan:
    """Rows for all steps, as fast as makes a batch take `BATCH_S` of the engines' time."""
    steps, batch_s = (QUICK_STEPS, QUICK_BATCH_S) if options.quick else (STEPS, BATCH_S)
    count = steps * GROUPS * SAMPLES
    rows = trace.generate(repeat, count) if options.trace is None else repeated(trace.read(options.trace), count)
    engines = Engines(ENGINES, SLOTS)
    return Plan(rows, engines, max(1.0, bound(rows, engines).work_s / (steps * batch_s)), workers=2)


def repeated(rows: Sequence[Row], count: int) -> list[Row]:
    """The first ``count`` of them, from the beginning again where there are fewer."""
    return [rows[i % len(rows)] for i in range(count)]


def work_of(plan: Plan, batch_s: float, samples: int = SAMPLES) -> Work:
    """`GROUPS` prompts a batch; the samples of each are rows of the trace that follow each other."""
    prompts = [
        zagent.DataProto(
            non_tensor_batch={
                "raw_prompt": [[{"role": "user", "content": ""}]],
                "traces": [[trace.plain(row) for row in plan.rows[start : start + samples]]],
                "content": [start],
                "speedup": [plan.speedup],
                "way": ["session"],
                "engines": [plan.names],
            }
        )
        for start in range(0, len(plan.rows), samples)
    ]
    return Work(prompts, samples, GROUPS, PARTS, TRAIN_PART * batch_s, PACKAGED["tiny"])


def train(peer: str, plan: Plan, work: Work) -> Trained:
    """From a cluster that has just started."""
    torch.zeros(1)  # what collates is loaded before the first batch
    with (
        tempfile.TemporaryDirectory(prefix="trainers-") as directory,
        zagent.AgentLoopManager.launch(config(plan, Path(directory))) as manager,
    ):
        wait_for_workers(manager, plan.workers)
        return LOOPS[peer](manager, work)


def config(plan: Plan, directory: Path) -> zagent.Config:
    """Of the clusters; with logs in ``directory``."""
    overrides = (*REBIND, f"rollout.agent={AGENT}", "rollout.imports=[benchmarks.trainers.agent]")
    return config_of(plan, overrides, directory)


def measured(seen: Trained, plan: Plan, work: Work) -> list[tuple[str, float, str]]:
    """Name, value, unit."""
    return [
        ("step_s", (seen.ended - seen.began) / work.steps, "s"),
        ("busy_share", busy_share(seen.rows, plan.running, seen.began), ""),
        ("trainer_idle_share", seen.waited_s / (seen.ended - seen.began), ""),
        ("hidden_share", seen.hidden_share, ""),
        ("max_staleness", float(seen.staleness), ""),
        ("staleness_bound", float(seen.bound), ""),
    ]


def busy_share(rows: Sequence[Sequence[Done]], engines: Engines, began: float) -> float:
    """Of all slots, from ``began`` until the last row begins: after that it is only the end of the prompts that shows.
    Prompts that updates made the engines compute anew are not in it."""
    spans = [
        [(call.end - engines.seconds(call.prompt, call.cached, call.new), call.end) for call in row] for row in rows
    ]
    until = max(row[0][0] for row in spans if row)
    busy = sum(max(0.0, min(end, until) - max(start, began)) for row in spans for start, end in row)
    return busy / (engines.all_slots * (until - began))


def case_of(work: Work) -> str:
    return f"{work.steps} steps of {work.groups} × {work.n} rows, {ENGINES} × {SLOTS} slots"


def table(figures: Sequence[Figure]) -> str:
    """Medians; ratios over the repeats."""
    head = ["trainer", "s per step", "/ zagent", "engines busy", "trainer waits", "hidden", "staleness (bound)"]
    case = figures[0].case
    rows = []
    for peer in peers(figures):
        found = {n: median(figures, case=case, peer=peer, name=n) for n in ("step_s", "busy_share", "hidden_share")}
        stale, most, idle = (
            median(figures, case=case, peer=peer, name=n)
            for n in ("max_staleness", "staleness_bound", "trainer_idle_share")
        )
        slower = ratios(figures, case=case, name="step_s", over=peer, under="zagent")
        rows.append(
            [
                "fully asynchronous" if peer == "zagent" else peer,
                f"{found['step_s']:.2f}",
                "1" if peer == "zagent" else spread(slower),
                f"{found['busy_share']:.0%}",
                f"{idle:.0%}",
                f"{found['hidden_share']:.0%}" if peer == "one-step-off" else "–",
                f"{stale:.0f} ({most:.0f})",
            ]
        )
    return f"{case}\n\n{markdown(head, rows)}"


def plots(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """`trainers.png`: how busy the engines were."""
    file, shown = directory / "trainers.png", peers(figures)
    with drawing(file, title=figures[0].case, xlabel="", ylabel="share of the engines' slots in use") as axes:
        heights = [median(figures, case=figures[0].case, peer=peer, name="busy_share") for peer in shown]
        axes.bar(range(len(shown)), heights, 0.6, color=["#0b6e4f", "#7fb59f", "#adb5bd"][: len(shown)])
        axes.set_xticks(range(len(shown)), ["fully asynchronous" if peer == "zagent" else peer for peer in shown])
        axes.set_ylim(0, 1)
    return [file]
