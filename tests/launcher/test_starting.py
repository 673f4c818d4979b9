"""A child under another interpreter is a child like any other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import entry, processes, tracker
from launcher.child import Child
from launcher.heartbeat import OUT_OF_MEMORY
from support.environments import environment
from support.processes import PATIENCE_S, RUN_ID, Popen, eventually, running, spec
from zagent.errors import ConfigError, StartupError

Work = Callable[[Child], Any]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return environment(tmp_path_factory.mktemp("other") / "env")


def with_child(tmp_path: Path, python: str, work: Work, name: str, *, limit: int = 0, **settings: Any) -> Any:
    """``work(child)`` of a child under ``python`` that runs the room ``name``; afterwards it is gone."""

    async def main() -> Any:
        room = name if ":" in name else f"support.rooms:{name}"
        made = replace(spec("engine", "", **settings), entry=room, python=python, memory_limit=limit)
        child = Child(made, tmp_path / "engine-0.log", RUN_ID)
        try:
            return await work(child)
        finally:
            child.kill()
            await ended(child)

    return asyncio.run(main())


async def ended(child: Child) -> int:
    return await asyncio.wait_for(asyncio.shield(child.exited), PATIENCE_S)


async def ready(child: Child) -> Any:
    return await asyncio.wait_for(child.ready, PATIENCE_S)


def test_it_runs_there_with_its_own_modules(tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that another environment's variables name; programs beside it come first."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    told = with_child(tmp_path, python, ready, "placed")
    assert told["executable"] == python
    assert told["prefix"] == str(Path(python).parents[1])
    assert str(tmp_path / "elsewhere") not in told["path"]
    assert told["programs"] == str(Path(python).parent)
    assert os.environ["PYTHONPATH"] == str(tmp_path / "elsewhere")


def test_it_is_armed_before_its_room_runs(tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment at exec, session, name, and nothing heavy imported: as of spawned ones."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = with_child(tmp_path, python, ready, "telling")
    assert told == {
        "cuda": None,
        "run_id": RUN_ID,
        "collected": [10_000, 10, 10],
        "own_session": True,
        "name": "engine-0",
        "heavy": [],
        "at_exec": [],
    }


def test_its_orders_are_read_by_nobody_else(tmp_path: Path, python: str) -> None:
    """They hold the join secret: the command line says only which descriptors it has."""

    async def work(child: Child) -> list[bytes]:
        await ready(child)
        return processes.command_line(child.pid)

    said = with_child(tmp_path, python, work, "obedient", secret="s3cret")
    assert said[:4] == [python.encode(), b"-P", b"-m", b"launcher.entry"]
    assert all(part.isdigit() for part in said[4:-1])
    assert said[-1] == b""


def test_it_obeys_and_logs(tmp_path: Path, python: str) -> None:
    """SIGTERM lets the room return; what it printed is in its log."""

    async def work(child: Child) -> int:
        await ready(child)
        child.terminate()
        return await ended(child)

    assert with_child(tmp_path, python, work, "obedient") == 0
    assert "serving" in (tmp_path / "engine-0.log").read_text()


def test_its_failures_are_told(tmp_path: Path, python: str) -> None:
    """An exception by the line, an exit code by the kernel, each with the end of its log; a refused configuration as it
    was raised there."""
    with pytest.raises(StartupError, match=r"ValueError: the model is made of cheese(?s:.*)about to fail"):
        with_child(tmp_path, python, ready, "crashing")
    with pytest.raises(StartupError, match=r"exited with code 7(?s:.*)last words"):
        with_child(tmp_path, python, ready, "exiting")
    with pytest.raises(ConfigError, match=r"^no cheese here$"):
        with_child(tmp_path, python, ready, "refusing")


def test_what_goes_wrong_before_it_can_speak_is_quoted(tmp_path: Path) -> None:
    """An interpreter that lost zagent since it was asked: the reason is in the log, and so in the error."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(StartupError, match=r"exited with code 1(?s:.*)No module named"):
        with_child(tmp_path, str(bare), ready, "obedient")


def test_an_interpreter_that_vanished_is_no_child(tmp_path: Path) -> None:
    """`OSError`, as where there is no memory: the launcher tries again, and gives up in the end."""

    async def main() -> None:
        with pytest.raises(FileNotFoundError):
            Child(replace(spec("engine", "obedient"), python=str(tmp_path / "gone")), tmp_path / "log", RUN_ID)

    asyncio.run(main())


def test_it_beats(tmp_path: Path, python: str) -> None:
    """And its beats say what it is at; SIGABRT has it write its stacks."""

    async def work(child: Child) -> str:
        await ready(child)
        await asyncio.to_thread(eventually, lambda: child.signs().lag_s > 0)
        assert child.signs().what == "a tool"
        child.give_up("it hung")
        await ended(child)
        return child.end

    assert with_child(tmp_path, python, work, "blocked") == "it hung, and it was killed by SIGABRT"
    assert "in blocked" in (tmp_path / "engine-0.log").read_text()


def test_its_memory_is_limited(tmp_path: Path, python: str) -> None:
    """By the same thread, with the same exit code."""
    work = "support.living_rooms:flooding"
    assert with_child(tmp_path, python, ended, work, limit=300_000_000) == OUT_OF_MEMORY


def test_all_that_it_started_goes_with_it(tmp_path: Path, python: str) -> None:
    """In other sessions and under other parents, too."""
    pids = tmp_path / "pids"

    async def work(child: Child) -> int:
        await ready(child)
        child.kill()
        return await ended(child)

    assert with_child(tmp_path, python, work, "fruitful", pids=str(pids)) == -signal.SIGKILL
    assert [pid for pid in map(int, pids.read_text().split()) if running(pid)] == []


LAUNCHER = """
import asyncio, os, sys
from dataclasses import replace
from pathlib import Path
from launcher.child import Child
from support.processes import spec

async def main():
    child = Child(replace(spec("engine", "obedient", run_id="r"), python=sys.argv[1]), Path(sys.argv[2]), "r")
    await child.ready
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_it_dies_with_its_launcher(tmp_path: Path, python: str) -> None:
    """At once, by the kernel, whatever it is doing."""
    command = [python, "-c", LAUNCHER, python, str(tmp_path / "log")]
    with Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        assert running(child)
        launcher.kill()
    eventually(lambda: not running(child))


def test_what_it_leaked_is_removed_by_the_launchers_tracker(tmp_path: Path, python: str) -> None:
    """One of its own would be killed with it before it could."""
    told = with_child(tmp_path, python, ready, "leaking")
    assert told["children"] == []
    file = Path("/dev/shm") / f"sem.{told['semaphore'].removeprefix('/')}"
    assert file.exists()
    tracker.end()
    assert not file.exists()


def test_another_version_of_zagent_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both versions and both interpreters; where it was told the launcher's, it says nothing."""
    theirs = {"version": "0.0.9", "python": "/trainer/bin/python"}
    with pytest.raises(ConfigError) as e:
        entry.check_same(theirs, "engine-3")
    for part in ("engine-3", "0.0.9", "/trainer/bin/python", entry.__version__, sys.executable):
        assert part in str(e.value)
    entry.check_same(entry.signature(), "engine-3")


def test_a_version_that_differs_is_a_refused_configuration(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked before, so somebody has changed the environment since; it runs nothing then."""
    monkeypatch.setattr("launcher.starting.signature", lambda: {"version": "9", "python": "/trainer/python"})
    with pytest.raises(ConfigError, match=r"engine-0 would run zagent .* started by zagent 9 under /trainer/python"):
        with_child(tmp_path, python, ready, "obedient")
