"""The benchmark `relay`: calls per second, latency and processor time of zagent's `generate` and of its peers.

python -m benchmarks.run --only relay
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.relay import pictures, plan, tables
from benchmarks.relay.cluster import Measured, Shape, running
from benchmarks.relay.plan import Stage
from benchmarks.relay.wire import wire_bytes
from benchmarks.suite import Figure, Options, Record

NAME = "relay"
PEERS = tuple(plan.MODULES)
UNITS = {"calls_per_s": "1/s", "p50_ms": "ms", "p99_ms": "ms", "cpu_us": "us"}


def run(options: Options, record: Record) -> None:
    """Every load on every peer, all once before any a second time. Raises `Failed`."""
    repeats = options.repeats or (1 if options.quick else plan.REPEATS)
    for name in options.peers:
        for case in plan.CASES:
            if case.as_lists in plan.peer(name).FORMS:
                record(Figure(NAME, str(case), name, 0, "wire_bytes", wire_bytes(name, case), "B"))
    with tempfile.TemporaryDirectory(prefix="relay-") as place:
        for repeat in range(repeats):
            for stage in plan.stages(options.peers, sweeps=repeat < plan.SWEEP_REPEATS):
                print(f"relay {repeat + 1}/{repeats}: {', '.join(stage.peers)}", file=sys.stderr, flush=True)
                _play(stage, repeat, place, options.quick, record)


def _play(stage: Stage, repeat: int, place: str, quick: bool, record: Record) -> None:
    """The stage's clusters up, its loads one after the other, each on all peers; in odd repeats the other way round."""
    order = stage.peers[::-1] if repeat % 2 else stage.peers
    with ExitStack() as up:
        clusters = {}
        for name in order:
            callers = max(load.callers for load in stage.loads_of(name))
            shape = Shape(tempfile.mkdtemp(dir=place), stage.servers, callers)
            clusters[name] = up.enter_context(running(plan.peer(name), shape))
        for load in stage.loads:
            for name in order:
                peer = plan.peer(name)
                if load in stage.loads_of(name) and load.case.as_lists in peer.FORMS:
                    found = clusters[name].round(load, plan.calls(load, peer.PACE, quick=quick))
                    for figure in figures_of(str(load), name, repeat, found):
                        record(figure)


def figures_of(case: str, peer: str, repeat: int, found: Measured) -> list[Figure]:
    return [Figure(NAME, case, peer, repeat, name, value, UNITS[name]) for name, value in asdict(found).items()]


def table(figures: Sequence[Figure]) -> str:
    """Markdown."""
    return tables.table(figures)


def plots(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """PNG files."""
    return pictures.plots(figures, directory)
