"""One row of many that harms its worker: the others end as they would without it, on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import zagent
from support.clusters import questions, sim_config
from support.processes import eventually, with_run_id

ROWS = 12
#: Where the bad row is: amid the others.
BAD = 5
#: Above a worker's 0.15 GB, and soon reached by a flood.
MEMORY_GB = 0.6


def batch(agent: str) -> zagent.DataProto:
    """Rows of three turns; ``agent`` runs one of them."""
    return questions(ROWS, agent_name=[agent if index == BAD else "three_turns" for index in range(ROWS)])


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zagent.AgentLoopManager]:
    """Two workers, which are soon taken for hung and may be started again as often as the tests need."""
    config = sim_config(
        tmp_path_factory.mktemp("isolation"),
        "worker.count=2",
        f"worker.memory_limit_gb={MEMORY_GB}",
        "rollout.imports=[support.killer_loops]",
        "rollout.trajectory_timeout_s=12",
        "rollout.max_failed_fraction=1",
        "engine.sim.decode_tokens_per_s=100",
        "services.fragile.target=support.killer_loops.Fragile",
        f"services.fragile.memory_limit_gb={MEMORY_GB}",
        "launcher.hung_after_s=5",
        "launcher.max_restarts=50",
        "launcher.restart_wait_s=0.1",
    )
    with zagent.AgentLoopManager.launch(config) as manager:
        yield manager
    eventually(lambda: not with_run_id(manager.run_id), 5)


@pytest.fixture(scope="module")
def undisturbed(manager: zagent.AgentLoopManager) -> list[list[int]]:
    """Each row's tokens where none is bad."""
    return [tokens(outcome) for outcome in run(manager, "three_turns")]


def run(manager: zagent.AgentLoopManager, agent: str) -> list[zagent.Outcome]:
    return sorted(manager.stream(batch(agent)), key=lambda outcome: outcome.index)


def tokens(outcome: zagent.Outcome) -> list[int]:
    assert outcome.output is not None, outcome.error
    return [int(token) for token in np.asarray(outcome.output.response_ids)]


def log(manager: zagent.AgentLoopManager, name: str) -> str:
    [directory] = Path(manager.config.logs.dir).iterdir()
    return (directory / f"{name}.log").read_text()


POISON = {
    "exits_at_once": "exited with code 3",
    "segfaults": "killed by SIGSEGV",
    "blocks": "killed by SIGABRT",
    "holds_the_interpreter": "killed by SIGABRT",
    "holds_the_tokenizer": "killed by SIGABRT",
    "floods": "exited with code 88",
}


@pytest.mark.parametrize("agent", POISON)
def test_a_row_that_kills_its_worker(
    agent: str, manager: zagent.AgentLoopManager, undisturbed: list[list[int]]
) -> None:
    """It fails as poisoned when it has killed a second worker, with the way that one ended; all others are `ok` with
    the tokens of a run without it, wherever and as whichever attempt they ran."""
    outcomes = run(manager, agent)
    bad = outcomes.pop(BAD)
    assert [outcome.status for outcome in outcomes] == ["ok"] * (ROWS - 1)
    assert [tokens(outcome) for outcome in outcomes] == undisturbed[:BAD] + undisturbed[BAD + 1 :]
    assert (bad.status, type(bad.error)) == ("failed", zagent.PoisonedRequest)
    assert POISON[agent] in str(bad.error)


@pytest.mark.parametrize(("agent", "error"), [("raises", ValueError), ("hangs", zagent.DeadlineExceeded)])
def test_a_row_that_harms_itself_only(
    agent: str, error: type[Exception], manager: zagent.AgentLoopManager, undisturbed: list[list[int]]
) -> None:
    """Its error is its own, no worker is lost, and the others are first attempts."""
    pids = workers(manager)
    outcomes = run(manager, agent)
    bad = outcomes.pop(BAD)
    assert [(outcome.status, outcome.attempt) for outcome in outcomes] == [("ok", 1)] * (ROWS - 1)
    assert [tokens(outcome) for outcome in outcomes] == undisturbed[:BAD] + undisturbed[BAD + 1 :]
    assert (bad.status, type(bad.error)) == ("failed", error)
    assert workers(manager) == pids


def workers(manager: zagent.AgentLoopManager) -> dict[str, int]:
    """Both workers' pids, once both are ready."""

    def both() -> dict[str, int]:
        members = manager.status()["pools"]["worker"]
        ready = {name: member["pid"] for name, member in members.items() if member["state"] == "ready"}
        return ready if len(ready) == 2 else {}

    found: dict[str, int] = eventually(both)
    return found


def test_the_log_shows_where_a_worker_was(manager: zagent.AgentLoopManager) -> None:
    """All stacks of the blocked and of the flooded one, by their functions' names."""
    text = log(manager, "worker-0") + log(manager, "worker-1")
    assert "in blocks" in text
    assert "in floods" in text
    assert f"beyond memory_limit_gb={MEMORY_GB:g}, ending" in text


@pytest.mark.parametrize(("method", "end"), [("block", "killed by SIGABRT"), ("flood", "exited with code 88")])
def test_a_service_that_is_harmed(method: str, end: str, manager: zagent.AgentLoopManager) -> None:
    """Its process is ended as a worker's would be; the caller hears of it, and finds a new one with its next call."""
    [outcome] = manager.stream(questions(1, agent_name=["harms_a_service"], method=[method]))
    assert outcome.output is not None, outcome.error
    told = outcome.output.extra_fields
    assert end in told["heard"]
    assert len(set(told["pids"])) == 2
    assert f"in {method}" in log(manager, "fragile-0")


def test_a_worker_that_is_removed_ends_by_itself(manager: zagent.AgentLoopManager) -> None:
    """The broker lets go of it, so it ends, says so in its log, and is started again."""
    before = workers(manager)
    manager.remove("worker-0", "worker")
    eventually(lambda: workers(manager)["worker-0"] != before["worker-0"])
    assert "worker-0 ends, cut off from the broker" in log(manager, "worker-0")
