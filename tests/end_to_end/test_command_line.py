"""`python -m zagent.launch` on simulated engines, as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import zagent
from support.clusters import questions, sim_overrides
from support.processes import Popen

LAUNCH = [sys.executable, "-m", "zagent.launch"]


def launch(directory: Path, *arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False)


@contextmanager
def ending(server: subprocess.Popen[str]) -> Iterator[None]:
    """Ctrl-C for ``server`` at the end, however that comes."""
    try:
        yield
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)


def test_batch_job(tmp_path: Path) -> None:
    """Every prompt rollout.n times, one JSON line each with the contract's keys, a table at the end."""
    lines = [
        {"prompt": "One?", "uid": "a", "data_source": "made", "level": 3},
        {"raw_prompt": [{"role": "user", "content": "Two?"}]},
        {"prompt": [{"role": "user", "content": "Three?"}], "reward_model": {"ground_truth": "3"}},
    ]
    (tmp_path / "P.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    overrides = sim_overrides(tmp_path, "rollout.n=4", "engine.count=2", "worker.count=2")
    done = launch(tmp_path, "--prompts", "P.jsonl", "--out", "O.jsonl", *overrides)
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "O.jsonl").read_text().splitlines()]
    assert len(outcomes) == 12
    assert {(o["status"], o["attempt"], o["num_turns"], len(o["response_ids"])) for o in outcomes} == {("ok", 1, 2, 32)}
    assert sorted(o["sample"] for o in outcomes if o["uid"] == "a") == [0, 1, 2, 3]
    assert {(o["data_source"], o["level"]) for o in outcomes if o["uid"] == "a"} == {("made", 3)}
    assert all(len(o["response_logprobs"]) == len(o["response_mask"]) == 32 for o in outcomes)
    assert all(o["messages"][-1]["role"] == "assistant" for o in outcomes)
    assert "12 (12 ok)" in done.stdout
    assert "engine-1" in done.stdout


def test_demo_on_simulated_engines(tmp_path: Path) -> None:
    """Both rounds end well, though simulated engines say nothing right; outcomes lie below the current directory."""
    done = launch(
        tmp_path, "--demo", "engine.kind=sim", "engine.count=2", "worker.count=1", f"logs.dir={tmp_path}/logs"
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "outputs" / "demo.jsonl").read_text().splitlines()]
    assert len(outcomes) == 128
    assert {outcome["status"] for outcome in outcomes} == {"ok"}
    assert "2 of 2 used" in done.stdout
    assert "answers are right, through the tool" in done.stdout


@pytest.mark.sglang
@pytest.mark.timeout(200)
def test_demo(tmp_path: Path) -> None:
    """As `make demo`: real engines, the tiny model, questions of the hour; its own checks are the test."""
    done = launch(tmp_path, "--demo", "engine.count=2", "worker.count=1", f"logs.dir={tmp_path}/logs", timeout=180)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT" not in done.stdout


def test_serve_over_tcp(tmp_path: Path) -> None:
    """Prints its endpoint; a trainer elsewhere connects with nothing but that; several engines share a process."""
    overrides = sim_overrides(
        tmp_path,
        "broker.endpoint=tcp://127.0.0.1:0",
        "broker.insecure=true",
        "engine.count=6",
        "engine.sim.per_process=4",
    )
    with Popen([*LAUNCH, *overrides], stdout=subprocess.PIPE, text=True, env=os.environ) as server:
        assert server.stdout is not None
        endpoint = server.stdout.readline().split()[3]
        with ending(server), zagent.AgentLoopManager.connect(endpoint) as manager:
            out = manager.generate_sequences(questions(30))
            assert np.all(out.non_tensor_batch["error"] == None)  # noqa: E711 (element by element)
            engines = manager.status()["pools"]["engine"]
            assert sorted(engines) == [f"engine-{i}" for i in range(6)]
            assert sum(engine["total"] for engine in engines.values()) == 30
            assert min(engine["total"] for engine in engines.values()) > 0
            assert len({engine["pid"] for engine in engines.values()}) == 2
        assert server.returncode == 0
