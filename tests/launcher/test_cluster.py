"""The supervisor with real, tiny children."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import policy
from launcher.cluster import Cluster
from launcher.context import Context
from launcher.ports import EnginePorts
from launcher.specs import ChildSpec, Plan
from support.broker_line import Line, Ports
from support.processes import PATIENCE_S, RUN_ID, eventually, running, spec
from zagent.config import LauncherConfig
from zagent.errors import ConnectionLost, PoolLost, StartupError


def supervise(
    tmp_path: Path,
    engines: list[ChildSpec],
    workers: list[ChildSpec],
    services: list[ChildSpec] | None = None,
    *,
    broker: ChildSpec | None = None,
    then: Callable[[Cluster], Any] = Cluster.stop,
    **context: Any,
) -> str:
    """Run a cluster that starts nothing again, call ``then`` once it serves; the endpoint."""
    plan = Plan(
        broker or spec("broker", "obedient", endpoint="ipc://b"), tuple(engines), tuple(workers), tuple(services or ())
    )
    start_timeout_s = context.pop("start_timeout_s", PATIENCE_S)
    limits = LauncherConfig(start_timeout_s=start_timeout_s, stop_timeout_s=1.0, max_restarts=0)
    served: list[str] = []

    async def main() -> None:
        cluster = Cluster(plan, Context(RUN_ID, "s3cret", tmp_path, limits, **{"link": Line(), **context}))

        def on_ready(endpoint: str) -> None:
            served.append(endpoint)
            then(cluster)

        await asyncio.wait_for(cluster.run(on_ready), 2 * PATIENCE_S)

    asyncio.run(main())
    return served[0]


def one(room: str, entry: str = "obedient", **settings: Any) -> list[ChildSpec]:
    return [spec(room, entry, **settings)]


def test_cluster_serves_at_the_brokers_endpoint_and_ends(tmp_path: Path) -> None:
    """The endpoint that the broker reported is the cluster's, and members were given it."""
    assert supervise(tmp_path, one("engine"), one("worker")) == "ipc://b"


def test_rooms_stop_in_order(tmp_path: Path) -> None:
    """Workers first, then services, engines, the broker last."""
    stops = str(tmp_path / "stops")
    broker = spec("broker", "obedient", name="broker", stops=stops)
    rooms = [one(room, stops=stops) for room in ("engine", "worker", "service")]
    supervise(tmp_path, *rooms, broker=broker)
    assert (tmp_path / "stops").read_text().split() == ["worker-0", "service-0", "engine-0", "broker"]


def test_ports_are_released_right_before_their_engine_starts(tmp_path: Path) -> None:
    """Each engine's ports, no others."""
    from dataclasses import replace

    ports = Ports()
    engine = replace(spec("engine", "obedient"), ports=EnginePorts(20_000, 20_001))
    supervise(tmp_path, [engine], one("worker"), ports=ports)
    assert ports.released == [EnginePorts(20_000, 20_001)]


def test_failed_start_ends_what_was_started(tmp_path: Path) -> None:
    """A worker that cannot start fails the run with its reason, and the others are taken down."""
    pids = tmp_path / "pids"
    with pytest.raises(StartupError, match=r"worker-0 did not become ready.*made of cheese"):
        supervise(tmp_path, one("engine", "fruitful", pids=str(pids)), one("worker", "crashing"))
    started = pids.read_text().split() if pids.exists() else []
    assert [pid for pid in map(int, started) if running(pid)] == []


def test_a_child_that_hangs_at_start_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The deadline's error names the child and shows how far it came; the log says what was waited for."""
    caplog.set_level(logging.INFO)
    with pytest.raises(StartupError, match=r"engine-0 did not become ready: it said nothing within 4 s(?s:.*)for ever"):
        supervise(tmp_path, one("engine", "hanging"), one("worker"), start_timeout_s=4.0)
    assert "waiting for engine-0, worker-0, at most " in caplog.text
    assert "ending worker-0, at most 1 s" in caplog.text


def test_disagreeing_tokenizers_fail_the_start(tmp_path: Path) -> None:
    """Found before the first request."""
    with pytest.raises(StartupError, match="engine-0 and worker-0 tokenize differently"):
        supervise(tmp_path, one("engine", probe="a"), one("worker", probe="b"))


def test_a_judges_tokenizer_is_its_own(tmp_path: Path) -> None:
    """It has another model, and is not compared with the policy's."""
    supervise(tmp_path, one("engine", probe="a"), one("worker", probe="a"), one("service", probe="b"))


def test_a_service_that_does_not_start_fails_the_start(tmp_path: Path) -> None:
    """Like any other child: the first start is not tried again."""
    with pytest.raises(StartupError, match=r"service-0 did not become ready.*made of cheese"):
        supervise(tmp_path, one("engine"), one("worker"), one("service", "crashing"))


def test_the_broker_is_told_of_a_dead_member(tmp_path: Path) -> None:
    """One of two engines dies: its member is reported with pool, name, epoch and reason; the run goes on."""
    link, cue = Line(), tmp_path / "cue"
    engines = [spec("engine", "dying", name="engine-0", cue=str(cue)), spec("engine", "obedient", name="engine-1")]

    def then(cluster: Cluster) -> None:
        cue.touch()
        asyncio.get_running_loop().create_task(_stop_when(lambda: bool(link.told), cluster))

    supervise(tmp_path, engines, one("worker"), then=then, link=link)
    assert link.told == [("engine", "engine-0", 1, "it exited with code 3", True)]
    assert link.opened == [("ipc://b", "s3cret")]
    assert link.closed


async def _stop_when(holds: Callable[[], bool], cluster: Cluster) -> None:
    await asyncio.to_thread(eventually, holds)
    cluster.stop()


@pytest.mark.parametrize("room", ["engine", "worker"])
def test_death_of_the_last_of_a_needed_room_ends_the_run(
    tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it, its exit code and its last lines; the broker was told the same before."""
    monkeypatch.setattr(policy, "ABANDONED_GRACE_S", 0.1)
    link, cue = Line(), tmp_path / "cue"
    rooms = {"engine": one("engine"), "worker": one("worker"), room: one(room, "dying", cue=str(cue))}
    with pytest.raises(PoolLost, match=rf"{room}-0 .*no {room} is left: it exited with code 3(?s:.*)a cough") as e:
        supervise(tmp_path, rooms["engine"], rooms["worker"], then=lambda _: cue.touch(), link=link)
    assert [told[1] for told in link.told] == [f"{room}-0"]
    assert link.gone == [(room, str(e.value))]


def test_a_run_that_will_end_can_be_stopped_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers have a moment to hear why; a stop within it is no error."""
    monkeypatch.setattr(policy, "ABANDONED_GRACE_S", 3600.0)
    link, cue = Line(), tmp_path / "cue"

    def then(cluster: Cluster) -> None:
        cue.touch()
        asyncio.get_running_loop().create_task(stop_and_fail(cluster))

    async def stop_and_fail(cluster: Cluster) -> None:
        await _stop_when(lambda: bool(link.gone), cluster)
        cluster._fail(PoolLost("too late"))
        ignored.append(True)

    ignored: list[bool] = []
    supervise(tmp_path, one("engine", "dying", cue=str(cue)), one("worker"), then=then, link=link)
    assert link.closed
    assert ignored


def test_death_of_the_broker_ends_the_run(tmp_path: Path) -> None:
    """The error names the broker and its last lines."""
    cue = tmp_path / "cue"
    broker = spec("broker", "dying", name="broker", endpoint="ipc://b", cue=str(cue))
    with pytest.raises(ConnectionLost, match=r"broker \(pid \d+\) is gone: it exited with code 3(?s:.*)a cough"):
        supervise(tmp_path, one("engine"), one("worker"), broker=broker, then=lambda _: cue.touch())


def test_death_of_the_broker_fails_the_start(tmp_path: Path) -> None:
    """While an engine loads: nobody else will become ready."""
    broker = spec("broker", "mortal", name="broker", bound="ipc://b", deaths=1, incarnation=1)
    with pytest.raises(
        StartupError, match=r"broker .*died while the others started: it exited with code 3(?s:.*)a cou"
    ):
        supervise(tmp_path, one("engine", "hanging"), one("worker"), broker=broker)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_run_in_order(tmp_path: Path, number: int) -> None:
    """Ctrl-C and kill are requests to stop, not errors."""
    stops = tmp_path / "stops"
    supervise(tmp_path, one("engine", stops=str(stops)), one("worker"), then=lambda _: os.kill(os.getpid(), number))
    assert stops.read_text() == "engine-0\n"


def test_a_room_deaf_to_sigterm_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After stop_timeout_s."""
    supervise(tmp_path, one("engine", "deaf"), one("worker"))
    assert "engine-0 did not end on SIGTERM, killing it" in caplog.text


def test_stopping_twice_kills_at_once(tmp_path: Path) -> None:
    """The impatient do not wait for stop_timeout_s: a minute here, beyond the test's own patience."""

    async def main() -> None:
        plan = Plan(spec("broker", "deaf"), (spec("engine", "deaf"),), (spec("worker", "deaf"),))
        limits = LauncherConfig(start_timeout_s=PATIENCE_S, stop_timeout_s=60.0)
        cluster = Cluster(plan, Context(RUN_ID, "", tmp_path, limits, Line()))

        def on_ready(_endpoint: str) -> None:
            cluster.stop()
            cluster.stop()

        await asyncio.wait_for(cluster.run(on_ready), PATIENCE_S)

    asyncio.run(main())


def test_a_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    """Ctrl-C while an engine loads: no error, nothing left."""

    async def main() -> None:
        plan = Plan(spec("broker", "obedient"), (spec("engine", "hanging"),), ())
        limits = LauncherConfig(start_timeout_s=60.0, stop_timeout_s=1.0)
        cluster = Cluster(plan, Context(RUN_ID, "", tmp_path, limits, Line()))
        log = tmp_path / "engine-0.log"
        asyncio.get_running_loop().create_task(_stop_when(lambda: log.exists() and bool(log.read_text()), cluster))
        await asyncio.wait_for(cluster.run(lambda _: pytest.fail("it cannot be ready")), PATIENCE_S)

    asyncio.run(main())


def test_the_trainers_death_ends_the_run(tmp_path: Path) -> None:
    """Seen by its pidfd; a room deaf to SIGTERM gets a second, not the minute that is configured."""
    trainer = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    handle = os.pidfd_open(trainer.pid)

    async def main() -> None:
        plan = Plan(spec("broker", "obedient"), (spec("engine", "deaf"),), (spec("worker", "obedient"),))
        limits = LauncherConfig(start_timeout_s=PATIENCE_S, stop_timeout_s=60.0)
        cluster = Cluster(plan, Context(RUN_ID, "", tmp_path, limits, Line(), trainer=handle))
        await asyncio.wait_for(cluster.run(lambda _: trainer.kill()), PATIENCE_S)

    try:
        asyncio.run(main())
    finally:
        os.close(handle)
        trainer.kill()
        trainer.wait()


def test_nothing_of_a_cluster_is_left(tmp_path: Path) -> None:
    """Children's children and their strays are gone when run returns."""
    pids = tmp_path / "pids"
    supervise(tmp_path, one("engine", "fruitful", pids=str(pids)), one("worker"))
    assert [pid for pid in map(int, eventually(pids.read_text).split()) if running(pid)] == []
