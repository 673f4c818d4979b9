"""One child: armed, ready or dead, and gone with all it started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import bootstrap, processes
from launcher import child as child_module
from launcher.child import Child, describe
from launcher.health import Signs
from support.processes import PATIENCE_S, RUN_ID, eventually, running, spec
from zagent.errors import ConfigError, StartupError


async def _ended(child: Child) -> int:
    return await asyncio.wait_for(asyncio.shield(child.exited), PATIENCE_S)


async def _ready(child: Child) -> Any:
    return await asyncio.wait_for(child.ready, PATIENCE_S)


async def _until(holds: Callable[[], Any]) -> None:
    await asyncio.to_thread(eventually, holds)


def _with_child(tmp_path: Path, work: Any, entry: str, **settings: Any) -> Any:
    """Run ``work(child)`` with a child of that kind, and make sure it is gone."""

    async def main() -> Any:
        child = Child(spec("engine", entry, **settings), tmp_path / "engine-0.log", RUN_ID)
        try:
            return await work(child)
        finally:
            child.kill()
            await _ended(child)

    return asyncio.run(main())


def test_ready_carries_the_rooms_info(tmp_path: Path) -> None:
    """A room that calls ready has its info in the child's ready future."""
    assert _with_child(tmp_path, _ready, "obedient", probe="abc")["tokenizer_probe"] == "abc"


def test_child_is_armed_before_its_room_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is there at exec, it leads its own session, is named, and has imported nothing heavy."""

    async def work(child: Child) -> Any:
        return await _ready(child)

    async def main() -> Any:
        made = spec("engine", "telling")
        made = type(made)(made.name, made.room, made.entry, {}, {**made.env, "CUDA_VISIBLE_DEVICES": "GPU-b,3"})
        child = Child(made, tmp_path / "log", RUN_ID)
        try:
            return await work(child)
        finally:
            child.kill()
            await _ended(child)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = asyncio.run(main())
    assert told == {
        "cuda": "GPU-b,3",
        "run_id": RUN_ID,
        "collected": [10_000, 10, 10],
        "own_session": True,
        "name": "engine-0",
        "heavy": [],
        "at_exec": ["CUDA_VISIBLE_DEVICES=GPU-b,3"],
    }


def test_spawning_leaves_the_launchers_environment_alone(tmp_path: Path) -> None:
    """The child's variables are gone from the launcher's environment once it is spawned."""
    import os

    _with_child(tmp_path, _ready, "obedient")
    assert "ZAGENT_CHILD" not in os.environ


def test_failed_start_names_child_error_and_log(tmp_path: Path) -> None:
    """A room that raises gives StartupError with its name, its exception and the end of its log."""
    with pytest.raises(
        StartupError, match=r"engine-0 did not become ready.*ValueError: the model is made of cheese"
    ) as e:
        _with_child(tmp_path, _ready, "crashing")
    assert "about to fail" in str(e.value)
    assert isinstance(e.value.__cause__, ValueError)


def test_death_before_ready_names_the_exit_code(tmp_path: Path) -> None:
    """A child that exits without a word gives StartupError with its exit code and last lines."""
    with pytest.raises(StartupError, match=r"engine-0 .*exited with code 7(?s:.*)last words"):
        _with_child(tmp_path, _ready, "exiting")


def test_return_before_ready_is_a_failed_start(tmp_path: Path) -> None:
    """A room that returns without having called ready did not start."""
    with pytest.raises(StartupError, match="exited with code 0"):
        _with_child(tmp_path, _ready, "returning")


def test_sigterm_ends_an_obedient_room(tmp_path: Path) -> None:
    """SIGTERM lets the room return, and the child exits with code 0."""

    async def work(child: Child) -> int:
        await _ready(child)
        child.terminate()
        return await _ended(child)

    assert _with_child(tmp_path, work, "obedient") == 0


def test_kill_takes_children_double_forks_and_forks_along(tmp_path: Path) -> None:
    """Whatever a child started is gone when it is, in other sessions and under other parents too."""
    pids = tmp_path / "pids"

    async def work(child: Child) -> int:
        await _ready(child)
        child.kill()
        return await _ended(child)

    assert _with_child(tmp_path, work, "fruitful", pids=str(pids)) == -9
    assert [pid for pid in map(int, pids.read_text().split()) if running(pid)] == []


def test_exit_is_seen_although_a_fork_lives_on(tmp_path: Path) -> None:
    """A forked grandchild that holds the child's pipes open does not hide the child's end, and goes as well."""
    pids = tmp_path / "pids"

    async def work(child: Child) -> int:
        await _ready(child)
        child.terminate()
        return await _ended(child)

    assert _with_child(tmp_path, work, "fruitful", pids=str(pids)) in (0, 1)
    assert [pid for pid in map(int, pids.read_text().split()) if running(pid)] == []


def test_forgotten_threads_do_not_keep_a_failed_room_alive(tmp_path: Path) -> None:
    """A room that raises while a thread still runs exits within the grace period, and its log says where it hung."""

    async def work(child: Child) -> int:
        await _ready(child)
        return await _ended(child)

    assert _with_child(tmp_path, work, "overstaying") == 1
    log = (tmp_path / "engine-0.log").read_text()
    assert "engine broken" in log
    assert "Timeout" in log


def test_a_child_that_cannot_be_watched_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many files are open for its pidfd: the error is raised, and no process stays behind (pytest looks)."""

    def refuse(_pid: int) -> int:
        raise OSError("too many open files")

    async def main() -> None:
        with pytest.raises(OSError, match="too many open files"):
            Child(spec("engine", "obedient"), tmp_path / "log", RUN_ID)

    monkeypatch.setattr(os, "pidfd_open", refuse)
    asyncio.run(main())


def test_spawning_from_a_thread_is_refused(tmp_path: Path) -> None:
    """A child would die with the thread that spawned it."""

    async def main() -> None:
        Child(spec("engine", "obedient"), tmp_path / "log", RUN_ID)

    async def elsewhere() -> None:
        await asyncio.to_thread(asyncio.run, main())

    with pytest.raises(RuntimeError, match="main thread"):
        asyncio.run(elsewhere())


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exited with code 0"), (86, "exited with code 86"), (-9, "killed by SIGKILL"), (-40, "killed by signal 40")],
)
def test_exit_codes_are_described(code: int, text: str) -> None:
    """An exit code reads as what happened."""
    assert text in describe(code)


def test_a_second_ready_is_refused() -> None:
    """A room becomes ready once."""
    import multiprocessing

    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours:
        reporter = bootstrap.Reporter(theirs)
        reporter.ready({})
        with pytest.raises(RuntimeError, match="twice"):
            reporter.ready({})


def test_log_lines_survive_the_child(tmp_path: Path) -> None:
    """What a child prints is in its log file."""
    _with_child(tmp_path, _ready, "obedient")
    assert "serving" in (tmp_path / "engine-0.log").read_text()


def test_a_configuration_that_the_room_refuses_is_its_own_error(tmp_path: Path) -> None:
    """As it was raised there: the message says it all, without log lines."""
    with pytest.raises(ConfigError) as e:
        _with_child(tmp_path, _ready, "refusing")
    assert str(e.value) == "no cheese here"


def test_a_death_is_known_before_its_remains_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the loop turns while they are waited for: to unmap the memory of a large engine takes seconds."""
    looks: list[bool] = []

    async def work(child: Child) -> None:
        await _ready(child)
        look = child._left_behind

        def slow() -> list[processes.Process]:
            looks.append(child.died.done())
            return look() if len(looks) > 3 else [me]

        me = processes.read(os.getpid())
        assert me is not None
        monkeypatch.setattr(processes, "kill", lambda _process: None)
        monkeypatch.setattr(child, "_left_behind", slow)
        os.kill(child.pid, signal.SIGKILL)
        assert await asyncio.wait_for(asyncio.shield(child.died), PATIENCE_S) == -9
        assert not child.exited.done()
        assert not child.serves
        turns = 0
        while not child.exited.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 3
        monkeypatch.undo()

    _with_child(tmp_path, work, "obedient")
    assert len(looks) > 3
    assert all(looks)


def test_a_child_that_was_reaped_by_others_is_seen(tmp_path: Path) -> None:
    """multiprocessing reaps whoever is dead when it starts another; to ask a reaped one to end is no error."""

    async def work(child: Child) -> int:
        await _ready(child)
        os.kill(child.pid, signal.SIGKILL)
        child._process.join()
        child.terminate()
        return await _ended(child)

    assert _with_child(tmp_path, work, "obedient") == -9


def test_a_child_is_heard_of_and_given_up_with_its_stacks(tmp_path: Path) -> None:
    """Its beats say what it is at; SIGABRT has it write where it hangs, and counts as its own doing."""

    async def work(child: Child) -> tuple[bool, str]:
        await _ready(child)
        await _until(lambda: child.signs().lag_s > 0)
        assert child.signs().what == "a tool"
        assert child.signs().silent_s < PATIENCE_S
        child.give_up("it hung")
        assert await _ended(child) == -signal.SIGABRT
        return child.crashed, child.end

    assert _with_child(tmp_path, work, "blocked") == (True, "it hung, and it was killed by SIGABRT")
    log = (tmp_path / "engine-0.log").read_text()
    assert "Aborted" in log
    assert "in blocked" in log


def test_one_that_is_deaf_to_sigabrt_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little later; it died by itself all the same."""
    monkeypatch.setattr(child_module, "ABORT_S", 0.1)

    async def work(child: Child) -> tuple[int, bool]:
        await _ready(child)
        child.give_up("it hung")
        return await _ended(child), child.crashed

    assert _with_child(tmp_path, work, "blocked", deaf=True) == (-9, True)


def test_one_that_was_stopped_is_killed_at_once(tmp_path: Path) -> None:
    """It cannot write stacks; and somebody else has done that."""

    async def work(child: Child) -> tuple[int, bool, str]:
        await _ready(child)
        os.kill(child.pid, signal.SIGSTOP)
        await _until(lambda: (found := processes.read(child.pid)) is not None and found.stopped)
        child.give_up("it hung")
        return await _ended(child), child.crashed, child.end

    expected = (-9, False, "it hung (it was stopped), and it was killed by SIGKILL")
    assert _with_child(tmp_path, work, "obedient") == expected


def test_one_that_closed_its_line_is_not_taken_for_dead(tmp_path: Path) -> None:
    """Nothing is known of it any more, and nothing is held against it."""

    async def work(child: Child) -> Signs:
        child._lag_s = 5.0
        await _ready(child)
        await _until(lambda: child._reports.closed)
        assert child.serves
        return child.signs()

    assert _with_child(tmp_path, work, "mute") == Signs(0.0)


def test_silence_counts_from_the_last_word(tmp_path: Path) -> None:
    """From ready on, then from each beat."""

    async def work(child: Child) -> None:
        await _ready(child)
        ready_at = child._heard
        assert ready_at is not None
        await _until(lambda: child._heard != ready_at)
        assert child.signs().silent_s == pytest.approx(child._loop.time() - (child._heard or 0.0), abs=1.0)

    _with_child(tmp_path, work, "obedient")
