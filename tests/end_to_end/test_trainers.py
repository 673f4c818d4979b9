"""One step off and fully asynchronous on real processes: versions, staleness, and nothing left running."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import zagent
from support.clusters import questions, sim_config

pytestmark = pytest.mark.timeout(120)  # the first of them loads torch, on a machine that is busy
#: Seconds until what was cancelled has ended in workers and engines.
PATIENCE_S = 10.0
SPEED = "engine.sim.decode_tokens_per_s=200"
SLOW = "engine.sim.decode_tokens_per_s=2"


def weights() -> dict[str, Any]:
    """What simulated engines take: anything with a name."""
    import torch

    return {"w": torch.ones(1)}


def batches(count: int, size: int = 4) -> Iterator[zagent.DataProto]:
    for start in range(0, count * size, size):
        yield questions(size, lambda i, start=start: f"Question {start + i}?", number=list(range(start, start + size)))


def sampled_versions(batch: zagent.DataProto) -> set[int]:
    return set(batch.batch["rollout_versions"][batch.batch["response_mask"] == 1].tolist())


def in_flight(manager: zagent.AgentLoopManager) -> int:
    return sum(member["in_flight"] for pool in manager.status()["pools"].values() for member in pool.values())


def until_running(manager: zagent.AgentLoopManager, engine_calls: int) -> None:
    while sum(member["in_flight"] for member in manager.status()["pools"]["engine"].values()) < engine_calls:
        time.sleep(0.02)


def is_quiet(manager: zagent.AgentLoopManager) -> bool:
    """Nothing runs in any member, now or in a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while (running := in_flight(manager)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running


def test_one_step_off(tmp_path: Path) -> None:
    """Each batch is sampled by the weights of one training step earlier, whole; the last starts nothing."""
    config = sim_config(tmp_path, SPEED)
    with zagent.AgentLoopManager.launch(config) as manager:
        found, statistics = [], {}
        with zagent.OneStepOffAgentLoopManager(manager, batches(5), weights=weights) as steps:
            for batch in steps:
                statistics = batch.meta_info["one_step_off"]
                found.append((sampled_versions(batch), statistics["version"], manager.version))
                assert batch.meta_info["failed"] == 0
        assert found == [({0}, 0, 0), ({0}, 0, 1), ({1}, 1, 2), ({2}, 2, 3), ({3}, 3, 4)]
        assert set(statistics) >= {"generate_s", "train_s", "wait_s", "sync_s", "hidden_share", "staleness"}
        assert in_flight(manager) == 0


def test_an_update_changes_what_the_next_batch_samples(tmp_path: Path) -> None:
    """The same prompts with the same seeds: other tokens under other weights."""
    same = [questions(4) for _ in range(3)]
    for batch in same:
        batch.meta_info["global_steps"] = 1
    with (
        zagent.AgentLoopManager.launch(sim_config(tmp_path)) as manager,
        zagent.OneStepOffAgentLoopManager(manager, same, weights=weights) as steps,
    ):
        first, second, third = (batch.batch["responses"] for batch in steps)
    assert first.equal(second)
    assert not second.equal(third)


def test_closing_one_step_off_ends_what_it_started(tmp_path: Path) -> None:
    """Who waits is told so; the cluster goes on."""
    config = sim_config(tmp_path, SLOW)
    with zagent.AgentLoopManager.launch(config) as manager, ThreadPoolExecutor() as threads:
        with zagent.OneStepOffAgentLoopManager(manager, batches(2), weights=lambda: None) as steps:
            waiting = threads.submit(next, steps)
            until_running(manager, 4)
        with pytest.raises(zagent.ConnectionLost):
            waiting.result(PATIENCE_S)
        assert is_quiet(manager)


def test_fully_asynchronous(tmp_path: Path) -> None:
    """Every prompt in one whole group, updates in the middle of rows, no token older than the bound says."""
    config = sim_config(tmp_path, SPEED, "worker.count=2", "rollout.n=3")
    with zagent.AgentLoopManager.launch(config) as manager:
        numbers: list[int] = []
        with zagent.FullyAsyncAgentLoopManager(
            manager, batches(10), ppo_mini_batch_size=4, trigger_parameter_sync_step=2, staleness_threshold=0.5
        ) as stream:
            for batch in stream:
                assert batch.non_tensor_batch["status"].tolist() == ["ok"] * len(batch)
                assert all(manager.version - 1 <= version <= manager.version for version in sampled_versions(batch))
                for row, mask in zip(batch.batch["rollout_versions"], batch.batch["response_mask"], strict=True):
                    assert row[mask == 1].tolist() == sorted(row[mask == 1].tolist())
                numbers += batch.non_tensor_batch["number"].tolist()
                if stream.update_due:
                    stream.update_weights(weights())
            statistics = stream.statistics()
        assert Counter(numbers) == dict.fromkeys(range(40), 3)
        assert manager.version == 5
        assert {key for key in statistics if "/dropped/" in key} == set()
        assert statistics["fully_async/static/max_staleness"] == 1
        assert in_flight(manager) == 0


def test_threshold_0_is_on_policy(tmp_path: Path) -> None:
    """Every token is of the version that the trainer has (pitfall H11)."""
    config = sim_config(tmp_path, SPEED)
    with (
        zagent.AgentLoopManager.launch(config) as manager,
        zagent.FullyAsyncAgentLoopManager(
            manager, batches(4), ppo_mini_batch_size=4, staleness_threshold=0, n=2
        ) as stream,
    ):
        for batch in stream:
            assert sampled_versions(batch) == {manager.version}
            stream.update_weights(weights())
        assert manager.version == 4


def test_closing_a_stream_ends_what_it_started(tmp_path: Path) -> None:
    """In the middle; the cluster goes on, and another stream as well."""
    config = sim_config(tmp_path, SPEED)
    with zagent.AgentLoopManager.launch(config) as manager:
        for _ in range(2):
            with zagent.FullyAsyncAgentLoopManager(
                manager, batches(50), ppo_mini_batch_size=2, over_sample=8, n=2
            ) as stream:
                assert len(next(stream)) == 4
            assert is_quiet(manager)


def test_a_cluster_that_ends_is_an_error_not_the_end_of_data(tmp_path: Path) -> None:
    """For both (pitfall B9)."""
    manager = zagent.AgentLoopManager.launch(sim_config(tmp_path, SLOW))
    with (
        zagent.FullyAsyncAgentLoopManager(manager, batches(5), ppo_mini_batch_size=4) as stream,
        zagent.OneStepOffAgentLoopManager(manager, batches(5), weights=lambda: None) as steps,
        ThreadPoolExecutor() as threads,
    ):
        waiting = [threads.submit(next, one) for one in (stream, steps)]
        until_running(manager, 8)
        manager.close()
        for one in waiting:
            with pytest.raises((zagent.ConnectionLost, zagent.RolloutError)):
                one.result(PATIENCE_S)
