"""The fully asynchronous manager as a trainer sees it: an iterator, from any thread or loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from support.fake_rollouts import FakeRollouts, one_by_one, prompts, scored
from zagent.data_proto import DataProto
from zagent.errors import ConfigError, ConnectionLost, InputError
from zagent.trainer.fully_async import FullyAsyncAgentLoopManager
from zagent.trainer.rows import Row
from zagent.types import Outcome


class Rollouts(FakeRollouts):
    """No latency."""

    def __init__(self, **options: Any) -> None:
        super().__init__(seconds=lambda row: 0.0, **{"partial_rollout": True, **options})


def source(count: int, size: int = 3) -> Iterator[DataProto]:
    """Batches of ``size`` prompts, as a data loader gives them; column `number` counts through."""
    for start in range(0, count, size):
        yield prompts(size, number=list(range(start, start + size)))


def test_a_training_loop() -> None:
    """Whole groups of `rollout.n` rows side by side, every prompt once, the last batch shorter; weights in between."""
    manager = Rollouts(n=2)
    found, due = [], []
    with FullyAsyncAgentLoopManager(
        manager, source(9), ppo_mini_batch_size=2, trigger_parameter_sync_step=2, staleness_threshold=0.0
    ) as batches:
        for batch in batches:
            found += batch.non_tensor_batch["number"].tolist()
            due.append(batches.update_due)
            if batches.update_due:
                assert batches.update_weights("w").version == manager.version
    assert found[::2] == found[1::2]
    assert sorted(found[::2]) == list(range(9))
    assert due == [False, True, False, True, False]
    assert [entry for entry in manager.log if entry[0] == "update"] == [("update", "w", "abort")] * 2
    assert {row.sample for row in manager.started} == {0, 1}


def test_a_batch_has_tensors_columns_and_statistics() -> None:
    """As `generate_sequences` would have made it; uid is the group's number where the prompt has none."""
    with FullyAsyncAgentLoopManager(Rollouts(), source(3), ppo_mini_batch_size=3, n=2) as batches:
        batch = next(batches)
    assert batch.batch["responses"].shape == (6, 2)
    uids = batch.non_tensor_batch["uid"].tolist()
    assert uids[::2] == uids[1::2]
    assert sorted(uids[::2]) == ["0", "1", "2"]
    assert batch.non_tensor_batch["sample"].tolist() == [0, 1] * 3
    assert batch.non_tensor_batch["min_global_steps"].tolist() == [0] * 6
    assert batch.meta_info["fully_async"]["fully_async/staleness/0"] == 3
    assert batch.meta_info["fully_async"]["fully_async/response_length/kept/rows"] == 6


def test_prompts_may_have_different_columns() -> None:
    """What a group does not have is None."""
    with FullyAsyncAgentLoopManager(
        Rollouts(), [prompts(1, answer=["4"]), prompts(1, hint=["no"])], ppo_mini_batch_size=2
    ) as batches:
        columns = next(batches).non_tensor_batch
    assert sorted(zip(columns["answer"], columns["hint"], strict=True), key=str) == [("4", None), (None, "no")]


def test_threshold_0_is_on_policy() -> None:
    """min == max == the trainer's version in every row (pitfall H11)."""
    manager = Rollouts(version=7)
    with FullyAsyncAgentLoopManager(manager, source(12), ppo_mini_batch_size=3, staleness_threshold=0) as batches:
        for batch in batches:
            versions = {*batch.non_tensor_batch["min_global_steps"], *batch.non_tensor_batch["max_global_steps"]}
            assert versions == {manager.version}
            batches.update_weights("w")
    assert manager.version == 11


@pytest.mark.parametrize(("partial", "mode"), [(True, "abort"), (False, "wait")])
def test_updates_abort_only_where_the_aborted_go_on(partial: bool, mode: str) -> None:
    """`rollout.partial_rollout`; a mode that is asked for wins."""
    manager = Rollouts(partial_rollout=partial)
    with FullyAsyncAgentLoopManager(manager, source(3), ppo_mini_batch_size=1) as batches:
        batches.update_weights("w1")
        batches.update_weights("w2", mode="in_place", version=9)
    assert manager.log == [("update", "w1", mode), ("update", "w2", "in_place")]
    assert manager.version == 9


def test_from_inside_an_event_loop() -> None:
    """`async for` over an asynchronous source, with `update_weights_async`."""

    async def main(manager: Rollouts) -> list[int]:
        found: list[int] = []
        with FullyAsyncAgentLoopManager(manager, one_by_one(5), ppo_mini_batch_size=2) as batches:
            async for batch in batches:
                found += batch.non_tensor_batch["number"].tolist()
                await batches.update_weights_async("w")
        return found

    assert sorted(asyncio.run(main(Rollouts()))) == list(range(5))


def test_an_error_of_the_data_has_its_own_type() -> None:
    """Also one raised in a thread (a generator's)."""

    def broken() -> Iterator[DataProto]:
        yield from source(3)
        raise OSError("disk gone")

    with FullyAsyncAgentLoopManager(Rollouts(), broken(), ppo_mini_batch_size=3) as batches:
        assert len(next(batches)) == 3
        with pytest.raises(OSError, match="disk gone"):
            next(batches)


def test_a_row_that_cannot_be_used_has_its_own_type() -> None:
    """`InputError`, as from `generate_sequences`."""
    bad = DataProto(non_tensor_batch={"raw_prompt": ["text"]})
    with (
        FullyAsyncAgentLoopManager(Rollouts(), [bad], ppo_mini_batch_size=1) as batches,
        pytest.raises(InputError, match="raw_prompt must be a list of chat messages"),
    ):
        next(batches)


def test_limits_that_cannot_be_are_refused_before_anything_runs() -> None:
    """And no thread is left."""
    with pytest.raises(ConfigError, match="staleness_threshold"):
        FullyAsyncAgentLoopManager(Rollouts(), [], ppo_mini_batch_size=1, staleness_threshold=-1)


def test_verls_number_of_groups_runs_at_once() -> None:
    """16 for each engine, of which there are two. Who waits when it is closed is told so."""

    def wait(batches: FullyAsyncAgentLoopManager) -> None:
        with pytest.raises(ConnectionLost):
            next(batches)

    manager = FakeRollouts(seconds=lambda row: 1000.0, partial_rollout=True)
    with FullyAsyncAgentLoopManager(manager, source(99, 1), ppo_mini_batch_size=50) as batches:
        assert batches.limits.max_required_samples == 75
        waiter = threading.Thread(target=wait, args=[batches])
        waiter.start()
        while len(manager.started) < 32:
            assert batches.statistics() is not None
        assert batches.statistics()["fully_async/monitor/active_tasks_size"] == 32
    waiter.join(10)
    assert not waiter.is_alive()
    assert len(manager.cancelled) == 32


def test_statistics_stay_after_close() -> None:
    """The last ones; closing twice does no harm."""
    batches = FullyAsyncAgentLoopManager(Rollouts(), source(3), ppo_mini_batch_size=3)
    assert batches.statistics() == {}
    next(batches)
    batches.close()
    batches.close()
    assert batches.statistics()["fully_async/staleness/0"] == 3
    with pytest.raises(ConnectionLost):
        next(batches)


def test_response_lengths_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One line a batch."""

    def outcome(row: Row, versions: list[int]) -> Outcome:
        return scored(row, versions * 5)

    with (
        caplog.at_level(logging.INFO, "zagent.trainer.fully_async"),
        FullyAsyncAgentLoopManager(Rollouts(outcome=outcome), source(3), ppo_mini_batch_size=3) as batches,
    ):
        next(batches)
    assert "kept 3 rows of 10 tokens (10, 10), carried 0 rows, dropped 0 rows; 0 groups run on" in caplog.text


def test_a_source_is_asked_no_more_than_one_prompt_ahead() -> None:
    """What is not started is not taken from the data loader."""
    asked: list[int] = []

    async def counted() -> AsyncIterator[DataProto]:
        async for prompt in one_by_one(50):
            asked.append(1)
            yield prompt

    with FullyAsyncAgentLoopManager(Rollouts(), counted(), ppo_mini_batch_size=4, staleness_threshold=0) as batches:
        next(batches)
        batches.statistics()
        assert len(asked) <= 5
