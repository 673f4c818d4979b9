"""A child's beats, and the limit of its memory."""

from __future__ import annotations

import faulthandler
import json
import mmap
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from launcher import bootstrap, heartbeat
from launcher.heartbeat import OUT_OF_MEMORY, Heartbeat
from launcher.machine import Machine
from launcher.plan import Facts, Model, plan
from launcher.ports import EnginePorts
from launcher.specs import Run
from support.processes import PATIENCE_S
from zagent import alive
from zagent.config import Config
from zagent.errors import ConfigError

GB = 10**9


def heart(limit: int = 0, **rest: Any) -> Heartbeat:
    return Heartbeat(lambda beat: True, limit, **rest)


@contextmanager
def child(log: Path, entry: str, memory_limit: int = 0, **settings: Any) -> Iterator[tuple[Any, Connection]]:
    """A process of the room `support.living_rooms.entry`, and the end of the pipe where its reports arrive."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    name = f"support.living_rooms:{entry}"
    orders = bootstrap.Orders(name, settings, "child", str(log), os.getpid(), memory_limit)
    process = multiprocessing.get_context("spawn").Process(target=bootstrap.enter, args=(orders, theirs))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def heard(line: Connection) -> dict[str, Any]:
    """The next report."""
    assert line.poll(PATIENCE_S)
    return dict(json.loads(line.recv_bytes()))


def test_a_child_beats_once_it_is_ready(tmp_path: Path) -> None:
    """The room's report comes first; of a loop that turns the beats tell a small lag."""
    with child(tmp_path / "log", "turning", seconds=60) as (_, line):
        assert heard(line) == {"event": "ready", "info": {"who": "turning"}}
        beats = [heard(line) for _ in range(5)]
    assert {beat["event"] for beat in beats} == {"beat"}
    assert all(beat["what"] == "the event loop" for beat in beats)
    assert max(beat["lag_s"] for beat in beats) < PATIENCE_S


def test_beats_come_while_the_loop_is_blocked(tmp_path: Path) -> None:
    """And tell for how long it has been, ever longer."""
    with child(tmp_path / "log", "blocked", seconds=60) as (_, line):
        heard(line)
        lags = [heard(line)["lag_s"] for _ in range(10)]
    assert lags == sorted(set(lags))


def test_beats_end_where_nobody_listens(tmp_path: Path) -> None:
    """The thread ends without a word, and the room goes on."""
    with child(tmp_path / "log", "unheard") as (process, line):
        heard(line)
        line.close()
        process.join(PATIENCE_S)
        assert process.exitcode == 5
    assert (tmp_path / "log").read_text() == ""


def test_a_flood_of_memory_ends_the_child(tmp_path: Path) -> None:
    """With its own exit code, before it is ready too; the log has the figures and shows where it was."""
    with child(tmp_path / "log", "flooding", memory_limit=300_000_000) as (process, _):
        process.join(PATIENCE_S)
        assert process.exitcode == OUT_OF_MEMORY
    log = (tmp_path / "log").read_text()
    assert "beyond memory_limit_gb=0.3, ending" in log
    assert "in flood" in log


def test_a_beat_tells_the_longest_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds, and what it is, cut to what a pipe takes in one piece; None before the room watches its loop."""
    monkeypatch.setattr(alive, "longest", lambda: None)
    assert heart().beat(50.0) == {"event": "beat", "lag_s": None, "what": ""}
    monkeypatch.setattr(alive, "longest", lambda: (4.5, "😀" * 10_000))
    beat = heart().beat(50.0)
    assert beat["lag_s"] == 4.5
    assert len(json.dumps(beat)) + 4 <= 4096


@pytest.mark.parametrize(
    ("lag", "told"),
    [
        (2.0, 2.0),  # began since the process was back
        (32.0, 2.0),  # began right before it was stopped
        (40.0, 10.0),  # began 8 s before
        (30.5, 0.5),
    ],
)
def test_a_stop_of_the_process_is_no_lag(lag: float, told: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped for 30 s, back for 2: time in which nobody could run does not count."""
    made = heart()
    made.rested(967.0, 998.0)
    monkeypatch.setattr(alive, "longest", lambda: (lag, "it"))
    assert made.beat(1000.0)["lag_s"] == told


def test_a_late_beat_is_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread comes late by a part of a second, again and again: all lag counts."""
    made = heart()
    made.rested(996.0, 997.9)
    monkeypatch.setattr(alive, "longest", lambda: (40.0, "it"))
    assert made.beat(1000.0)["lag_s"] == 40.0


class Clock:
    """In place of `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("limit", "looks"), [(1000, 20), (0, 2)])
def test_memory_is_looked_at_often(limit: int, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times between two beats, which come every second; where there is no limit the thread sleeps in between."""
    clock, beats, turns = Clock(), [], []
    monkeypatch.setattr(heartbeat, "time", clock)

    def tell(beat: Any) -> bool:
        beats.append(clock.now)
        return len(beats) < 3

    made = Heartbeat(tell, limit, resident=lambda: 1)
    monkeypatch.setattr(made, "check_memory", lambda: turns.append(clock.now))
    made._run()
    assert beats == pytest.approx([0.0, 1.0, 2.0])
    assert len(turns) == looks


def test_a_stop_is_noted_by_the_thread_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pause took a minute more than it asked for."""
    clock, beats = Clock(), []
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(clock, "sleep", lambda seconds: setattr(clock, "now", clock.now + 61.0))
    monkeypatch.setattr(alive, "longest", lambda: (clock.now + 2.0, "it"))

    def tell(beat: dict[str, Any]) -> bool:
        beats.append(beat["lag_s"])
        return len(beats) < 2

    Heartbeat(tell, 0)._run()
    assert beats == pytest.approx([2.0, 3.0])


def test_memory_is_measured() -> None:
    """Resident, of this process: what has been written to counts, what is only reserved does not."""
    before = heartbeat.resident_bytes()
    with mmap.mmap(-1, 4 * GB):
        held = bytearray(b"x" * 100_000_000)
        assert before + len(held) // 2 < heartbeat.resident_bytes() < before + 2 * GB


@pytest.mark.parametrize(("held", "limit", "ends"), [(10, 9, True), (10, 10, False), (10, 0, False)])
def test_only_what_is_beyond_the_limit_ends_the_child(
    held: int, limit: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is no limit."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(os, "write", lambda *_: None)
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda *_, **__: None)
    heart(limit, resident=lambda: held).check_memory()
    assert ended == [OUT_OF_MEMORY] * ends


@contextmanager
def reporter() -> Iterator[tuple[bootstrap.Reporter, Connection]]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        yield bootstrap.Reporter(theirs), ours


def test_nothing_is_sent_before_the_room_is_ready() -> None:
    """Its start has a deadline of its own; the thread goes on."""
    with reporter() as (made, line):
        assert made.beat({"event": "beat"})
        assert not line.poll(0)


def test_a_launcher_that_does_not_read_stops_no_child() -> None:
    """A full pipe takes no more beats; they are left out, and those that went in are whole."""
    with reporter() as (made, line):
        made.ready({})
        assert all(made.beat({"event": "beat", "what": "x" * 3000}) for _ in range(200))
        sent = [json.loads(line.recv_bytes()) for _ in iter(lambda: line.poll(0), False)]
        assert 2 < len(sent) < 100
        assert made.beat({"event": "beat", "what": ""})
        assert json.loads(line.recv_bytes())["what"] == ""


def test_a_beat_does_not_wait_for_a_long_report() -> None:
    """While the room is sending its own."""
    with reporter() as (made, line):
        made.ready({})
        line.recv_bytes()
        with made._lock:
            assert made.beat({"event": "beat"})
        assert not line.poll(0)


def test_a_closed_pipe_ends_the_beats() -> None:
    """Of a launcher that is gone or has closed its end."""
    with reporter() as (made, line):
        made.ready({})
        line.close()
        assert not made.beat({"event": "beat"})


def test_the_heartbeat_does_not_keep_a_process_alive(tmp_path: Path) -> None:
    """A room that returns leaves with exit code 0, at once."""
    with child(tmp_path / "log", "turning", seconds=0) as (process, _):
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == ""


BOX = ["services.box.target=support.actors.Worker", "services.box.count=2"]


@pytest.mark.parametrize(
    ("overrides", "memory", "workers", "services"),
    [
        (BOX, 24 * GB, 6 * GB, 0),
        ([*BOX, "services.box.memory_limit_gb=3"], 24 * GB, 6 * GB, 3 * GB),
        ([*BOX, "worker.count=8"], 24 * GB, 2 * GB, 0),
        ([*BOX, "worker.memory_limit_gb=0.5"], 24 * GB, GB // 2, 0),
        ([*BOX, "worker.memory_limit_gb=null"], 24 * GB, 0, 0),
    ],
)
def test_who_has_which_limit(overrides: list[str], memory: int, workers: int, services: int) -> None:
    """Of the workers by default half of what is free together, and each at least 2 GB; of services what is said; of
    engines and broker none."""
    config = Config.load(overrides=["engine.kind=sim", *overrides])
    facts = Facts(Machine(2, memory), Model("/model", 4096), Run("run-1", "/run/z", "/run/z/t", "/cache", 42, "s"))
    made = plan(config, facts, lambda: EnginePorts(0, 0))
    assert {spec.memory_limit for spec in made.workers} == {workers}
    assert {spec.memory_limit for spec in made.services} == {services}
    assert {spec.memory_limit for spec in (made.broker, *made.engines)} == {0}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("worker.memory_limit_gb=0", "worker.memory_limit_gb=0: must be more than 0, auto, or null for none"),
        ("worker.memory_limit_gb=lots", "worker.memory_limit_gb='lots': should be a valid number, .* or .*'auto'"),
        ("services.box.memory_limit_gb=0", "services.box.memory_limit_gb=0: should be greater than 0"),
        ("services.judge.model.path=tiny services.judge.memory_limit_gb=1", "judge: memory_limit_gb is a class's"),
    ],
)
def test_a_limit_is_a_size(override: str, said: str) -> None:
    """What is none is refused by its key, before any process starts."""
    with pytest.raises(ConfigError, match=said):
        Config.load(overrides=[*BOX, *override.split()])
