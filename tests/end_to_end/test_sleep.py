"""Engines that sleep: the order of things through a manager, on simulated engines, which release nothing; and who dies
meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import zagent
from support.processes import Popen, child_name, eventually, with_run_id
from zagent.trainer.checkpoint import forms

OPTIONS = (
    *("engine.kind=sim", "model.path=tiny", "engine.count=2", "worker.count=1", "engine.mode=hybrid"),
    *("rollout.prompt_length=64", "rollout.response_length=16"),
)


#: Asleep until it is killed, or until it is told to leave.
TRAINER = """
import sys, zagent
with zagent.AgentLoopManager.connect(sys.argv[1]) as manager:
    manager.sleep()
    print("asleep", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def manager() -> Iterator[zagent.AgentLoopManager]:
    with zagent.AgentLoopManager.launch(zagent.Config.load(overrides=list(OPTIONS))) as made:
        yield made


def rows(count: int = 4) -> zagent.DataProto:
    return zagent.DataProto(non_tensor_batch={"raw_prompt": [[{"role": "user", "content": "1 plus 1?"}]] * count})


def weights(manager: zagent.AgentLoopManager) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(form.shape) for name, form in forms(Path(manager.config.model.path)).items()}


def test_the_whole_cycle(manager: zagent.AgentLoopManager) -> None:
    """Asleep, weights back, updated, KV back: only then do calls pass, on the new weights."""
    assert manager.sleep() == {name: {"weights": 0, "kv_cache": 0} for name in ("engine-0", "engine-1")}
    assert manager.status()["gated"] == ["engine"]
    manager.wake_up(["weights"])
    before = manager.version
    manager.update_weights(weights(manager))
    assert manager.status()["gated"] == ["engine"]
    manager.wake_up(["kv_cache"])
    assert manager.status()["gated"] == []
    out = manager.generate_sequences(rows())
    assert set(out.batch["rollout_versions"][out.batch["response_mask"] == 1].tolist()) == {before + 1}


def test_weights_that_were_lost_are_waited_for(manager: zagent.AgentLoopManager) -> None:
    """All memory is back, but calls pass only after the update."""
    manager.sleep(2)
    manager.wake_up()
    assert manager.status()["gated"] == ["engine"]
    manager.update_weights(weights(manager))
    assert manager.status()["gated"] == []
    assert manager.generate_sequences(rows()).meta_info["failed"] == 0


def test_kv_alone_comes_back_by_itself(manager: zagent.AgentLoopManager) -> None:
    """Level 1 leaves the weights where they are."""
    manager.sleep(1)
    with pytest.raises(zagent.StateError, match="sleeps already"):
        manager.sleep(1)
    assert manager.status()["gated"] == ["engine"]
    manager.wake_up()
    assert manager.generate_sequences(rows()).meta_info["failed"] == 0


def test_a_wrong_order_is_an_error_and_changes_nothing(manager: zagent.AgentLoopManager) -> None:
    """The engines live, and serve."""
    with pytest.raises(zagent.StateError, match="not released"):
        manager.wake_up(["kv_cache"])
    for tags in ("kv_cache", ["cuda"], ["weights", 1]):
        with pytest.raises(zagent.InputError, match="wake_up takes a list of weights, kv_cache"):
            manager.wake_up(tags)
    with pytest.raises(zagent.InputError, match="levels"):
        manager.sleep(7)
    assert manager.status()["gated"] == []
    manager.sleep(2)
    with pytest.raises(zagent.StateError, match="weights are released"):
        manager.update_weights(weights(manager))
    manager.wake_up()
    manager.update_weights(weights(manager))
    assert manager.generate_sequences(rows()).meta_info["failed"] == 0
    assert {m["restarts"] for m in manager.status()["pools"]["engine"].values()} == {0}


@contextmanager
def waiting(manager: zagent.AgentLoopManager) -> Iterator[Future[zagent.DataProto]]:
    """32 rows that wait for engines; all are whole when the test has let them go on."""
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(manager.generate_sequences, rows(32))
        eventually(lambda: manager.status()["pending"] >= 32)
        yield batch
        assert batch.result(30).meta_info["failed"] == 0


def cycle(manager: zagent.AgentLoopManager, batch: Future[zagent.DataProto]) -> None:
    """SGLang's order; nothing passes before its end."""
    manager.wake_up(["weights"])
    manager.update_weights(weights(manager))
    assert not batch.done()
    manager.wake_up(["kv_cache"])


def another_broker(manager: zagent.AgentLoopManager) -> None:
    """kill -9 of this one, while 32 rows wait; the next one knows them."""
    (broker,) = (pid for pid in with_run_id(manager.run_id) if child_name(pid) == "broker")
    incarnation = manager.status()["incarnation"]
    os.kill(broker, signal.SIGKILL)
    eventually(lambda: manager.status()["incarnation"] > incarnation)
    eventually(lambda: manager.status()["pending"] >= 32 and not manager.status()["recovering"])


def test_rows_wait_over_the_death_of_the_broker() -> None:
    """While engines sleep, and while they are awake and the trainer holds the calls back: no row fails, and nothing
    passes before it may."""
    with zagent.AgentLoopManager.launch(zagent.Config.load(overrides=list(OPTIONS))) as manager:
        manager.sleep()
        with waiting(manager) as batch:
            another_broker(manager)
            assert {engine["state"] for engine in manager.status()["pools"]["engine"].values()} == {"asleep"}
            assert manager.status()["gated"] == ["engine"]
            cycle(manager, batch)
        manager.abort_all_requests()
        with waiting(manager) as batch:
            another_broker(manager)
            assert manager.status()["gated"] == ["engine"]
            assert not batch.done()
            manager.resume_generation()


@pytest.mark.parametrize("killed", [True, False])
def test_engines_outsleep_their_trainer(killed: bool, manager: zagent.AgentLoopManager) -> None:
    """One that only connected is killed, or closes: rows wait until another one has woken the engines up."""
    callers = manager.status()["callers"]
    command = [sys.executable, "-c", TRAINER, manager.endpoint]
    with Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "asleep\n"
        if killed:
            trainer.kill()
        else:
            trainer.communicate("leave\n", timeout=20)
    with waiting(manager) as batch:
        eventually(lambda: manager.status()["callers"] == callers)
        cycle(manager, batch)


def test_an_engine_that_dies_asleep_changes_nothing_about_the_order(manager: zagent.AgentLoopManager) -> None:
    """kill -9 of one: it is awake when it is back, and the cycle ends as ever."""
    manager.sleep()
    victim = manager.status()["pools"]["engine"]["engine-1"]
    os.kill(victim["pid"], signal.SIGKILL)
    with waiting(manager) as batch:
        eventually(lambda: manager.status()["pools"]["engine"]["engine-1"]["epoch"] > victim["epoch"])
        cycle(manager, batch)
