"""The fully asynchronous manager as a trainer sees it: an iterator, from any thread or loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from support.fake_rollouts import FakeRollouts, one_by_one, prompts, scored
from zagent.data_proto import DataProto
from zagent.errors import ConfigError, ConnectionLost, InputError, StateError
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


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_errors_of_the_data_that_are_no_exceptions_come_as_well(error: BaseException) -> None:
    """With their own type, again and again: neither the end nor a trainer that waits for ever."""

    def broken() -> Iterator[DataProto]:
        yield from source(3)
        raise error

    with FullyAsyncAgentLoopManager(Rollouts(), broken(), ppo_mini_batch_size=3) as batches:
        assert len(next(batches)) == 3
        for _ in range(2):
            with pytest.raises(type(error)):
                next(batches)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, concurrent.futures.CancelledError])
def test_a_cancel_of_the_datas_own_is_an_error(kind: type[BaseException]) -> None:
    """Not the end; also from inside an event loop, whose task was not cancelled."""

    def broken() -> Iterator[DataProto]:
        yield from source(3)
        raise kind("mine")

    async def main() -> None:
        with FullyAsyncAgentLoopManager(Rollouts(), broken(), ppo_mini_batch_size=3) as batches:
            assert len(await anext(batches)) == 3
            with pytest.raises(RuntimeError, match="the data loader raised CancelledError: mine"):
                await anext(batches)
            with pytest.raises(RuntimeError, match="the data loader raised CancelledError: mine"):
                next(batches)

    asyncio.run(main())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_errors_of_the_filter_that_are_no_exceptions_come_as_well(error: BaseException) -> None:
    """After which it goes on without that group."""

    def drop_if(outcomes: Sequence[Outcome]) -> bool:
        if outcomes[0].uid == "0":
            raise error
        return False

    with FullyAsyncAgentLoopManager(
        Rollouts(), source(3, 1), ppo_mini_batch_size=1, staleness_threshold=3, drop_if=drop_if
    ) as batches:
        with pytest.raises(type(error)):
            next(batches)
        assert sorted(batch.non_tensor_batch["number"].tolist() for batch in batches) == [[1], [2]]


class SlowToCollate(Rollouts):
    """Collating waits until the test lets it go on, or raises what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def collate(self, outcomes: Sequence[Outcome], batch: DataProto | None = None) -> DataProto:
        self.asked.set()
        assert self.go_on.wait(10)
        if self.error is not None:
            raise self.error
        return super().collate(outcomes, batch)


def test_giving_up_while_a_batch_is_collated_leaves_it_to_the_next_who_asks() -> None:
    """It was taken, and nobody has got it: it comes once, and counts once."""

    async def main(manager: SlowToCollate) -> tuple[list[int], dict[str, float]]:
        with FullyAsyncAgentLoopManager(manager, source(6), ppo_mini_batch_size=3, staleness_threshold=0) as batches:
            waiting = asyncio.create_task(anext(batches))
            await asyncio.to_thread(manager.asked.wait, 10)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            manager.go_on.set()
            found = []
            async for batch in batches:
                found += batch.non_tensor_batch["number"].tolist()
                assert batches.update_due
                await batches.update_weights_async("w")
            return found, batches.statistics()

    numbers, statistics = asyncio.run(main(SlowToCollate()))
    assert sorted(numbers) == list(range(6))
    assert statistics["fully_async/staleness/0"] == 6


@pytest.mark.parametrize("error", [InputError("columns"), KeyboardInterrupt()], ids=repr)
def test_what_cannot_be_collated_is_not_lost(error: BaseException) -> None:
    """The error comes with its own type; asked again, the same groups are tried again."""
    manager = SlowToCollate()
    manager.go_on.set()
    manager.error = error
    with FullyAsyncAgentLoopManager(manager, source(3), ppo_mini_batch_size=3) as batches:
        for _ in range(2):
            with pytest.raises(type(error)):
                next(batches)
        assert batches.statistics()["fully_async/monitor/queue/mq_queue_size"] == 3
        assert not batches.update_due
        manager.error = None
        assert sorted(next(batches).non_tensor_batch["number"].tolist()) == [0, 1, 2]
        assert batches.statistics()["fully_async/staleness/0"] == 3


def test_giving_up_before_there_is_a_batch_takes_nothing() -> None:
    """At whatever moment: cancelled over and over, every prompt comes once."""

    async def main() -> list[int]:
        manager, found = FakeRollouts(seconds=lambda row: 0.001, partial_rollout=True), list[int]()
        with FullyAsyncAgentLoopManager(manager, source(30), ppo_mini_batch_size=2) as batches:
            for turns in itertools.count():
                waiting = asyncio.create_task(anext(batches))
                for _ in range(turns % 40):
                    await asyncio.sleep(0)
                if turns % 3:
                    waiting.cancel()
                await asyncio.wait([waiting])
                if waiting.cancelled():
                    continue
                if isinstance(waiting.exception(), StopAsyncIteration):
                    break
                found += waiting.result().non_tensor_batch["number"].tolist()
                await batches.update_weights_async("w")
        return found

    assert sorted(asyncio.run(main())) == list(range(30))


def test_updates_past_it_while_it_waits_are_noticed() -> None:
    """One within the bound: what is too stale is replaced before the batch is handed out."""
    done: list[int] = []

    def outcome(row: Row, versions: list[int]) -> Outcome:
        if not done:
            done.append(1)
            manager.version += 1  # somebody else's update_weights
        return scored(row, versions)

    manager = Rollouts(outcome=outcome)
    with FullyAsyncAgentLoopManager(manager, source(6, 1), ppo_mini_batch_size=1, staleness_threshold=0) as batches:
        batch = next(batches)
        assert batch.non_tensor_batch["min_global_steps"].tolist() == [1]
        assert batch.meta_info["fully_async"]["fully_async/dropped/stale"] >= 1


@pytest.mark.parametrize(("threshold", "bound"), [(0.0, 0), (1.0, 1), (3.0, 3)])
def test_more_updates_past_it_than_the_bound_are_an_error(threshold: float, bound: int) -> None:
    """It cannot count them, and says who can; what is handed out afterwards keeps the bound."""
    jump = max(1, bound) + 1

    def outcome(row: Row, versions: list[int]) -> Outcome:
        manager.version = max(manager.version, jump) if row.kwargs["number"] == 0 else manager.version
        return scored(row, versions)

    manager = Rollouts(outcome=outcome)
    with FullyAsyncAgentLoopManager(
        manager, source(30, 1), ppo_mini_batch_size=1, staleness_threshold=threshold
    ) as batches:
        with pytest.raises(StateError, match=f"from version 0 to {jump} behind this stream's back"):
            next(batches)
        batch = next(batches)
        assert batch.non_tensor_batch["min_global_steps"][0] >= jump - bound
        manager.version += jump
        with pytest.raises(StateError, match=f"from version {jump} to {2 * jump}"):
            batches.update_weights("w")
        assert batches.update_weights("w", version=100).version == 100
        assert next(batches).meta_info["fully_async"]["fully_async/trajectory_staleness/max"] <= bound


def test_versions_of_its_own_updates_may_jump() -> None:
    """Each is one update, whatever its number."""
    manager = Rollouts()
    with FullyAsyncAgentLoopManager(manager, source(9), ppo_mini_batch_size=3, staleness_threshold=1) as batches:
        for step, batch in enumerate(batches, start=1):
            assert batch.meta_info["fully_async"]["fully_async/trajectory_staleness/max"] <= 1
            batches.update_weights("w", version=100 * step)
        assert not {key for key in batches.statistics() if "dropped" in key}


def test_a_row_that_cannot_be_used_has_its_own_type() -> None:
    """`InputError`, as from `generate_sequences`."""
    bad = DataProto(non_tensor_batch={"raw_prompt": ["text"]})
    with (
        FullyAsyncAgentLoopManager(Rollouts(), [bad], ppo_mini_batch_size=1) as batches,
        pytest.raises(InputError, match="raw_prompt must be a list of chat messages"),
    ):
        next(batches)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"staleness_threshold": -1}, "staleness_threshold must be at least 0, got -1"),
        ({"staleness_threshold": "1"}, "staleness_threshold must be a number, got '1'"),
        ({"ppo_mini_batch_size": 2.5}, "ppo_mini_batch_size must be a whole number, got 2.5"),
        ({"ppo_mini_batch_size": "4"}, "ppo_mini_batch_size must be a whole number, got '4'"),
        ({"ppo_mini_batch_size": 0}, "ppo_mini_batch_size must be at least 1, got 0"),
        ({"require_batches": -1}, "require_batches must be at least 1, got -1"),
        ({"ppo_mini_batch_size": -2, "require_batches": -2}, "ppo_mini_batch_size must be at least 1, got -2"),
        ({"n": -1}, "n must be at least 1, got -1"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": 1.5}, "n must be a whole number, got 1.5"),
        ({"n": True}, "n must be a whole number, got True"),
        ({"over_sample": 0.5}, "over_sample must be a whole number, got 0.5"),
        ({"max_concurrent_samples": 1.5}, "max_concurrent_samples must be a whole number, got 1.5"),
        ({"max_queue_size": "9"}, "max_queue_size must be a whole number, got '9'"),
    ],
    ids=str,
)
def test_limits_that_cannot_be_are_refused_before_anything_runs(wrong: dict[str, Any], match: str) -> None:
    """By name and value. And no thread is left."""
    with pytest.raises(ConfigError, match=match):
        FullyAsyncAgentLoopManager(Rollouts(), [], **{"ppo_mini_batch_size": 1, **wrong})


def test_over_sampling_that_has_no_room_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """On policy nothing can be carried over."""
    with FullyAsyncAgentLoopManager(
        Rollouts(), source(6), ppo_mini_batch_size=2, staleness_threshold=0, over_sample=2
    ) as batches:
        assert len(next(batches)) == 2
    assert "over_sample=2: no more than 0 groups have room in staleness_threshold=0, rounded up" in caplog.text


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
