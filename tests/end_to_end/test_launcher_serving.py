"""`python -m zagent.launch` on its own: serves until Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import fake_launch
from support.processes import Popen, eventually, with_run_id


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    return [f"model.path={model}", "engine.kind=sim", f"logs.dir={tmp_path / 'logs'}", "launcher.stop_timeout_s=1"]


@pytest.fixture
def serving(overrides: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A launcher with tiny rooms, in a process group of its own."""
    path = {"PYTHONPATH": str(Path(fake_launch.__file__).parents[1])}
    arguments = [sys.executable, fake_launch.__file__, "endpointed", "deaf", "-", *overrides]
    with Popen(
        arguments, stdout=subprocess.PIPE, env={**os.environ, **path}, text=True, start_new_session=True
    ) as process:
        yield process
        if process.poll() is None:
            process.terminate()
            process.wait(20)


def announced(process: subprocess.Popen[str]) -> tuple[str, Path]:
    """Run id and run directory, from the line it prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"zagent serves at ipc://(\S+)/b \(Ctrl-C ends it; logs in (\S+)\)\n", line)
    assert found is not None, line
    return Path(found[2]).name, Path(found[1])


def test_ctrl_c_ends_it_and_leaves_nothing(serving: subprocess.Popen[str]) -> None:
    """Exit status 0; no process, no run directory."""
    run_id, run_dir = announced(serving)
    assert len(with_run_id(run_id)) >= 5
    os.killpg(serving.pid, signal.SIGINT)
    assert serving.wait(20) == 0
    assert with_run_id(run_id) == []
    assert not run_dir.exists()


def test_ctrl_c_twice_leaves_nothing_either(serving: subprocess.Popen[str]) -> None:
    """Impatience does not cost the clean-up."""
    run_id, run_dir = announced(serving)
    os.killpg(serving.pid, signal.SIGINT)
    os.killpg(serving.pid, signal.SIGINT)
    assert serving.wait(20) == 0
    eventually(lambda: not with_run_id(run_id))
    assert not run_dir.exists()


def test_a_refused_configuration_is_one_line(overrides: list[str], tmp_path: Path) -> None:
    """Status 2, no traceback, nothing started: `python -m zagent.launch` as users call it."""
    arguments = [sys.executable, "-m", "zagent.launch", *overrides, "rollout.response_length=1000000"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"zagent: rollout.prompt_length=1024 .* beyond the context of 131072 tokens.*\n", done.stderr)
    assert not (tmp_path / "logs").exists()


def test_a_very_long_tmpdir_still_serves(overrides: list[str], tmp_path: Path) -> None:
    """The run directory goes to /tmp, and the log says why."""
    deep = tmp_path / ("x" * 150)
    deep.mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(fake_launch.__file__).parents[1]), "TMPDIR": str(deep)}
    arguments = [sys.executable, fake_launch.__file__, "endpointed", "-", "-", *overrides]
    with Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True) as process:
        run_id, run_dir = announced(process)
        process.terminate()
        _, log = process.communicate(timeout=20)
    assert run_dir.parent == Path("/tmp")
    assert "too long for the sockets" in log
    assert with_run_id(run_id) == []
