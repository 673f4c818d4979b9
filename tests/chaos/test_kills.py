"""One kill each, with work in flight: who hears of it, and how long it took (printed; nothing depends on a clock)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zagent
from benchmarks import procfs
from support.clusters import questions, sim_config, sim_overrides
from support.processes import Popen, eventually, with_run_id

#: A row takes a second: long enough to be killed in.
SPEED = "engine.sim.decode_tokens_per_s=32"
#: A row takes for ever.
NEVER = "engine.sim.decode_tokens_per_s=0.01"


class Rows:
    """A batch under way; ``outcomes`` as they come."""

    def __init__(self, manager: zagent.AgentLoopManager, count: int) -> None:
        self.outcomes: list[zagent.Outcome] = []
        self._thread = threading.Thread(target=lambda: self.outcomes.extend(manager.stream(questions(count))))
        self._thread.start()

    def end(self) -> list[zagent.Outcome]:
        """All of them."""
        self._thread.join()
        return self.outcomes


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[zagent.AgentLoopManager]:
    """Of two engines and two workers."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path, "worker.count=2", SPEED)) as launched:
        yield launched


def of_pool(manager: zagent.AgentLoopManager, pool: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = manager.status()["pools"][pool]
    return found


def all_busy(manager: zagent.AgentLoopManager) -> bool:
    return all(m["in_flight"] for pool in ("engine", "worker") for m in of_pool(manager, pool).values())


def kill(pid: int, known: Callable[[], Any]) -> Any:
    """SIGKILL, and wait until it is ``known``; prints how long that took."""
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    result = eventually(known)
    print(f"known after {time.monotonic() - killed:.2f} s")
    return result


def is_back(manager: zagent.AgentLoopManager, pool: str, name: str) -> bool:
    """In its second life."""
    member = of_pool(manager, pool).get(name)
    return member is not None and (member["state"], member["epoch"]) == ("ready", 2)


@pytest.mark.parametrize("pool", ["engine", "worker"])
def test_a_member(manager: zagent.AgentLoopManager, pool: str) -> None:
    """The broker knows; the rows aboard run on elsewhere (a worker's from the start, as attempt 2); it comes back."""
    rows = Rows(manager, 16)
    eventually(lambda: all_busy(manager))
    name, member = next(iter(of_pool(manager, pool).items()))
    kill(
        member["pid"],
        lambda: of_pool(manager, pool)[name] != member and of_pool(manager, pool)[name]["state"] == "dead",
    )
    outcomes = rows.end()
    assert [outcome.status for outcome in outcomes] == ["ok"] * 16
    assert sorted(outcome.index for outcome in outcomes) == list(range(16))
    assert {outcome.attempt for outcome in outcomes} == ({1, 2} if pool == "worker" else {1})
    eventually(lambda: is_back(manager, pool, name))


def test_the_broker(manager: zagent.AgentLoopManager) -> None:
    """A new one serves at the same place; no member, no row and no trainer has to begin again."""
    before = {name: member["pid"] for pool in ("engine", "worker") for name, member in of_pool(manager, pool).items()}
    rows = Rows(manager, 16)
    eventually(lambda: all_busy(manager))
    broker = pid_of(manager, "broker")
    launcher = procfs.parent_of(broker)
    assert launcher is not None
    kill(broker, lambda: procfs.child_of(launcher, "broker") not in (None, broker))
    outcomes = rows.end()
    assert [(outcome.status, outcome.attempt) for outcome in outcomes] == [("ok", 1)] * 16
    after = {name: member["pid"] for pool in ("engine", "worker") for name, member in of_pool(manager, pool).items()}
    assert after == before


def pid_of(manager: zagent.AgentLoopManager, child: str) -> int:
    return next(pid for pid, name in procfs.of_run(manager.run_id).items() if name == child)


def test_the_launcher(tmp_path: Path) -> None:
    """Every row fails and says so, and nothing of the cluster is left."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path, NEVER)) as manager:
        rows = Rows(manager, 4)
        eventually(lambda: sum(engine["in_flight"] for engine in of_pool(manager, "engine").values()) == 4)
        launcher = procfs.parent_of(pid_of(manager, "broker"))
        assert launcher is not None
        kill(launcher, lambda: len(rows.outcomes) == 4)
        assert {(outcome.status, type(outcome.error)) for outcome in rows.end()} == {("failed", zagent.ConnectionLost)}
        assert "killed by SIGKILL" in str(rows.outcomes[0].error)
        gone(manager.run_id, Path(manager.endpoint.removeprefix("ipc://")).parent)


#: A trainer with a forked data loader, which outlives it.
TRAINER = """
import json, os, sys, threading, time, zagent
from support.clusters import questions
if __name__ == "__main__":
    manager = zagent.AgentLoopManager.launch(zagent.Config.load(overrides=json.loads(sys.argv[1])))
    loader = os.fork()
    if not loader:
        time.sleep(600)
    threading.Thread(target=lambda: list(manager.stream(questions(4)))).start()
    while sum(engine["in_flight"] for engine in manager.status()["pools"]["engine"].values()) < 4:
        time.sleep(0.02)
    print(json.dumps([manager.run_id, manager.endpoint, loader]), flush=True)
"""


def test_the_trainer(tmp_path: Path) -> None:
    """Nothing of the cluster is left, though a forked data loader holds all of the trainer's pipes."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(tmp_path / "trainer.py"), json.dumps(sim_overrides(tmp_path, NEVER))]
    with Popen(command, stdout=subprocess.PIPE, env=env, text=True) as trainer:
        assert trainer.stdout is not None
        run_id, endpoint, loader = json.loads(trainer.stdout.readline())
        try:
            assert len(with_run_id(run_id)) >= 5  # launcher, broker, two engines, worker
            kill(trainer.pid, lambda: not with_run_id(run_id))
            gone(run_id, Path(endpoint.removeprefix("ipc://")).parent)
        finally:
            os.kill(loader, signal.SIGKILL)


def gone(run_id: str, run_dir: Path) -> None:
    eventually(lambda: not with_run_id(run_id))
    eventually(lambda: not run_dir.exists())
    assert list(procfs.SHARED_MEMORY.glob(f"*{run_id}*")) == []
