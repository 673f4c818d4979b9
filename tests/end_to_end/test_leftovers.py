"""Nothing is left: no process with the run id in its environment, no run directory, no shared memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.clusters import model_directory, sim_overrides
from support.processes import Popen, eventually, with_run_id

#: A trainer: launches, says who it is, gets one batch done, and then does as it was told.
TRAINER = """
import json, sys, time, zagent
if __name__ == "__main__":
    overrides, then = json.loads(sys.argv[1])
    manager = zagent.AgentLoopManager.launch(zagent.Config.load(overrides=overrides))
    launched = manager._launched
    print(json.dumps([manager.run_id, str(launched.run_dir)]), flush=True)
    prompts = [[{"role": "user", "content": "Say something long."}]] * 4
    with manager:
        stream = manager.stream(zagent.DataProto(non_tensor_batch={"raw_prompt": prompts}))
        print(next(stream).status, flush=True)
        exec(then)
"""

ENDINGS: dict[str, tuple[str, Callable[[subprocess.Popen[str]], object] | None, int]] = {
    "success": ("print(sum(o.status == 'ok' for o in stream))", None, 0),
    "exception": ("raise RuntimeError('a bug of the trainer')", None, 1),
    "ctrl-c": ("time.sleep(600)", lambda trainer: trainer.send_signal(signal.SIGINT), -signal.SIGINT),
    "kill": ("time.sleep(600)", lambda trainer: trainer.kill(), -signal.SIGKILL),
}

REAL = ["engine.count=1", "worker.count=1", "rollout.prompt_length=64", "rollout.response_length=40"]


def end(tmp_path: Path, overrides: list[str], ending: str) -> None:
    then, act, status = ENDINGS[ending]
    (tmp_path / "trainer.py").write_text(TRAINER)
    command = [sys.executable, str(tmp_path / "trainer.py"), json.dumps([overrides, then])]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        run_id, run_dir = json.loads(trainer.stdout.readline())
        assert trainer.stdout.readline() == "ok\n"
        assert len(with_run_id(run_id)) >= 4  # launcher, broker, engine, worker
        if act is not None:
            act(trainer)
        trainer.communicate(timeout=30)
        assert trainer.returncode == status
    within_s = 5.0 if ending == "kill" else 0.0  # in all other cases the trainer itself has seen to it
    eventually(lambda: not with_run_id(run_id), within_s)
    eventually(lambda: not Path(run_dir).exists(), within_s)
    assert [name for name in os.listdir("/dev/shm") if run_id in name] == []


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_simulated_engines(tmp_path: Path, ending: str) -> None:
    """After success, an exception, Ctrl-C, and 5 s after kill -9 of the trainer."""
    end(tmp_path, sim_overrides(tmp_path, "engine.sim.decode_tokens_per_s=100"), ending)


@pytest.mark.sglang
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ending", ["ctrl-c", "kill"])
def test_real_engine(tmp_path: Path, ending: str) -> None:
    """The same with SGLang's own processes, while it generates."""
    end(tmp_path, [f"logs.dir={tmp_path / 'logs'}", *REAL], ending)


SERVICES = ["services.sandbox.target=examples.services.sandbox.Sandbox", "services.judge.engine.kind=sim"]


@pytest.mark.parametrize("ending", ["ctrl-c", "kill"])
def test_services(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox whose code runs in a session of its own when the end comes, and a judge."""
    running = "asyncio.run(manager.services['sandbox'].run('import time; time.sleep(600)', limit=600))"
    monkeypatch.setitem(ENDINGS, ending, (f"import asyncio; {running}", *ENDINGS[ending][1:]))
    judge = f"services.judge.model.path={model_directory(tmp_path / 'judge')}"
    end(tmp_path, sim_overrides(tmp_path, *SERVICES, judge, "engine.sim.decode_tokens_per_s=100"), ending)
