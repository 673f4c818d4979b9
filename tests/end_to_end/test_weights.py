"""New weights into a running cluster of simulated engines: under load, while processes die, and what is left after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zagent
from support.clusters import questions, sim_config, sim_overrides
from support.processes import PATIENCE_S, Popen, child_name, eventually, running, with_run_id
from zagent.errors import InputError

MODES = ("wait", "abort", "in_place")
#: 64 tokens a second: rows of 96 take a second and a half.
OPTIONS = (
    *("worker.count=2", "engine.sim.decode_tokens_per_s=64", "rollout.response_length=96"),
    *("launcher.max_restarts=50", "engine.max_in_flight=16"),
)

TRAINER = """
import json, sys, torch, zagent
endpoint, mode = sys.argv[1:]
with zagent.AgentLoopManager.connect(endpoint) as manager:
    print("connected", flush=True)
    manager.update_weights({"w": torch.zeros(7)}, mode=mode)
"""


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zagent.AgentLoopManager]:
    with zagent.AgentLoopManager.launch(sim_config(tmp_path_factory.mktemp("weights"), *OPTIONS)) as made:
        yield made


def tensors(size: int = 3) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(size)}


def in_flight(manager: zagent.AgentLoopManager) -> int:
    return sum(engine["in_flight"] for engine in manager.status()["pools"]["engine"].values())


class Rows:
    """A batch that is generated meanwhile."""

    def __init__(self, manager: zagent.AgentLoopManager, count: int) -> None:
        self._batch, self._manager = questions(count), manager
        self.out: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        eventually(lambda: in_flight(manager) >= min(count, 8))

    def _run(self) -> None:
        self.out = self._manager.generate_sequences(self._batch)

    def versions(self) -> list[list[int]]:
        """Each row's tokens' versions, when all are done."""
        self._thread.join(50)
        assert self.out is not None, "the rows have failed, or are not done"
        mask = self.out.batch["response_mask"] == 1
        return [versions[own].tolist() for versions, own in zip(self.out.batch["rollout_versions"], mask, strict=True)]


def engines(manager: zagent.AgentLoopManager) -> dict[str, tuple[str, int]]:
    return {name: (e["state"], e["version"]) for name, e in manager.status()["pools"]["engine"].items()}


def all_serve(manager: zagent.AgentLoopManager, version: int) -> None:
    eventually(lambda: engines(manager) == dict.fromkeys(("engine-0", "engine-1"), ("ready", version)))


@pytest.mark.parametrize("mode", MODES)
def test_an_update_while_rows_run(mode: Any, manager: zagent.AgentLoopManager) -> None:
    """48 rows, of which engines take 32 at once: all of them whole, each token says which weights sampled it, and so
    do the row's lowest and highest version. Only where calls go on do some rows have both; those that come later have
    the new ones."""
    before = manager.version
    rows = Rows(manager, 48)
    done = manager.update_weights(tensors(), mode=mode)
    assert (done.version, manager.version) == (before + 1, before + 1)
    assert done.engines == {"engine-0": "updated", "engine-1": "updated"}
    versions = rows.versions()
    assert [len(own) for own in versions] == [96] * 48
    assert all(own == sorted(own) for own in versions)
    assert {version for own in versions for version in own} == {before, before + 1}
    assert any(len(set(own)) == 2 for own in versions) == (mode != "wait")
    lows, highs = (rows.out.non_tensor_batch[f"{which}_global_steps"].tolist() for which in ("min", "max"))
    assert (lows, highs) == ([min(own) for own in versions], [max(own) for own in versions])
    assert {version for own in Rows(manager, 4).versions() for version in own} == {before + 1}


def test_calls_are_broken_off_and_go_on(manager: zagent.AgentLoopManager) -> None:
    """`abort_all_requests` empties the engines, `resume_generation` fills them again; rows are whole."""
    rows = Rows(manager, 16)
    manager.abort_all_requests()
    assert (in_flight(manager), manager.status()["gated"]) == (0, ["engine"])
    manager.resume_generation()
    assert [len(own) for own in rows.versions()] == [96] * 16
    assert manager.status()["gated"] == []


def test_an_engine_that_is_killed_comes_back_with_the_weights(manager: zagent.AgentLoopManager) -> None:
    """kill -9 while it is idle: it loads them before it serves; nothing that it answers is of the first version."""
    version = manager.update_weights(tensors(4)).version
    victim = manager.status()["pools"]["engine"]["engine-0"]
    os.kill(victim["pid"], signal.SIGKILL)
    eventually(lambda: manager.status()["pools"]["engine"]["engine-0"]["epoch"] > victim["epoch"])
    first = Rows(manager, 16).versions()
    all_serve(manager, version)
    assert {version for own in first + Rows(manager, 16).versions() for version in own} == {version}
    assert manager.engine_stats()["engine-0"]["calls"] >= 8


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_is_killed_during_an_update(mode: Any, manager: zagent.AgentLoopManager) -> None:
    """kill -9 as the gate has closed: the other one takes the weights, this one does when it is back, and its rows are
    whole."""
    before = manager.version
    rows = Rows(manager, 16)
    updating = threading.Thread(target=lambda: manager.update_weights(tensors(5), mode=mode))
    victim = manager.status()["pools"]["engine"]["engine-1"]["pid"]
    updating.start()
    os.kill(victim, signal.SIGKILL)
    updating.join(50)
    assert manager.version == before + 1
    assert [len(own) for own in rows.versions()] == [96] * 16
    all_serve(manager, before + 1)
    assert {version for own in Rows(manager, 16).versions() for version in own} == {before + 1}


@pytest.mark.parametrize("mode", MODES)
def test_the_only_engine_is_killed_before_an_update(mode: Any, tmp_path: Path) -> None:
    """kill -9: the one that is started in its place takes the weights, and the rows that wait have them."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path, *OPTIONS, "engine.count=1")) as manager:
        victim = manager.status()["pools"]["engine"]["engine-0"]
        os.kill(victim["pid"], signal.SIGKILL)
        eventually(lambda: engines(manager)["engine-0"][0] == "dead")
        done = manager.update_weights(tensors(), mode=mode)
        assert done.engines == {"engine-0": "updated"}
        assert manager.status()["pools"]["engine"]["engine-0"]["epoch"] > victim["epoch"]
        assert {version for own in Rows(manager, 4).versions() for version in own} == {1}


def test_the_broker_is_killed_during_an_update(tmp_path: Path) -> None:
    """In each mode: the next one hears of the gate, of the versions, and of all that runs."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path, *OPTIONS)) as manager:
        for before, mode in enumerate(MODES):
            rows = Rows(manager, 16)
            (broker,) = (pid for pid in with_run_id(manager.run_id) if child_name(pid) == "broker")
            results: list[Any] = []
            updating = threading.Thread(target=update, args=(manager, mode, results))
            updating.start()
            os.kill(broker, signal.SIGKILL)
            updating.join(50)
            assert results[0].version == before + 1
            assert [len(own) for own in rows.versions()] == [96] * 16
            all_serve(manager, before + 1)
            assert manager.status()["gated"] == []


def update(manager: zagent.AgentLoopManager, mode: Any, results: list[Any]) -> None:
    results.append(manager.update_weights(tensors(6), mode=mode))


def test_a_trainer_that_only_connected_brings_weights(manager: zagent.AgentLoopManager) -> None:
    """All see its version; it may go, and its weights stay for engines that start again."""
    with zagent.AgentLoopManager.connect(manager.endpoint) as other:
        version = other.update_weights(tensors(6)).version
        assert other.version == manager.version == version
    victim = manager.status()["pools"]["engine"]["engine-1"]
    os.kill(victim["pid"], signal.SIGKILL)
    eventually(lambda: manager.status()["pools"]["engine"]["engine-1"]["epoch"] > victim["epoch"])
    all_serve(manager, version)
    assert manager.update_weights(tensors()).version == version + 1


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_is_killed_during_an_update(mode: Any, manager: zagent.AgentLoopManager) -> None:
    """One that only connected, kill -9 while an engine does not answer it: the gate opens, no engine stays paused, and
    the next update is as ever."""
    victim = manager.status()["pools"]["engine"]["engine-1"]["pid"]
    command = [sys.executable, "-c", TRAINER, manager.endpoint, mode]
    os.kill(victim, signal.SIGSTOP)
    try:
        with Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
            eventually(lambda: manager.status()["gated"] == ["engine"])
            trainer.kill()
        eventually(lambda: manager.status()["gated"] == [])
    finally:
        os.kill(victim, signal.SIGCONT)
    assert [len(own) for own in Rows(manager, 16).versions()] == [96] * 16
    version = manager.update_weights(tensors()).version
    all_serve(manager, version)
    assert {version for own in Rows(manager, 16).versions() for version in own} == {version}


def test_weights_that_do_not_fit_change_nothing(manager: zagent.AgentLoopManager) -> None:
    """Empty, of another kind, or of a version that was: an error, and rows go on."""
    version = manager.version
    for source, wanted in (({}, None), (5, None), ("/nowhere", None), (tensors(), version)):
        with pytest.raises(InputError):
            manager.update_weights(source, version=wanted)
    assert {version for own in Rows(manager, 4).versions() for version in own} == {version}


def test_the_largest_version(tmp_path: Path) -> None:
    """Larger ones are refused, and end no engine; rows have this one."""
    last = 2**63 - 1
    with zagent.AgentLoopManager.launch(sim_config(tmp_path, *OPTIONS)) as manager:
        for wrong in (last + 1, 2**70):
            with pytest.raises(InputError, match="64-bit"):
                manager.update_weights(tensors(), version=wrong)
        all_serve(manager, 0)
        manager.update_weights(tensors(), version=last)
        assert {version for own in Rows(manager, 4).versions() for version in own} == {last}


REFUSED = """
import sys, torch, zagent
from zagent.errors import InvalidRequest
if __name__ == "__main__":
    with zagent.AgentLoopManager.connect(sys.argv[1]) as manager:
        try:
            manager.update_weights({"w": torch.zeros(3)}, transport="distributed")
        except InvalidRequest as error:
            print(error, flush=True)
"""


def test_a_process_group_that_engines_refuse_holds_nobody_up(manager: zagent.AgentLoopManager) -> None:
    """The error comes at once, and the process ends, though torch still waits for the others of the group."""
    with Popen([sys.executable, "-c", REFUSED, manager.endpoint], stdout=subprocess.PIPE, text=True) as trainer:
        out, _ = trainer.communicate(timeout=3 * PATIENCE_S)  # torch takes seconds to load, and to be gone
    assert "simulated engines take no tensors" in out
    assert trainer.returncode == 0


# ---- what is left ---------------------------------------------------------------------------------------------------


def weights_of(run_id: str) -> list[str]:
    return [str(path) for path in Path("/dev/shm").glob(f"*{run_id}*/*/*")]


def in_memory(run_id: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if run_id in name]


def test_nothing_is_left_in_memory(tmp_path: Path) -> None:
    """One version lies there while the cluster lives, and none afterwards."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path)) as manager:
        for size in (3, 4):
            manager.update_weights(tensors(size))
        assert len(weights_of(manager.run_id)) == 1
    assert in_memory(manager.run_id) == []


LEAVING = """
import os, signal, sys, torch, zagent
endpoint, end = sys.argv[1:]
with zagent.AgentLoopManager.connect(endpoint) as manager:
    manager.update_weights({"w": torch.zeros(3)})
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def versions_of(run_id: str) -> list[str]:
    return [path for path in weights_of(run_id) if Path(path).is_dir()]


@pytest.mark.parametrize("end", ["close", "kill"])
def test_trainers_that_have_gone_leave_one_version(end: str, tmp_path: Path) -> None:
    """However they end, while the cluster lives: the one that engines serve, until another trainer brings the next."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path)) as manager:
        for version in (1, 2):
            with Popen([sys.executable, "-c", LEAVING, manager.endpoint, end]) as trainer:
                assert trainer.wait(PATIENCE_S) == (0 if end == "close" else -signal.SIGKILL)
            (left,) = versions_of(manager.run_id)
            assert left == manager.status()["weights"]["engine"]
            assert manager.version == version
        manager.update_weights(tensors())
        (own,) = versions_of(manager.run_id)
        assert own == manager.status()["weights"]["engine"]
        assert not Path(left).parent.exists()
    assert in_memory(manager.run_id) == []


BLOCKED = """
import json, sys, threading, torch, zagent
def blocked():
    yield "w", torch.zeros(4)
    print(manager.run_id, flush=True)
    threading.Event().wait()
if __name__ == "__main__":
    with zagent.AgentLoopManager.launch(zagent.Config.load(overrides=json.loads(sys.argv[1]))) as manager:
        manager.update_weights(blocked())
"""


def test_an_interrupt_ends_a_trainer_whose_weights_never_come(tmp_path: Path) -> None:
    """Ctrl-C while the source blocks: the trainer ends as well as the cluster, and its last word is the interrupt."""
    command = [sys.executable, "-c", BLOCKED, json.dumps(sim_overrides(tmp_path))]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        run_id = trainer.stdout.readline().strip()
        trainer.send_signal(signal.SIGINT)
        _, words = trainer.communicate(timeout=PATIENCE_S)
    assert (trainer.returncode, words.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    assert in_memory(run_id) == []


def test_nothing_is_left_of_a_killed_launcher(tmp_path: Path) -> None:
    """kill -9 of the launcher: its janitor removes the weights as well, whoever wrote them."""
    command = [sys.executable, "-m", "zagent.launch", *sim_overrides(tmp_path)]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        endpoint = server.stdout.readline().split()[3]
        with zagent.AgentLoopManager.connect(endpoint) as manager:
            manager.update_weights(tensors())
            assert len(weights_of(manager.run_id)) == 1
            server.kill()
            eventually(lambda: not with_run_id(manager.run_id) and not in_memory(manager.run_id))
    assert not running(server.pid)


LAUNCHING = """
import json, sys, torch, zagent
if __name__ == "__main__":
    with zagent.AgentLoopManager.launch(zagent.Config.load(overrides=json.loads(sys.argv[1]))) as manager:
        print(manager.run_id, flush=True)
        while True:
            manager.update_weights({"w": torch.zeros(2**20)})
"""


def test_nothing_is_left_of_a_killed_trainer(tmp_path: Path) -> None:
    """kill -9 of the trainer that launched it all, while it writes one version after the other."""
    command = [sys.executable, "-c", LAUNCHING, json.dumps(sim_overrides(tmp_path))]
    with Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        run_id = trainer.stdout.readline().strip()
        eventually(lambda: any(int(Path(path).name.partition("-")[0]) >= 3 for path in weights_of(run_id)))
        trainer.kill()
    eventually(lambda: not with_run_id(run_id) and not in_memory(run_id))
