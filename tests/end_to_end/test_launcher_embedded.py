"""The launcher as a trainer starts it: heard, ended, and gone when the trainer is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import rundir
from launcher.record import Record
from support import fake_launch
from support.processes import PATIENCE_S, eventually, running, with_run_id
from zagent.config import Config
from zagent.errors import ConfigError, ConnectionLost, PoolLost, StartupError
from zagent.trainer import embed
from zagent.trainer.embed import Launched, start_launcher

Start = Callable[..., Launched]

TRAINER = """
import json, os, sys, time
from launcher import rundir
from launcher.record import Record
from zagent.config import Config
from zagent.trainer.embed import start_launcher
if __name__ == "__main__":
    launched = start_launcher(Config.from_dict(json.loads(sys.argv[1])), sys.argv[2:])
    print(json.dumps([launched.run_id, str(launched.run_dir), launched.pid]), flush=True)
    {then}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Simulated engines, a directory that passes for a model, logs beside it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(fake_launch.__file__).parents[1])]))
    return Config.from_dict(
        {
            "model": {"path": str(model)},
            "engine": {"kind": "sim"},
            "logs": {"dir": str(tmp_path / "logs")},
            "launcher": {"start_timeout_s": 30, "stop_timeout_s": 1},
        }
    )


def command(broker: str = "endpointed", engine: str = "-", worker: str = "-") -> list[str]:
    return [sys.executable, fake_launch.__file__, broker, engine, worker, "--embedded"]


@pytest.fixture
def start(config: Config) -> Iterator[Start]:
    """Launches with these rooms, workers included; whatever the test does, it is ended."""
    made: list[Launched] = []

    def launch(*rooms: str, **overrides: Any) -> Launched:
        made.append(start_launcher(config.model_copy(update=overrides), command(*rooms)))
        made[-1].started.result(PATIENCE_S)
        return made[-1]

    yield launch
    for launched in made:
        launched.close()


def test_a_trainer_learns_where_the_cluster_is(start: Start, config: Config) -> None:
    """Endpoint in the run directory, logs where the configuration says, one file per child."""
    launched = start()
    assert launched.endpoint == f"ipc://{launched.run_dir}/b"
    assert launched.alive
    assert launched.exit_reason() is None
    assert launched.log_dir == Path(config.logs.dir or "") / launched.run_id
    names = {path.name for path in launched.log_dir.glob("*.log")}
    assert names == {"launcher.log", "broker.log", "engine-0.log", "engine-1.log", "worker-0.log", "worker-1.log"}


def test_every_process_carries_the_run_id_and_none_is_left_after_close(start: Start) -> None:
    """Launcher, broker, two engines, two workers, helpers: all found by the run id, none after close."""
    launched = start()
    assert launched.pid in with_run_id(launched.run_id)
    assert len(with_run_id(launched.run_id)) >= 6
    launched.close()
    assert with_run_id(launched.run_id) == []
    assert not launched.run_dir.exists()
    assert launched.log_dir.is_dir()
    assert not launched.alive
    assert launched.exit_reason() is None
    launched.close()


def test_engines_can_be_called_before_workers_are_there(config: Config) -> None:
    """Nobody who calls an engine waits for a worker; who waits for it when the cluster is closed is told so."""
    launched = start_launcher(config, command(worker="hanging"))
    assert launched.endpoint == f"ipc://{launched.run_dir}/b"
    assert not launched.started.done()
    launched.close()
    assert with_run_id(launched.run_id) == []
    with pytest.raises(ConnectionLost, match="closed while it started"):
        launched.started.result(PATIENCE_S)


def test_a_launcher_that_says_nothing_more_is_not_waited_for(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves, and is stopped before its workers are there: who waits for these is told so in time."""
    monkeypatch.setattr(embed, "START_MARGIN_S", 0.0)
    hurried = config.model_copy(update=limited(config, start_timeout_s=6.0))
    launched = start_launcher(hurried, command(worker="hanging"))
    try:
        os.kill(launched.pid, signal.SIGSTOP)
        with pytest.raises(StartupError, match="said nothing in time"):
            launched.started.result(PATIENCE_S)
        assert launched.alive
        os.kill(launched.pid, signal.SIGCONT)
    finally:
        launched.close()
    assert with_run_id(launched.run_id) == []


def test_a_worker_that_cannot_start_ends_what_serves(config: Config) -> None:
    """The reason is the launcher's own error, for who waits and for who asks."""
    launched = start_launcher(config, command(worker="refusing"))
    try:
        with pytest.raises(ConfigError, match="no cheese here") as caught:
            launched.started.result(PATIENCE_S)
        eventually(lambda: not launched.alive)
        assert launched.exit_reason() is caught.value
        assert with_run_id(launched.run_id) == []
    finally:
        launched.close()


def test_two_clusters_at_once(start: Start) -> None:
    """Neither disturbs the other."""
    first, second = start(), start()
    assert first.endpoint != second.endpoint
    first.close()
    assert second.alive
    assert len(with_run_id(second.run_id)) >= 6


def test_the_next_launcher_sweeps_what_a_dead_one_left(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run directory whose launcher is gone is removed at the next start."""
    with tempfile.TemporaryDirectory(prefix="zt-", dir="/tmp") as place:
        monkeypatch.setenv("TMPDIR", place)
        left = Path(place) / f"{rundir.PREFIX}left"
        left.mkdir()
        mine = Record.own("20200101-000000-00c0ffee")
        replace(mine, start_time=mine.start_time - 1).save(left)
        start().close()
        assert not left.exists()


def test_strays_are_gone_after_close(start: Start) -> None:
    """What engines started goes with them, wherever it fled."""
    launched = start("endpointed", "straying")
    pids = [int(pid) for pid in (launched.run_dir / "pids").read_text().split()]
    assert len(pids) == 6
    launched.close()
    assert [pid for pid in pids if running(pid)] == []


def test_a_failed_start_is_the_launchers_own_error(start: Start, config: Config) -> None:
    """Typed, with the child's name and last lines; nothing is left."""
    with pytest.raises(StartupError, match=r"worker-\d did not become ready(?s:.*)made of cheese"):
        start("endpointed", "-", "crashing")
    assert [pid for run in os.listdir(config.logs.dir) for pid in with_run_id(run)] == []


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("rollout", {"prompt_length": 200_000}, "beyond the context of 131072"),
        ("model", {"path": "/no/such/model"}, "/no/such/model"),
    ],
)
def test_configuration_errors_come_back_typed(
    start: Start, config: Config, section: str, change: dict[str, Any], message: str
) -> None:
    """ConfigError, as if it had been found in the trainer; no child has been started."""
    with pytest.raises(ConfigError, match=message):
        start(**{section: getattr(config, section).model_copy(update=change)})
    assert not Path(config.logs.dir or "").exists()


def test_a_launcher_that_dies_without_a_word_does_not_hang_the_trainer(config: Config) -> None:
    """The error has its exit code and what it wrote."""
    dying = [sys.executable, "-c", "import sys; print('out of luck', file=sys.stderr); sys.exit(5)"]
    with pytest.raises(StartupError, match=r"exited with code 5 without a word(?s:.*)out of luck"):
        start_launcher(config, dying)


def limited(config: Config, **limits: Any) -> dict[str, Any]:
    """The launcher's section with these."""
    return {"launcher": config.launcher.model_copy(update=limits)}


def test_death_of_the_last_engine_is_the_exit_reason(start: Start, config: Config) -> None:
    """The trainer can ask why its cluster went away."""
    launched = start("endpointed", "dying_by_cue", **limited(config, max_restarts=0))
    (launched.run_dir / "cue").touch()
    eventually(lambda: not launched.alive)
    reason = launched.exit_reason()
    assert isinstance(reason, PoolLost)
    assert "exited with code 3" in str(reason)
    assert launched.exit_reason() is reason
    assert with_run_id(launched.run_id) == []


@pytest.mark.parametrize("name", ["broker", "worker-0"])
def test_whoever_is_killed_comes_back(start: Start, name: str) -> None:
    """The cluster goes on at the same place, with a process more in that log; then nothing is left of either life."""
    launched = start()
    log = launched.log_dir / f"{name}.log"
    (pid,) = named(launched.run_id, name)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: log.read_text().count("serving") == 2)
    assert launched.alive
    assert Path(launched.endpoint.removeprefix("ipc://")).exists()
    launched.close()
    assert with_run_id(launched.run_id) == []
    assert launched.exit_reason() is None


def named(run_id: str, name: str) -> list[int]:
    """Pids of the child of that name."""
    mark = f"ZAGENT_CHILD={name}\0"
    return [pid for pid in with_run_id(run_id) if mark in Path(f"/proc/{pid}/environ").read_text()]


def test_kill_of_the_launcher_takes_everything_along(start: Start) -> None:
    """Children die with it, strays and the run directory are cleaned up within five seconds."""
    launched = start("endpointed", "straying")
    pids = [int(pid) for pid in (launched.run_dir / "pids").read_text().split()]
    os.kill(launched.pid, signal.SIGKILL)
    eventually(lambda: not with_run_id(launched.run_id), within_s=5.0)
    eventually(lambda: not launched.run_dir.exists(), within_s=5.0)
    eventually(lambda: not [pid for pid in pids if running(pid)], within_s=1.0)
    eventually(lambda: not launched.alive)
    assert isinstance(launched.exit_reason(), ConnectionLost)
    assert "killed by SIGKILL" in str(launched.exit_reason())


@pytest.mark.parametrize("waits", [False, True])
def test_kill_of_the_launcher_during_a_restart(start: Start, config: Config, waits: bool) -> None:
    """While an engine starts again, and while it waits to be: nothing is left, and nothing is started any more."""
    launched = start("endpointed", "restarting", **limited(config, restart_wait_s=60.0 if waits else 0.0))
    (launched.run_dir / "cue").touch()
    lives, log = launched.run_dir / "lives", launched.log_dir / "launcher.log"
    eventually(lambda: "is started again in 60 s" in log.read_text() if waits else len(lives.read_text().split()) > 4)
    os.kill(launched.pid, signal.SIGKILL)
    nothing_left(launched.run_id, launched.run_dir)


def test_the_next_start_sweeps_what_a_dead_janitor_could_not(start: Start) -> None:
    """Launcher and janitor are killed together: processes, run directory and shared memory go at the next start."""
    launched = start("endpointed", "forking")
    memory = rundir.SHARED_MEMORY / f"{rundir.PREFIX}{launched.run_id}-weights"
    memory.touch()
    forks = [int(pid) for pid in (launched.run_dir / "pids").read_text().split()]
    for pid in (*janitors(launched.run_id), launched.pid):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not launched.alive)
    assert all(running(fork) for fork in forks)
    assert memory.exists()
    assert launched.run_dir.exists()
    start().close()
    assert with_run_id(launched.run_id) == []
    assert not memory.exists()
    assert not launched.run_dir.exists()


def janitors(run_id: str) -> list[int]:
    return [p for p in with_run_id(run_id) if b"launcher.janitor" in Path(f"/proc/{p}/cmdline").read_bytes()]


def trainer(tmp_path: Path, config: Config, then: str, *rooms: str) -> tuple[subprocess.Popen[str], str, Path, int]:
    """A trainer process whose cluster serves: process, run id, run directory, launcher's pid."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER.format(then=then))
    arguments = [sys.executable, str(script), json.dumps(config.to_dict()), *command(*rooms)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    run_id, run_dir, launcher = json.loads(process.stdout.readline())
    return process, run_id, Path(run_dir), launcher


def nothing_left(run_id: str, run_dir: Path, within_s: float = 5.0) -> None:
    eventually(lambda: not with_run_id(run_id), within_s)
    eventually(lambda: not run_dir.exists(), within_s)
    assert list(Path("/dev/shm").glob(f"zagent-{run_id}*")) == []


def test_kill_of_the_trainer_takes_everything_along(tmp_path: Path, config: Config) -> None:
    """Five seconds after kill -9 nothing is left, even with engines deaf to SIGTERM."""
    process, run_id, run_dir, launcher = trainer(tmp_path, config, "time.sleep(600)", "endpointed", "deaf")
    with process:
        assert len(with_run_id(run_id)) >= 6
        process.kill()
        nothing_left(run_id, run_dir)
    eventually(lambda: not running(launcher), within_s=1.0)  # an exiting process loses its environment first


def test_kill_of_a_trainer_during_a_restart(tmp_path: Path, config: Config) -> None:
    """An engine that starts again goes as well, and is not started a third time."""
    then = "time.sleep(600)"
    process, run_id, run_dir, _ = trainer(tmp_path, config, then, "endpointed", "restarting")
    with process:
        (run_dir / "cue").touch()
        eventually(lambda: len((run_dir / "lives").read_text().split()) > 4)
        process.kill()
        nothing_left(run_id, run_dir)


def test_kill_of_a_trainer_with_forked_data_loaders(tmp_path: Path, config: Config) -> None:
    """Forks that live on, with the trainer's pipes, do not keep the cluster: a data loader's workers, deaf to SIGTERM,
    and one in a session of its own."""
    then = """
    import multiprocessing, signal
    def work(own_session):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if own_session: os.setsid()
        time.sleep(600)
    loaders = [multiprocessing.get_context("fork").Process(target=work, args=(own,)) for own in (0, 0, 1)]
    for loader in loaders: loader.start()
    print(*[loader.pid for loader in loaders], flush=True)
    time.sleep(600)"""
    process, run_id, run_dir, _ = trainer(tmp_path, config, then)
    with process:
        assert process.stdout is not None
        forks = [int(pid) for pid in process.stdout.readline().split()]
        try:
            process.kill()
            nothing_left(run_id, run_dir)
            assert len(forks) == 3
            assert all(running(fork) for fork in forks)
        finally:
            for fork in forks:
                os.kill(fork, signal.SIGKILL)


def test_an_exception_in_the_trainer_leaves_nothing(tmp_path: Path, config: Config) -> None:
    """The cluster is ended when the interpreter leaves."""
    process, run_id, run_dir, _ = trainer(tmp_path, config, "raise SystemExit(3)")
    with process:
        assert process.wait(20) == 3
        nothing_left(run_id, run_dir, within_s=0.0)


def test_a_fork_that_leaves_does_not_end_the_cluster(tmp_path: Path, config: Config) -> None:
    """atexit runs in forked children as well; the cluster belongs to the trainer."""
    then = "pid = os.fork(); sys.exit() if not pid else os.waitpid(pid, 0); print(launched.alive)"
    process, _, _, _ = trainer(tmp_path, config, then)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "True"
