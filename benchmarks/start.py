"""How long until a cluster of two simulated engines and four workers answers, and what it holds in memory.

Each start happens in a fresh process, as a trainer's would. The clock starts at `AgentLoopManager.launch` (Ray:
`ray.init`), after the import, which is listed by itself: both are paid once per trainer.

* first generate: a call of the trainer's to an engine is answered;
* first row: a row that went through a worker has come back.

Processor time is that of all processes together, the import's included; neighbours on the machine disturb it less.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drawing import colour, drawing
from benchmarks.processes import Processes
from benchmarks.start_plan import ENGINES, WORKERS, Started
from benchmarks.suite import Figure, Options, Record, markdown, median, peers, ratios, spread, values

NAME = "start"
PEERS = ("zagent", "ray")
REPEATS = 5
CASE = f"{ENGINES} engines, {WORKERS} workers"
ENTRIES = {"zagent": "benchmarks.start_zagent:main", "ray": "benchmarks.start_ray:main"}
TIMES = {
    "import": "import",
    "ready": "launch (init) returns",
    "first_generate": "first generate",
    "first_row": "first row",
    "cpu": "processor time until then, all processes",
}
MEMORY = {
    "worker_rss": "a worker, resident",
    "worker_pss": "a worker, its share",
    "engine_rss": "an engine (server), resident",
    "engine_pss": "an engine (server), its share",
    "broker_pss": "broker, its share",
    "launcher_pss": "launcher, its share",
    "rest_pss": "Ray's own processes, their share",
    "total_pss": "all together",
}


def run(options: Options, record: Record) -> None:
    """Start each peer in turn. Raises `Failed` if one does not start or answers wrongly."""
    repeats = options.repeats or (1 if options.quick else REPEATS)
    for repeat in range(repeats):
        for peer in reversed(options.peers) if repeat % 2 else options.peers:
            found = started(peer)
            for name, seconds in found.times.items():
                record(Figure(NAME, CASE, peer, repeat, f"{name}_s", seconds, "s"))
            for name, size in found.memory.items():
                record(Figure(NAME, CASE, peer, repeat, f"{name}_mb", size, "MB"))


def started(peer: str) -> Started:
    """One start of ``peer``, and its end. Raises `Failed`."""
    scratch = tempfile.TemporaryDirectory(prefix="start-", ignore_cleanup_errors=True)  # Ray's may still write there
    with scratch as directory, Processes() as processes:
        found: Started = processes.start(peer, ENTRIES[peer], {"directory": directory}).receive()
    return found


def table(figures: Sequence[Figure]) -> str:
    """Two tables: seconds and MB; medians with lowest and highest, and ratios."""
    return "\n\n".join(
        (
            _table(figures, "s", {f"{name}_s": text for name, text in TIMES.items()}, ".2f"),
            _table(figures, "MB", {f"{name}_mb": text for name, text in MEMORY.items()}, ".0f"),
        )
    )


def _table(figures: Sequence[Figure], unit: str, names: dict[str, str], form: str) -> str:
    found = peers(figures)
    others = [peer for peer in found if peer != "zagent"]
    head = [unit, *found, *(f"{peer} / zagent" for peer in others)]
    rows = []
    for name, text in names.items():
        cells = [spread(list(values(figures, case=CASE, peer=peer, name=name).values()), form) for peer in found]
        cells += [spread(ratios(figures, case=CASE, name=name, over=peer, under="zagent"), ".1f") for peer in others]
        if set(cells) != {"–"}:
            rows.append([text, *cells])
    return markdown(head, rows)


def plots(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """Times and memory, bars side by side."""
    times = {"first_generate_s": "first generate", "first_row_s": "first row"}
    memory = {"worker_rss_mb": "a worker", "engine_rss_mb": "an engine (server)", "total_pss_mb": "all together"}
    return [
        _bars(figures, directory / "start_time.png", f"Start: {CASE}", "seconds", times),
        _bars(figures, directory / "start_memory.png", f"Memory: {CASE}", "MB", memory),
    ]


def _bars(figures: Sequence[Figure], file: Path, title: str, unit: str, names: dict[str, str]) -> Path:
    found = peers(figures)
    width = 0.8 / len(found)
    with drawing(file, title=title, xlabel="", ylabel=unit) as axes:
        for index, peer in enumerate(found):
            places = [place + (index - (len(found) - 1) / 2) * width for place in range(len(names))]
            heights = [median(figures, case=CASE, peer=peer, name=name) for name in names]
            bars = axes.bar(places, heights, width, label=peer, color=colour(peer))
            axes.bar_label(bars, fmt="%.2f" if unit == "seconds" else "%.0f")
        axes.set_xticks(range(len(names)), names.values())
        axes.legend(frameon=False)
    return file
