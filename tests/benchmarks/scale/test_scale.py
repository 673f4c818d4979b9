"""The benchmark of scale: its arithmetic, its tables, and a small real run of each part."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.processes import Failed, Processes
from benchmarks.scale import cluster, suite
from benchmarks.scale.broker import BrokerBench, Cost
from benchmarks.scale.cluster import LEAST_S, LONGEST_S, Fleet, group_of, hold_s
from benchmarks.scale.cpu import Spent, parse, whole
from benchmarks.scale.figures import AT_REST, GROUPS, IN_FLIGHT, REFERENCE, TRAJECTORIES, WAITING, case, limit, points
from benchmarks.scale.load import Done, Load, Pile
from benchmarks.scale.tables import table
from benchmarks.suite import Figure


def figure(what: str, number: int, name: str, value: float, repeat: int = 0) -> Figure:
    return Figure("scale", case(what, number), "zagent", repeat, name, value, "")


def complete() -> list[Figure]:
    """One figure of everything that the tables show; memory grows with the square of the trajectories."""
    made = [figure(IN_FLIGHT, REFERENCE.in_flight, name, 50) for name in ("main_us", "sockets_us", "calls_per_s")]
    made += [figure(IN_FLIGHT, REFERENCE.in_flight, "limit", 20_000)]
    made += [figure(what, n, "broker_mb", 40 + n / 1000) for what in WAITING for n in (0, 5000)]
    made += [figure(AT_REST, 512, "start_s", 9.0)]
    for group in GROUPS:
        made += [figure(AT_REST, 512, f"{group}_{kind}", 0.25) for kind in ("cores", "mb", "descriptors")]
        made += [figure(TRAJECTORIES, n, f"{group}_ms", 1.5) for n in (10, 1000, 10_000)]
        made += [figure(TRAJECTORIES, n, f"{group}_mb", 40 + n**2 / 1e6) for n in (10, 1000, 10_000)]
    times = ("peak", "all_up_s", "answer_s", "total_s")
    return made + [figure(TRAJECTORIES, n, name, n) for n in (10, 1000, 10_000) for name in times]


def lines_with(text: str, start: str) -> Sequence[str]:
    return [line for line in text.splitlines() if line.startswith(f"| {start}")]


def test_figures_of_one_kind_are_found_by_number() -> None:
    """Medians over the repeats, smallest number first; other kinds and names stay out."""
    figures = [figure(IN_FLIGHT, 64, "limit", value, repeat) for repeat, value in enumerate((5, 9, 7))]
    figures += [figure(IN_FLIGHT, 8, "limit", 3), figure(AT_REST, 8, "limit", 1), figure(IN_FLIGHT, 8, "other", 1)]
    assert points(figures, IN_FLIGHT, "limit") == [(8, 3), (64, 7)]


def test_the_limit_is_the_busier_threads() -> None:
    """A broker's own thread needs 50 µs a call, that of its sockets 20; the limit shown is that of the usual load."""
    assert Cost(calls_per_s=9000, main_us=50, sockets_us=20).limit == pytest.approx(20_000)
    assert Cost(calls_per_s=9000, main_us=10, sockets_us=20).limit == pytest.approx(50_000)
    assert limit([figure(IN_FLIGHT, REFERENCE.in_flight, "limit", 7), figure(IN_FLIGHT, 1, "limit", 1)]) == 7
    assert math.isnan(limit([]))


def test_the_tables_say_what_is_measured() -> None:
    """Saturation and its GPUs, kB per waiting call and per trajectory, the exponent that tells trouble."""
    text = table(complete())
    assert "It saturates at 20,000 calls/s" in text
    assert lines_with(text, "512 tokens an answer") == ["| 512 tokens an answer | 8,192 | 2,731 | 819 |"]
    assert lines_with(text, "waiting calls, empty") == ["| waiting calls, empty | 40 | 45 | 1.00 |"]
    assert lines_with(text, "512 | 9.0")[0].startswith("| 512 | 9.0 | 25.0 |")
    assert lines_with(text, "10,000 | 10,000")[0].endswith("| 1.50 |")
    assert lines_with(text, "workers | 40 | 41 | 140")[0].endswith("| 2.00 |")


def test_tables_of_nothing_are_empty() -> None:
    """A part that was not measured has no rows, and breaks nothing."""
    assert "trajectories" in table([])


@pytest.mark.parametrize(
    ("rows", "rate", "seconds"), [(10, 100.0, LEAST_S), (50_000, 400.0, 250), (10**9, 1.0, LONGEST_S)]
)
def test_answers_outlast_the_start_of_all_rows(rows: int, rate: float, seconds: int) -> None:
    """Longer than the rows take to start by a margin, within what a row may sample."""
    assert hold_s(rows, rate) == seconds


def test_processes_are_grouped_by_what_they_are() -> None:
    """Engines that share a process too; whoever has no name is the launcher, or helps it."""
    names = ("broker", "worker-11", "engine-3", "engine-64-to-127", "")
    assert [group_of(name) for name in names] == ["broker", "workers", "engines", "engines", "launcher"]


def test_processor_time_is_read_from_stat() -> None:
    """User and system time; a name may hold blanks and brackets. A busy thread is seen to be busy."""
    ticks = os.sysconf("SC_CLK_TCK")
    stat = f"12 (ZMQbg (IO) 0) S {' '.join('0' for _ in range(10))} {2 * ticks} {ticks} 0 0"
    assert parse(stat) == ("ZMQbg (IO) 0", 3.0)
    before = whole(os.getpid())
    spin = threading.Thread(target=lambda: sum(range(10_000_000)))
    spin.start()
    spin.join()
    assert whole(os.getpid()) > before


def test_a_thread_that_ends_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was listed, and is gone when it is its turn. A process that is gone is an error."""
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: iter([path / "4194305", *listed(path)]))
    assert Spent.of(os.getpid()).main > 0
    with pytest.raises(FileNotFoundError):
        Spent.of(4194305)


class Asked(BrokerBench):
    """Is answered without any process."""

    def __init__(self, done: Done) -> None:
        self._pid, self._caller = os.getpid(), Line(done)  # type: ignore[assignment]


class Line:
    def __init__(self, done: Done) -> None:
        self.done = done

    def send(self, wanted: Load | Pile) -> None:
        pass

    def receive(self) -> Done:
        return self.done


def test_a_wrong_answer_ends_the_measurement() -> None:
    """Speed of wrong answers is none."""
    assert Asked(Done(2.0)).cost(Load(10, 1, 0, 1)).calls_per_s == pytest.approx(5)
    with pytest.raises(Failed, match="3 wrong answers"):
        Asked(Done(1.0, wrong=3)).cost(Load(10, 1, 0, 1))


def test_a_real_broker_is_measured(tmp_path: Path) -> None:
    """Calls are answered in few and in many sessions, and 2000 that nobody takes stay in its memory."""
    with Processes() as processes:
        bench = BrokerBench(processes, tmp_path, "b", engines=3)
        for load in (Load(200, 16, 0, 64), Load(200, 500, 7, 64)):
            assert bench.cost(load).calls_per_s > 0
        before = bench.memory()
        bench.pile(Pile(1000, 1024))
        assert bench.pile(Pile(1000, 1024)) > before + 2000 * 4096


def test_all_trajectories_of_a_real_cluster_are_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty rows on twenty engines, each in flight while the others are; every group is looked at."""
    monkeypatch.setattr(cluster, "LEAST_S", 8)  # seconds to start in, for a busy machine
    with Fleet(20, 40, tmp_path) as fleet:
        assert set(fleet.held().memory) == set(GROUPS)
        flight = fleet.fly(40)
    assert flight.peak == 40
    assert flight.all_up_s < flight.total_s >= flight.answer_s
    assert all(flight.held.memory[group] > 10**7 for group in GROUPS)


def test_the_plan_ends_with_what_was_promised() -> None:
    """50 000 trajectories in flight on 512 engines."""
    assert suite.FULL.at_rest[-1] == suite.FULL.engines[-1] == 512
    assert suite.FULL.trajectories[-1] == 50_000
    assert REFERENCE.engines in suite.FULL.engines
