"""A service's processes are started again; nobody else's are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.child import Child
from launcher.cluster import Cluster, Context
from launcher.restarts import Restarts
from launcher.specs import ChildSpec, Plan
from support.broker_line import Line
from support.processes import PATIENCE_S, eventually, running, spec
from support.virtual_clock import run
from zagent.config import LauncherConfig
from zagent.errors import MemberLost


def supervise(
    tmp_path: Path,
    services: list[ChildSpec],
    until: Callable[[Line], Any],
    *,
    engine: ChildSpec | None = None,
    **limits: Any,
) -> Line:
    """Serve with ``services`` until something holds of the broker's line, and end it all."""
    line = Line()
    fast = {"start_timeout_s": PATIENCE_S, "stop_timeout_s": 1.0, "restart_wait_s": 0.01, **limits}

    async def main() -> None:
        engines = (engine or spec("engine", "obedient"),)
        plan = Plan(spec("broker", "obedient"), engines, (spec("worker", "obedient"),), tuple(services))
        cluster = Cluster(plan, Context("test-run", "", tmp_path, LauncherConfig(**fast), link=line))

        async def watch() -> None:
            await asyncio.to_thread(eventually, lambda: until(line))
            cluster.stop()

        def on_ready(_endpoint: str) -> None:
            watching.append(asyncio.get_running_loop().create_task(watch()))

        watching: list[asyncio.Task[None]] = []
        await asyncio.wait_for(cluster.run(on_ready), 2 * PATIENCE_S)
        await watching[0]

    asyncio.run(main())
    return line


def lives(tmp_path: Path) -> list[tuple[int, int]]:
    """(epoch, pid) of each life that was told."""
    path = tmp_path / "lives"
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []  # type: ignore[misc]


def mortal(tmp_path: Path, *, name: str = "box-0", **settings: Any) -> ChildSpec:
    return spec("service", "mortal", name=name, pool="box", lives=str(tmp_path / "lives"), epoch=1, **settings)


def test_a_service_that_died_comes_back_with_the_next_epoch(tmp_path: Path) -> None:
    """A new process; the broker was told of the death, and nothing of the pool's end."""
    line = supervise(tmp_path, [mortal(tmp_path, deaths=1)], lambda line: len(lives(tmp_path)) == 2)
    (first, second) = lives(tmp_path)
    assert (first[0], second[0]) == (1, 2)
    assert first[1] != second[1]
    assert line.told == [("box", "box-0", 1, "it exited with code 3")]
    assert line.gone == []
    assert not running(second[1])


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
        cluster = Cluster(
            Plan(spec("broker", "obedient"), (), ()), Context("test-run", "", tmp_path, limits, link=line)
        )
        cluster._serve("ipc://b")
        cluster._restarts.schedule(mortal(tmp_path, name="box-1", deaths=0), 3600.0)
        for _ in range(2):
            cluster._lost(mortal(tmp_path, deaths=0), "box-0", "it exited", became_ready=True)
            for _ in range(9):  # the line is told by a task of its own
                await asyncio.sleep(0)
            gone.append(len(line.gone))
            cluster._restarts.cancel()
        await cluster._close()

    gone: list[int] = []
    asyncio.run(main())
    assert gone == [0, 1]


def test_a_start_that_fails_counts(tmp_path: Path) -> None:
    """A process that dies or refuses before it is ready is tried again, up to the budget."""
    supervise(tmp_path, [mortal(tmp_path, deaths=1, then="refuse")], lambda line: line.gone, max_restarts=3)
    assert [epoch for epoch, _ in lives(tmp_path)] == [1, 2, 3, 4]


def test_a_start_that_hangs_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After `start_timeout_s`, and counts as a failed one."""
    line = supervise(
        tmp_path, [mortal(tmp_path, deaths=1, then="hang")], lambda line: line.gone, max_restarts=1, start_timeout_s=4.0
    )
    assert "box-0 said nothing within 4 s, killing it" in caplog.text
    assert line.told[-1] == ("box", "box-0", 2, "it was killed by SIGKILL")


def test_a_service_that_dies_during_the_start_comes_back(tmp_path: Path) -> None:
    """After it was ready, while an engine still loads: once the cluster serves."""
    engine = spec("engine", "mourning", lives=str(tmp_path / "lives"))
    supervise(tmp_path, [mortal(tmp_path, deaths=1)], lambda line: len(lives(tmp_path)) == 2, engine=engine)
    assert [epoch for epoch, _ in lives(tmp_path)] == [1, 2]


def test_a_process_that_cannot_be_spawned_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shortage of memory or file descriptors counts as a failed start."""
    init, failures = Child.__init__, [OSError("no memory")]

    def scarce(self: Child, made: ChildSpec, *rest: Any) -> None:
        if made.name == "box-0" and made.members[0].epoch == 2 and failures:
            raise failures.pop()
        init(self, made, *rest)

    monkeypatch.setattr(Child, "__init__", scarce)
    line = supervise(tmp_path, [mortal(tmp_path, deaths=1)], lambda line: len(lives(tmp_path)) == 2)
    assert [epoch for epoch, _ in lives(tmp_path)] == [1, 3]
    assert line.told[-1] == ("box", "box-0", 2, "it could not be started: no memory")


def test_nothing_is_started_again_while_the_cluster_ends(tmp_path: Path) -> None:
    """A restart that waits is forgotten, however long the end takes: here an engine is deaf for a second."""
    deaf = spec("engine", "deaf")
    line = supervise(tmp_path, [mortal(tmp_path, deaths=1)], lambda line: line.told, restart_wait_s=0.3, engine=deaf)
    assert len(lives(tmp_path)) == 1
    assert line.closed


def test_engines_and_workers_are_not_started_again(tmp_path: Path) -> None:
    """The last one's death ends the run, services or not."""
    cue = tmp_path / "cue"
    line = Line()

    async def main() -> None:
        plan = Plan(
            spec("broker", "obedient"),
            (spec("engine", "dying", cue=str(cue)),),
            (spec("worker", "obedient"),),
            (spec("service", "obedient"),),
        )
        cluster = Cluster(plan, Context("test-run", "", tmp_path, LauncherConfig(stop_timeout_s=1.0), link=line))
        await asyncio.wait_for(cluster.run(lambda _: cue.touch()), 2 * PATIENCE_S)

    with pytest.raises(MemberLost, match="no engine is left: it exited with code 3"):
        asyncio.run(main())
    assert [told[1] for told in line.told] == ["engine-0"]


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
