"""Whoever dies is started again, within a budget."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher import health, policy, watch
from launcher.child import Child
from launcher.cluster import Cluster
from launcher.context import Context
from launcher.ports import EnginePorts
from launcher.restarts import Restarts
from launcher.rundir import RunDir
from launcher.specs import ChildSpec, End, Member, Plan
from support.broker_line import Line, Ports
from support.processes import PATIENCE_S, RUN_ID, eventually, running, spec
from support.virtual_clock import run
from zagent.config import LauncherConfig
from zagent.errors import ConnectionLost, PoolLost, StartupError


def supervise(
    tmp_path: Path,
    made: list[ChildSpec],
    until: Callable[[Line], Any] = lambda line: False,
    *,
    ports: Ports | None = None,
    on_ready: Callable[[], Any] = lambda: None,
    on_serving: Callable[[], Any] = lambda: None,
    **limits: Any,
) -> Line:
    """Serve with these, and obedient ones for what is missing, until something holds of the broker's line; end it all.
    What ends the run before that is raised."""
    line = Line()
    fast = {"start_timeout_s": PATIENCE_S, "stop_timeout_s": 1.0, "restart_wait_s": 0.01, **limits}
    config = LauncherConfig().model_copy(update=fast)  # also values too small for real use

    async def main() -> None:
        rooms = {room: [one for one in made if one.room == room] for room in policy.STOP_ORDER}
        for room in ("broker", "engine", "worker"):
            rooms[room] = rooms[room] or [spec(room, "obedient", name="broker" if room == "broker" else "")]
        (broker,) = rooms["broker"]
        plan = Plan(broker, tuple(rooms["engine"]), tuple(rooms["worker"]), tuple(rooms["service"]))
        cluster = Cluster(plan, Context(RUN_ID, "", tmp_path, config, line, ports=ports))

        async def watch() -> None:
            await asyncio.to_thread(eventually, lambda: ended or until(line))
            cluster.stop()

        def serves(_endpoint: str) -> None:
            watching.append(asyncio.get_running_loop().create_task(watch()))
            on_ready()

        ended: list[bool] = []
        watching: list[asyncio.Task[None]] = []
        try:
            await asyncio.wait_for(cluster.run(serves, lambda _endpoint: on_serving()), 2 * PATIENCE_S)
        finally:
            ended.append(True)
            await asyncio.gather(*watching)

    asyncio.run(main())
    return line


def lives(tmp_path: Path, name: str = "lives") -> list[tuple[int, int]]:
    """(number, pid) of each life that was told."""
    path = tmp_path / name
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []  # type: ignore[misc]


def orders(tmp_path: Path) -> list[dict[str, Any]]:
    """The settings of each life that was told."""
    return [json.loads(line) for line in (tmp_path / "orders").read_text().splitlines()]


def mortal(tmp_path: Path, *, name: str = "box-0", **settings: Any) -> ChildSpec:
    """A service of the pool `box`."""
    return spec("service", "mortal", name=name, pool="box", lives=str(tmp_path / "lives"), epoch=1, **settings)


def of_room(tmp_path: Path, room: str, **settings: Any) -> ChildSpec:
    """One whose life and death are told in files."""
    number = {"incarnation": 1, "bound": "ipc://b"} if room == "broker" else {"epoch": 1}
    files = {"lives": str(tmp_path / "lives"), "orders": str(tmp_path / "orders")}
    return spec(room, "mortal", name="broker" if room == "broker" else f"{room}-0", **files, **number, **settings)


@pytest.mark.parametrize("room", ["engine", "worker", "service"])
def test_a_process_that_died_comes_back_with_the_next_epoch(tmp_path: Path, room: str) -> None:
    """A new process; the broker was told of the death, and nothing of the pool's end."""
    line = supervise(tmp_path, [of_room(tmp_path, room, deaths=1)], lambda line: len(lives(tmp_path)) == 2)
    (first, second) = lives(tmp_path)
    assert (first[0], second[0]) == (1, 2)
    assert first[1] != second[1]
    assert line.told == [(room, f"{room}-0", 1, "it exited with code 3", True)]
    assert line.gone == []
    assert not running(second[1])


def test_one_that_was_killed_did_not_crash(tmp_path: Path) -> None:
    """The broker is told the difference: nothing that it did is the reason."""

    def until(line: Line) -> bool:
        found = lives(tmp_path)
        if len(found) == 1 and not line.told:
            os.kill(found[0][1], signal.SIGKILL)
        return len(found) == 2

    line = supervise(tmp_path, [of_room(tmp_path, "engine", deaths=0)], until)
    assert line.told == [("engine", "engine-0", 1, "it was killed by SIGKILL", False)]


def test_a_broker_that_died_comes_back_at_its_place(tmp_path: Path) -> None:
    """At the endpoint that was bound, as the next incarnation, with the members that are ready now: not those that are
    dead, or still start. Members are told nothing, since they find it there."""
    cue = tmp_path / "cue"
    broker = of_room(tmp_path, "broker", deaths=1, cue=str(cue), endpoint="tcp://127.0.0.1:0")
    engines = [spec("engine", "obedient", name="engine-0"), spec("engine", "obedient", name="engine-1")]
    starting = spec("service", "mortal", name="box-0", epoch=1, deaths=1, then="hang", lives=str(tmp_path / "box"))

    def until(line: Line) -> bool:
        if len(lives(tmp_path, "box")) == 2:
            cue.touch()
        return len(lives(tmp_path)) == 2

    line = supervise(tmp_path, [broker, *engines, starting], until)
    first, second = orders(tmp_path)
    assert (first["incarnation"], second["incarnation"]) == (1, 2)
    assert second["endpoint"] == "ipc://b"
    assert second["expected"] == [["engine", "engine-0", 1], ["engine", "engine-1", 1], ["worker", "worker-0", 1]]
    assert [told[:3] for told in line.told] == [("service", "box-0", 1)]
    assert len(line.opened) == 1


def test_an_epoch_survives_the_broker(tmp_path: Path) -> None:
    """A new broker expects those that were started again by their present epoch."""
    cue = tmp_path / "cue"
    broker = of_room(tmp_path, "broker", deaths=1, cue=str(cue))
    engine = spec("engine", "mortal", epoch=1, deaths=1, lives=str(tmp_path / "engine"))

    def until(line: Line) -> bool:
        if len(lives(tmp_path, "engine")) == 2 and "engine-0 is back" in log.text:
            cue.touch()
        return len(lives(tmp_path)) == 2

    with pytest.MonkeyPatch.context() as patch:
        log = Log(patch)
        supervise(tmp_path, [broker, engine], until)
    assert ["engine", "engine-0", 2] in orders(tmp_path)[1]["expected"]


class Log:
    """What the launcher logs about lives, while it runs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.text = ""
        patch.setattr("launcher.lives.logger.info", self._note)

    def _note(self, text: str, *values: object) -> None:
        self.text += text % values + "\n"


def test_a_broker_that_dies_too_often_ends_the_run(tmp_path: Path) -> None:
    """Its budget is like everybody's; the error has its last words."""
    cue = tmp_path / "cue"
    broker = of_room(tmp_path, "broker", deaths=99, cue=str(cue))
    with pytest.raises(ConnectionLost, match=r"broker .* gone, after 2 restarts: it exited with code 3(?s:.*)a cough"):
        supervise(tmp_path, [broker], max_restarts=2, on_ready=cue.touch)
    assert [life for life, _ in lives(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("room", ["engine", "worker"])
def test_engines_or_workers_that_die_too_often_end_the_run(
    tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the broker was told why, so that callers hear it."""
    monkeypatch.setattr(policy, "ABANDONED_GRACE_S", 0.1)
    with pytest.raises(PoolLost, match=rf"no {room} is left, after 1 restart: it exited with code 3(?s:.*)a cough"):
        supervise(tmp_path, [of_room(tmp_path, room, deaths=99)], max_restarts=1)
    assert [life for life, _ in lives(tmp_path)] == [1, 2]


def test_a_process_of_several_engines_comes_back_with_all_of_them(tmp_path: Path) -> None:
    """Each is reported, and each has the next epoch."""
    members = tuple(Member("engine", f"engine-{index}", index) for index in range(3))
    told = [{"name": m.name, "index": m.index, "epoch": 1} for m in members]
    engines = replace(
        spec("engine", "mortal", name="engine-0-to-2", deaths=1, orders=str(tmp_path / "orders"), members=told),
        members=members,
    )
    line = supervise(tmp_path, [engines], lambda line: (tmp_path / "orders").exists() and len(orders(tmp_path)) == 2)
    assert [told[:3] for told in line.told] == [("engine", f"engine-{index}", 1) for index in range(3)]
    assert [(m["name"], m["epoch"]) for m in orders(tmp_path)[1]["members"]] == [(m.name, 2) for m in members]


def test_an_engine_gets_fresh_ports(tmp_path: Path) -> None:
    """The old ones may still be in use; the new are held until it starts."""
    ports = Ports()
    engine = replace(of_room(tmp_path, "engine", deaths=1, nccl_port=90, port=91), ports=EnginePorts(90, 91))
    supervise(tmp_path, [engine], lambda line: len(lives(tmp_path)) == 2, ports=ports)
    assert [(one["nccl_port"], one["port"]) for one in orders(tmp_path)] == [(90, 91), (1, 2)]
    assert ports.released == [EnginePorts(90, 91), EnginePorts(1, 2)]


def test_no_port_left_is_a_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again; the run goes on meanwhile."""
    ports, failures = Ports(), [StartupError("no free TCP ports")]
    take = ports.take

    def scarce() -> EnginePorts:
        if failures:
            raise failures.pop()
        return take()

    monkeypatch.setattr(ports, "take", scarce)
    engine = replace(of_room(tmp_path, "engine", deaths=1, nccl_port=90, port=91), ports=EnginePorts(90, 91))
    supervise(tmp_path, [engine], lambda line: len(lives(tmp_path)) == 2, ports=ports)
    assert [life for life, _ in lives(tmp_path)] == [1, 3]


def test_a_budget_that_is_used_up_gives_the_pool_up(tmp_path: Path) -> None:
    """After `max_restarts` restarts, whatever other services live; the broker gets the last words, and the run goes on
    until it is stopped."""
    services = [mortal(tmp_path, deaths=99), spec("service", "obedient", name="other-0", pool="other", epoch=1)]
    line = supervise(tmp_path, services, lambda line: line.gone, max_restarts=2)
    assert [epoch for epoch, _ in lives(tmp_path)] == [1, 2, 3]
    assert [told[:3] for told in line.told] == [("box", "box-0", epoch) for epoch in (1, 2, 3)]
    ((pool, text),) = line.gone
    assert pool == "box"
    assert "box-0 (pid " in text
    assert "no box is left, after 2 restarts: it exited with code 3" in text
    assert "a cough" in text


def test_a_pool_with_somebody_left_is_not_given_up(tmp_path: Path) -> None:
    """Each process has a budget of its own."""
    one, other = mortal(tmp_path, deaths=99), spec("service", "obedient", name="box-1", pool="box", epoch=1)
    line = supervise(tmp_path, [one, other], lambda line: len(line.told) == 2, max_restarts=1)
    assert line.gone == []


def test_a_pool_with_somebody_on_the_way_back_is_not_given_up(tmp_path: Path) -> None:
    """One process is gone for good while the other waits to be started again."""
    line = Line()

    async def main() -> None:
        limits = LauncherConfig(max_restarts=0)
        cluster = Cluster(Plan(spec("broker", "obedient"), (), ()), Context(RUN_ID, "", tmp_path, limits, line))
        cluster._serve("ipc://b")
        cluster._started = True
        served = cluster._lives
        assert served is not None
        served._restarts.schedule(mortal(tmp_path, name="box-1", deaths=0), 3600.0)
        for _ in range(2):
            served._over(mortal(tmp_path, deaths=0), End(0.0, True, True), "box-0", "it exited")
            gone.append(len(line.gone))
            served._restarts.cancel()
        await cluster._close()

    gone: list[int] = []
    asyncio.run(main())
    assert gone == [0, 1]


def test_a_pool_whose_last_two_die_together_is_given_up_once(tmp_path: Path) -> None:
    """By the second: when the first is judged, the other may still be started again."""
    cue = tmp_path / "cue"
    both = [mortal(tmp_path, name=f"box-{index}", deaths=99, cue=str(cue)) for index in range(2)]
    exit_of = Child._note_death
    held: list[Child] = []

    def together(self: Child) -> None:
        held.append(self)
        self._loop.remove_reader(self._pidfd)
        if len(held) == 2:
            for child in held:
                exit_of(child)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Child, "_note_death", lambda self: (together if "box" in self.spec.name else exit_of)(self))
        line = supervise(tmp_path, both, lambda line: line.gone, max_restarts=0, on_ready=cue.touch)
    assert len(line.told) == 2
    assert len(line.gone) == 1


def test_a_start_that_fails_counts(tmp_path: Path) -> None:
    """A process that dies or refuses before it is ready is tried again, up to the budget."""
    supervise(tmp_path, [mortal(tmp_path, deaths=1, then="refuse")], lambda line: line.gone, max_restarts=3)
    assert [epoch for epoch, _ in lives(tmp_path)] == [1, 2, 3, 4]


def test_a_start_that_hangs_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After `start_timeout_s`, and counts as a failed one; the last words show where it hung."""
    line = supervise(
        tmp_path, [mortal(tmp_path, deaths=1, then="hang")], lambda line: line.gone, max_restarts=1, start_timeout_s=4.0
    )
    assert "box-0 said nothing within 4 s, ending it" in caplog.text
    assert line.told[-1] == ("box", "box-0", 2, "it was not ready within 4 s, and it was killed by SIGABRT", True)
    assert "in hanging" in line.gone[0][1]


def test_the_deadline_is_for_the_start_alone(tmp_path: Path) -> None:
    """One that became ready, or failed, is not ended when it is over; nor is anybody watched when the cluster ends."""

    async def main() -> list[bool]:
        cluster = Cluster(
            Plan(spec("broker", "obedient"), (), ()), Context(RUN_ID, "", tmp_path, LauncherConfig(), Line())
        )
        cluster._serve("ipc://b")
        cluster._started = True
        assert cluster._lives is not None
        ended = []
        for entry in ("obedient", "crashing"):
            child = cluster._children.spawn(spec("engine", entry))
            timer = asyncio.get_running_loop().call_later(3600, child.kill)
            child.ready.add_done_callback(partial(cluster._lives._started, child, timer))
            await asyncio.wait([child.ready])
            await asyncio.sleep(0)
            ended.append(timer.cancelled())
        watching = cluster._lives._watch
        await cluster._close()
        assert watching._timer.cancelled()
        return ended

    assert asyncio.run(main()) == [True, True]


def test_a_service_that_dies_during_the_start_comes_back(tmp_path: Path) -> None:
    """After it was ready, while an engine still loads: once the cluster serves."""
    engine = spec("engine", "mourning", lives=str(tmp_path / "lives"))
    line = supervise(tmp_path, [mortal(tmp_path, deaths=1), engine], lambda line: len(lives(tmp_path)) == 2)
    assert [epoch for epoch, _ in lives(tmp_path)] == [1, 2]
    assert [told[:3] for told in line.told] == [("box", "box-0", 1)]


@pytest.mark.parametrize("room", ["engine", "service", "broker"])
def test_who_dies_while_the_workers_start_comes_back_at_once(tmp_path: Path, room: str) -> None:
    """Engines and services can be called by then: the start does not end before that, and goes on."""
    worker = spec("worker", "awaiting", lives=str(tmp_path / "lives"))
    cue = tmp_path / "cue"
    line = supervise(
        tmp_path, [of_room(tmp_path, room, deaths=1, cue=str(cue)), worker], lambda line: True, on_serving=cue.touch
    )
    assert [number for number, _ in lives(tmp_path)] == [1, 2]
    assert [told[:3] for told in line.told] == ([] if room == "broker" else [(room, f"{room}-0", 1)])


def test_a_worker_that_cannot_start_ends_a_cluster_that_serves(tmp_path: Path) -> None:
    """With its own words, although engines are called by then."""
    served: list[str] = []
    with pytest.raises(StartupError, match=r"worker-0 did not become ready.*made of cheese"):
        supervise(tmp_path, [spec("worker", "crashing")], on_serving=lambda: served.append("yes"))
    assert len(served) <= 1  # it may fail before the engine is there


def test_a_process_that_cannot_be_spawned_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shortage of memory or file descriptors counts as a failed start."""
    init, failures = Child.__init__, [OSError("no memory")]

    def scarce(self: Child, made: ChildSpec, *rest: Any) -> None:
        if made.name == "box-0" and made.members[0].epoch == 2 and failures:
            raise failures.pop()
        init(self, made, *rest)

    monkeypatch.setattr(Child, "__init__", scarce)
    supervise(tmp_path, [mortal(tmp_path, deaths=1)], lambda line: len(lives(tmp_path)) == 2)
    assert [epoch for epoch, _ in lives(tmp_path)] == [1, 3]


def test_one_that_cannot_be_spawned_at_all_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last words are the reason."""
    init = Child.__init__

    def scarce(self: Child, made: ChildSpec, *rest: Any) -> None:
        if made.name == "box-0" and made.members[0].epoch > 1:
            raise OSError("no memory")
        init(self, made, *rest)

    monkeypatch.setattr(Child, "__init__", scarce)
    line = supervise(tmp_path, [mortal(tmp_path, deaths=1)], lambda line: line.gone, max_restarts=2)
    assert "no box is left, after 2 restarts: it could not be started: no memory" in line.gone[0][1]


def test_nothing_is_started_again_while_the_cluster_ends(tmp_path: Path) -> None:
    """A restart that waits is forgotten, however long the end takes: here an engine is deaf for a second."""
    made = [mortal(tmp_path, deaths=1), spec("engine", "deaf")]
    line = supervise(tmp_path, made, lambda line: line.told, restart_wait_s=0.3)
    assert len(lives(tmp_path)) == 1
    assert line.closed


def test_what_ends_with_the_cluster_is_not_started_again(tmp_path: Path) -> None:
    """Also where the end has another reason than a stop: whoever heard that it is ready raised."""

    async def main() -> None:
        plan = Plan(spec("broker", "obedient"), (of_room(tmp_path, "engine", deaths=0),), (spec("worker", "obedient"),))
        limits = LauncherConfig(stop_timeout_s=1.0, restart_wait_s=0.0)
        cluster = Cluster(plan, Context(RUN_ID, "", tmp_path, limits, line))

        def fail(_endpoint: str) -> None:
            raise ValueError("not this way")

        with pytest.raises(ValueError, match="not this way"):
            await cluster.run(fail)

    line = Line()
    asyncio.run(main())
    assert len(lives(tmp_path)) == 1
    assert line.told == []


def test_a_stopped_process_is_spared_and_then_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence makes it slow; once it goes on it is well; one that stays silent is killed, from outside, and is started
    again."""
    monkeypatch.setattr(health, "SLOW_S", 1.5)
    monkeypatch.setattr(watch, "SLOW_S", 1.5)
    monkeypatch.setattr(watch, "LOOK_S", 0.1)
    steps = [
        (lambda line: len(lives(tmp_path)) == 1, signal.SIGSTOP),
        (lambda line: line.slow[-1:] == [("engine-0", 1, True)], signal.SIGCONT),
        (lambda line: line.slow[-1:] == [("engine-0", 1, False)], signal.SIGSTOP),
    ]

    def until(line: Line) -> bool:
        if steps and steps[0][0](line):
            os.kill(lives(tmp_path)[0][1], steps.pop(0)[1])
        return len(lives(tmp_path)) == 2

    line = supervise(tmp_path, [of_room(tmp_path, "engine", deaths=0)], until, hung_after_s=2.5)
    slow = [said for said in line.slow if said[0] == "engine-0"]  # on a busy machine others may be, too
    assert slow == [("engine-0", 1, True), ("engine-0", 1, False), ("engine-0", 1, True)]
    ((_, _, _, reason, crashed),) = line.told
    assert reason.startswith("it hung: nothing was heard of it for")
    assert reason.endswith("(it was stopped), and it was killed by SIGKILL")
    assert not crashed


def test_only_what_failed_by_itself_is_a_failed_start(tmp_path: Path) -> None:
    """One that crashed before it was ready waits longer the next time, one that somebody killed does not."""

    async def main() -> dict[str, int]:
        limits = LauncherConfig(restart_wait_s=3600.0)
        cluster = Cluster(Plan(spec("broker", "obedient"), (), ()), Context(RUN_ID, "", tmp_path, limits, Line()))
        cluster._serve("ipc://b")
        cluster._started = True
        names = ("crashing", "hanging", "exiting")
        children = [cluster._children.spawn(spec("engine", name, name=name, epoch=1)) for name in names]
        os.kill(children[1].pid, signal.SIGKILL)
        await asyncio.wait([child.exited for child in children])
        await asyncio.sleep(0)
        assert cluster._lives is not None
        waiting = cluster._lives._restarts._waiting
        found = {name: waiting[name][0].failed_starts for name in names}
        await cluster._close()
        return found

    assert asyncio.run(main()) == {"crashing": 1, "hanging": 0, "exiting": 1}


def test_the_dead_are_forgotten(tmp_path: Path) -> None:
    """Once what follows is decided: restarts over months cost nothing, and a janitor does not take a stranger with a
    dead one's pid for it."""
    directory = RunDir(tmp_path, RUN_ID)

    async def main() -> tuple[list[str], bool]:
        context = Context(RUN_ID, "", tmp_path, LauncherConfig(), Line(), directory=directory)
        cluster = Cluster(Plan(spec("broker", "obedient"), (), ()), context)
        cluster._serve("ipc://b")
        cluster._started = True
        dead, alive = (cluster._children.spawn(spec("engine", "obedient", name=name)) for name in ("dead", "alive"))
        await asyncio.wait([dead.ready, alive.ready])
        assert directory.children() == {dead.pid, alive.pid}
        dead.kill()
        await dead.exited
        await asyncio.sleep(0)
        known = [child.spec.name for child in cluster._children]
        noted = directory.children() == {alive.pid}
        await cluster._close()
        return known, noted

    assert asyncio.run(main()) == (["alive"], True)
    assert directory.children() == set()


def test_one_that_nothing_ends_is_told_to_the_broker(tmp_path: Path) -> None:
    """Its callers need not wait until the kernel lets go of it."""
    line = Line()

    async def main() -> None:
        cluster = Cluster(
            Plan(spec("broker", "obedient"), (), ()), Context(RUN_ID, "", tmp_path, LauncherConfig(), line)
        )
        cluster._serve("ipc://b")
        cluster._started = True
        child = cluster._children.spawn(spec("engine", "obedient"))
        await child.ready
        child.given_up = "it hung"
        assert cluster._lives is not None
        cluster._lives._watch._stuck(child)
        await cluster._close()

    asyncio.run(main())
    assert line.told == [("engine", "engine-0", 1, "it hung, and not even SIGKILL ended it", True)]


def test_a_restart_waits_its_time() -> None:
    """Each of its own; those of a pool are counted while they wait, and can be called off."""

    async def main() -> list[tuple[float, str]]:
        loop, started = asyncio.get_running_loop(), []
        restarts = Restarts(lambda made: started.append((loop.time(), made.name)))
        restarts.schedule(spec("service", "obedient", name="a-0", pool="a"), 2.0)
        restarts.schedule(spec("service", "obedient", name="a-1", pool="a"), 1.0)
        restarts.schedule(spec("service", "obedient", name="b-0", pool="b"), 5.0)
        assert [restarts.of_pool(pool) for pool in "abc"] == [2, 1, 0]
        await asyncio.sleep(3)
        assert [restarts.of_pool(pool) for pool in "abc"] == [0, 1, 0]
        restarts.cancel()
        assert restarts.of_pool("b") == 0
        await asyncio.sleep(9)
        return started

    assert run(main()) == [(1.0, "a-1"), (2.0, "a-0")]
