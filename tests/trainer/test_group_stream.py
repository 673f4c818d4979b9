"""Groups under way beside a trainer, on virtual time."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from support.fake_rollouts import FakeRollouts, broken, one_by_one, prompts, scored
from support.virtual_clock import run
from zagent.data_proto import DataProto
from zagent.errors import ConnectionLost, InputError, LoopError, RolloutError
from zagent.trainer.admission import Admission, Limits
from zagent.trainer.group_stream import GroupStream
from zagent.trainer.groups import Group, zero_variance
from zagent.trainer.rows import Row
from zagent.trainer.stream_stats import lengths_line
from zagent.types import Outcome


def numbers(groups: list[Group]) -> list[int]:
    return [group.rows.non_tensor_batch["number"][0] for group in groups]


def with_stream(
    test: Callable[[GroupStream, FakeRollouts], Awaitable[Any]],
    manager: FakeRollouts,
    limits: Limits,
    source: AsyncIterator[DataProto],
    **options: Any,
) -> Any:
    """Run ``test`` on virtual time, and close the stream."""

    async def main() -> Any:
        clock = asyncio.get_running_loop().time
        stream = GroupStream(manager, source, Admission(limits, manager.version), clock=clock, **{"n": 1, **options})
        try:
            return await test(stream, manager)
        finally:
            await stream.close()

    return run(main())


def number(row: Row) -> int:
    return int(row.kwargs["number"])


async def all_batches(stream: GroupStream, manager: FakeRollouts) -> list[list[int]]:
    """Of a trainer that takes no time, and updates when it should."""
    found = []
    while groups := await stream.take():
        found.append(numbers(groups))
        if stream.update_due:
            update(stream, manager)
    return found


def update(stream: GroupStream, manager: FakeRollouts) -> None:
    manager.version += 1
    stream.follow(manager.version)


# ---- batches --------------------------------------------------------------------------------------------------------


def test_a_group_has_its_samples_in_order_and_stamped() -> None:
    """uid (its number, where the prompt has none), sample and the version it starts with; whatever finishes first."""
    manager = FakeRollouts(seconds=lambda row: 3.0 - row.sample + number(row) / 10, version=4)

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[Group]:
        return await stream.take()

    groups = with_stream(test, manager, Limits(2), one_by_one(2), n=3)
    assert [(o.uid, o.sample, o.index) for g in groups for o in g.outcomes] == [
        (uid, i, i) for uid in ("0", "1") for i in range(3)
    ]
    assert {row.trajectory["step"] for row in manager.started} == {4}
    assert len({row.seed_key for row in manager.started}) == 6


def test_the_prompts_own_uid_stays_and_its_sample_does_not() -> None:
    """Whatever a column `sample` of the data set means, rows of a group have numbers of their own."""

    async def source() -> AsyncIterator[DataProto]:
        yield prompts(2, uid=["a", "b"], sample=[17, 17])

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[tuple[Any, int]]:
        return [(o.uid, o.sample) for group in await stream.take() for o in group.outcomes]

    found = with_stream(test, FakeRollouts(), Limits(2), source(), n=2)
    assert found == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_the_first_groups_to_finish_are_taken_and_the_others_carried_over() -> None:
    """The oldest of them first. None is lost, none comes twice; the last batch is shorter, then there are no more."""
    manager = FakeRollouts(seconds=lambda row: [5.0, 1.0, 2.0, 1.5, 1.0][number(row)])
    limits = Limits(2, staleness_threshold=0.5)
    assert with_stream(all_batches, manager, limits, one_by_one(5)) == [[1, 2], [0, 4], [3]]


def test_over_sampling_starts_more_and_takes_the_first() -> None:
    """Two beyond the batch of two; those that run on are in the next one, though others were quicker."""
    manager = FakeRollouts(seconds=lambda row: [9.0, 1.0, 2.0, 9.0, 1.0, 1.0][number(row)])

    async def test(stream: GroupStream, manager: FakeRollouts) -> tuple[list[int], dict[str, float]]:
        groups = await stream.take()
        assert len(manager.started) == 4
        return numbers(groups), stream.statistics(groups)

    limits = Limits(2, staleness_threshold=0.1, over_sample=2)
    found, statistics = with_stream(test, manager, limits, one_by_one(6))
    assert found == [1, 2]
    assert statistics["fully_async/monitor/active_tasks_size"] == 2


def test_nothing_starts_before_the_first_batch_is_asked_for() -> None:
    """As in `AgentLoopManager.stream`."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[Row]:
        await asyncio.sleep(10)
        return list(manager.started)

    assert with_stream(test, FakeRollouts(), Limits(2), one_by_one(5)) == []


def test_generation_goes_on_while_the_trainer_is_busy_as_far_as_the_window_lets_it() -> None:
    """Six groups of version 0 and no more, however long it takes; four more after the update."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[int]:
        await stream.take()
        await asyncio.sleep(100)
        before = len(manager.started)
        update(stream, manager)
        await asyncio.sleep(100)
        return [before, len(manager.started)]

    assert with_stream(test, FakeRollouts(), Limits(4, staleness_threshold=0.5), one_by_one(50)) == [6, 10]


def test_a_batch_says_how_old_it_is() -> None:
    """Per row by its oldest token, per token on average; and in groups since the beginning."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[dict[str, float]]:
        found = []
        for _ in range(2):
            groups = await stream.take()
            found.append(stream.statistics(groups))
            await asyncio.sleep(0.5)
            update(stream, manager)
        return found

    manager = FakeRollouts(seconds=lambda row: [1.0, 1.0, 2.0, 4.0][number(row)])
    limits = Limits(2, staleness_threshold=1.0)
    first, second = with_stream(test, manager, limits, one_by_one(4))
    assert first["fully_async/trajectory_staleness/max"] == 0
    assert second["fully_async/trajectory_staleness/max"] == 1
    assert second["fully_async/trajectory_staleness/mean"] == 0.5
    assert second["fully_async/partial/total_partial_num"] == 2
    assert second["fully_async/staleness/0"] == second["fully_async/staleness/1"] == 2
    assert second["fully_async/count/stale_samples_processed"] == 2


# ---- what the trainer never sees ------------------------------------------------------------------------------------


def test_groups_without_variance_are_replaced_in_the_same_window() -> None:
    """On policy: the batch is full, and all of one version."""

    def outcome(row: Row, versions: list[int]) -> Outcome:
        return scored(row, versions, reward=1.0 if number(row) in (0, 2) else None)

    async def test(stream: GroupStream, manager: FakeRollouts) -> tuple[list[int], dict[str, float]]:
        groups = await stream.take()
        return numbers(groups), stream.statistics(groups)

    manager = FakeRollouts(outcome=outcome)
    found, statistics = with_stream(test, manager, Limits(3), one_by_one(9), n=2, drop_if=zero_variance)
    assert found == [1, 3, 4]
    assert statistics["fully_async/dropped/filtered"] == 2
    assert statistics["fully_async/response_length/dropped/rows"] == 4
    assert statistics["fully_async/trajectory_staleness/max"] == 0


def test_rewards_decide_about_variance() -> None:
    """All equal: none. A row without a reward says nothing."""
    row = Row(0, "u", 0, "a", {}, {}, {}, (0, 0, False, "u", 0))
    one, other = scored(row, [0], 1.0), scored(row, [0], 0.5)
    unscored = scored(row, [0])
    assert unscored.output is not None
    unscored.output.reward_score = None
    assert zero_variance([one, one])
    assert not zero_variance([one, other])
    assert not zero_variance([one, unscored])
    assert not zero_variance([unscored, unscored])
    assert not zero_variance([broken(row), broken(row)])


def test_a_failed_row_fails_its_group_and_as_many_as_are_allowed_are_replaced() -> None:
    """A quarter of a batch's eight rows may."""

    def outcome(row: Row, versions: list[int]) -> Outcome:
        return broken(row) if number(row) in (0, 2) and row.sample == 1 else scored(row, versions)

    async def test(stream: GroupStream, manager: FakeRollouts) -> tuple[list[int], dict[str, float]]:
        groups = await stream.take()
        return numbers(groups), stream.statistics(groups)

    manager = FakeRollouts(outcome=outcome)
    found, statistics = with_stream(test, manager, Limits(4), one_by_one(9), n=2, max_failed_fraction=0.25)
    assert found == [1, 3, 4, 5]
    assert statistics["fully_async/dropped/failed"] == 2


def test_more_failed_rows_are_an_error_after_which_it_goes_on() -> None:
    """The trainer gets it with its outcomes and its cause; until then nothing starts; what had finished is there."""

    def outcome(row: Row, versions: list[int]) -> Outcome:
        return broken(row) if number(row) == 0 else scored(row, versions)

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[list[int]]:
        with pytest.raises(RolloutError, match=r"2 of 8 rows failed: row 0 \(uid 0\): it broke") as caught:
            await stream.take()
        assert isinstance(caught.value.__cause__, LoopError)
        assert [o.status for o in caught.value.finished] == ["failed", "failed"]
        return await all_batches(stream, manager)

    manager = FakeRollouts(seconds=lambda row: 1.0 + number(row), outcome=outcome)
    assert with_stream(test, manager, Limits(4), one_by_one(6), n=2) == [[1, 2, 3, 4], [5]]


def test_while_an_error_waits_for_the_trainer_nothing_starts() -> None:
    """A broken cluster does not use up the prompts."""
    manager = FakeRollouts(outcome=lambda row, versions: broken(row))

    async def test(stream: GroupStream, manager: FakeRollouts) -> int:
        with pytest.raises(RolloutError):
            await stream.take()
        await asyncio.sleep(1000)
        return len(manager.started)

    assert with_stream(test, manager, Limits(2), one_by_one(100)) <= 6


def test_aborted_rows_drop_their_group() -> None:
    """With partial rollout off: their last turn is unfinished, and never passes for a whole one."""

    def outcome(row: Row, versions: list[int]) -> Outcome:
        made = scored(row, versions)
        return Outcome(made.index, made.uid, made.sample, "partial", made.output) if number(row) == 0 else made

    async def test(stream: GroupStream, manager: FakeRollouts) -> tuple[list[int], float]:
        groups = await stream.take()
        return numbers(groups), stream.statistics()["fully_async/dropped/aborted"]

    assert with_stream(test, FakeRollouts(outcome=outcome), Limits(2), one_by_one(4)) == ([1, 2], 1)


def test_what_an_early_update_makes_too_stale_is_dropped() -> None:
    """On policy a group of the version before is useless; it is counted, and replaced."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> tuple[list[int], float]:
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(1.5)
        update(stream, manager)
        return numbers(await waiting), stream.statistics()["fully_async/dropped/stale"]

    manager = FakeRollouts(seconds=lambda row: 1.0 + number(row))
    assert with_stream(test, manager, Limits(2), one_by_one(9)) == ([2, 3], 2)


# ---- errors and ends ------------------------------------------------------------------------------------------------


def test_an_error_of_the_data_comes_after_what_had_been_started() -> None:
    """With its own type, and again when asked again: it never passes for the end (pitfalls B9, B15, K26)."""

    async def source() -> AsyncIterator[DataProto]:
        async for prompt in one_by_one(3):
            yield prompt
        raise OSError("disk gone")

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[list[int]]:
        found = [numbers(await stream.take())]
        update(stream, manager)
        found.append(numbers(await stream.take()))
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone"):
                await stream.take()
        return found

    assert with_stream(test, FakeRollouts(), Limits(2), source()) == [[0, 1], [2]]


def test_the_end_of_data_is_an_empty_batch_again_and_again() -> None:
    """Also where there never was any."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[list[Group]]:
        return [await stream.take() for _ in range(3)]

    assert with_stream(test, FakeRollouts(), Limits(2), one_by_one(0)) == [[], [], []]


@pytest.mark.parametrize("error", [InputError("no raw_prompt"), ConnectionLost("gone")], ids=repr)
def test_what_a_rollout_raises_comes_with_its_own_type(error: Exception) -> None:
    """In place of outcomes; the group is counted as failed, and the others go on."""

    def outcome(row: Row, versions: list[int]) -> Outcome | Exception:
        return error if number(row) == 0 else scored(row, versions)

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[int]:
        with pytest.raises(type(error), match=str(error)):
            await stream.take()
        assert stream.statistics()["fully_async/dropped/failed"] == 1
        return numbers(await stream.take())

    assert with_stream(test, FakeRollouts(outcome=outcome), Limits(2), one_by_one(5)) == [1, 2]


def test_errors_of_several_groups_at_once_are_one() -> None:
    """The first, with notes about the others."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> tuple[list[str], list[Group]]:
        await asyncio.sleep(0)
        with pytest.raises(ConnectionLost) as caught:
            await stream.take()
        return caught.value.__notes__, await stream.take()

    errors = [ConnectionLost("first"), OSError("second")]
    manager = FakeRollouts(outcome=lambda row, versions: errors[number(row)])
    notes, rest = with_stream(test, manager, Limits(2), one_by_one(2))
    assert notes == ["group 1 ended with OSError: second"]
    assert rest == []


def test_an_error_of_the_filter_reaches_the_trainer() -> None:
    """It is the user's code."""

    def drop_if(outcomes: Any) -> bool:
        raise KeyError("acc")

    async def test(stream: GroupStream, manager: FakeRollouts) -> None:
        with pytest.raises(KeyError, match="acc"):
            await stream.take()

    with_stream(test, FakeRollouts(), Limits(1), one_by_one(1), drop_if=drop_if)


def test_a_cancel_that_a_rollout_raises_is_a_lost_connection() -> None:
    """The manager was closed meanwhile; it is no cancel of ours."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> None:
        with pytest.raises(ConnectionLost, match="the rollout of group 0 raised CancelledError"):
            await stream.take()
        assert stream.statistics()["fully_async/dropped/failed"] == 1

    manager = FakeRollouts(outcome=lambda row, versions: concurrent.futures.CancelledError())
    with_stream(test, manager, Limits(1), one_by_one(1))


@pytest.mark.parametrize("signal", [asyncio.CancelledError, StopIteration])
def test_a_signal_of_the_filters_own_is_an_error(signal: type[BaseException]) -> None:
    """Neither a cancel of ours nor the end."""

    def drop_if(outcomes: Any) -> bool:
        raise signal

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[Group]:
        with pytest.raises(RuntimeError, match=f"drop_if raised {signal.__name__}"):
            await stream.take()
        return await stream.take()

    assert with_stream(test, FakeRollouts(), Limits(1), one_by_one(1), drop_if=drop_if) == []


def test_a_group_that_cannot_be_begun_takes_no_place() -> None:
    """The error comes at once: nobody waits for a group that never ran."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> dict[str, float]:
        for _ in range(2):
            with pytest.raises(ValueError, match="negative"):
                await stream.take()
        return stream.statistics()

    found = with_stream(test, FakeRollouts(), Limits(1), one_by_one(1), n=-1)
    assert found["fully_async/monitor/active_tasks_size"] == found["fully_async/count/staleness_samples"] == 0


def test_somebody_who_cancels_every_task_is_no_end_of_data() -> None:
    """An asynchronous loader could, on the loop that it runs on."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> None:
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0.5)
        for task in asyncio.all_tasks() - {asyncio.current_task(), waiting}:
            task.cancel()
        for asked in (waiting, stream.take()):
            with pytest.raises(ConnectionLost, match="the stream of groups was cancelled"):
                await asked

    with_stream(test, FakeRollouts(), Limits(2), one_by_one(9))


def test_what_nobody_got_is_there_for_the_next() -> None:
    """Before others as old, and counted once; a window later, too, as far as it is not too stale."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[list[int]]:
        first = await stream.take()
        stream.put_back(first)
        second = await stream.take()
        assert stream.update_due
        update(stream, manager)
        stream.put_back(second)
        assert not stream.update_due
        found = [numbers(first), numbers(second), numbers(await stream.take())]
        assert stream.statistics()["fully_async/staleness/1"] == 2
        assert "fully_async/staleness/0" not in stream.statistics()
        return found

    found = with_stream(test, FakeRollouts(), Limits(2, staleness_threshold=1.0), one_by_one(9))
    assert found == [found[0]] * 3


def test_what_nobody_got_in_time_is_dropped() -> None:
    """On policy it is too stale after the update: counted, and replaced."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[int]:
        groups = await stream.take()
        update(stream, manager)
        stream.put_back(groups)
        found = numbers(await stream.take())
        assert stream.statistics()["fully_async/dropped/stale"] == 2
        assert stream.statistics()["fully_async/staleness/0"] == 2
        return found

    assert with_stream(test, FakeRollouts(), Limits(2), one_by_one(9)) == [2, 3]


def test_prompts_that_are_no_batch_are_refused() -> None:
    """By type."""

    async def source() -> AsyncIterator[Any]:
        yield {"raw_prompt": []}

    async def test(stream: GroupStream, manager: FakeRollouts) -> None:
        with pytest.raises(InputError, match=r"prompts come as zagent.DataProto, got dict"):
            await stream.take()

    with_stream(test, FakeRollouts(), Limits(1), source())


def test_a_trainer_that_forgets_to_update_is_told_so() -> None:
    """Instead of waiting for ever; after the update it goes on."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[int]:
        await stream.take()
        with pytest.raises(InputError, match="the 2 groups that weights of version 0 may begin are used up"):
            await stream.take()
        update(stream, manager)
        return numbers(await stream.take())

    assert with_stream(test, FakeRollouts(), Limits(2), one_by_one(9)) == [2, 3]


def test_a_trainer_that_does_not_update_after_the_last_batch_sees_the_end() -> None:
    """Though nothing may start any more."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[list[int]]:
        return [numbers(await stream.take()), numbers(await stream.take())]

    assert with_stream(test, FakeRollouts(), Limits(2), one_by_one(2)) == [[0, 1], []]


def test_close_cancels_what_runs_and_wakes_who_waits() -> None:
    """With an error that is no end of data."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> int:
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(1)
        await stream.close()
        with pytest.raises(ConnectionLost, match="closed"):
            await waiting
        with pytest.raises(ConnectionLost, match="closed"):
            await stream.take()
        return len(manager.cancelled)

    manager = FakeRollouts(seconds=lambda row: 100.0)
    assert with_stream(test, manager, Limits(2), one_by_one(9), n=3) == 6


def test_a_batch_that_is_given_up_is_still_there() -> None:
    """Cancelling `take` (Ctrl-C) takes nothing."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> list[int]:
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(1.5)
        waiting.cancel()
        await asyncio.wait([waiting])
        return numbers(await stream.take())

    manager = FakeRollouts(seconds=lambda row: 1.0 + number(row))
    assert with_stream(test, manager, Limits(2), one_by_one(2)) == [0, 1]


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_waits_of_both_sides_are_told() -> None:
    """The trainer waits 4 s for the first batch and trains 6; generation then stands still for 2 s of the 10."""

    async def test(stream: GroupStream, manager: FakeRollouts) -> dict[str, float]:
        await stream.take()
        await asyncio.sleep(6)
        return stream.statistics()

    manager = FakeRollouts(seconds=lambda row: 4.0)
    found = with_stream(test, manager, Limits(1, staleness_threshold=1.0, max_concurrent_samples=1), one_by_one(9))
    assert found["fully_async/trainer/wait_s"] == 4
    assert found["fully_async/trainer/idle_ratio"] == 0.4
    assert found["fully_async/rollouter/idle_ratio"] == 0.2
    assert found["fully_async/rollouter/active_tasks_mean"] == 0.8
    assert found["fully_async/rollouter/blocked_s"] == 10  # there is always another prompt


def test_response_lengths_of_kept_and_carried_rows_are_told() -> None:
    """So that a bias towards short answers shows."""

    def outcome(row: Row, versions: list[int]) -> Outcome:
        return scored(row, versions * (1 + 2 * number(row)))

    async def test(stream: GroupStream, manager: FakeRollouts) -> dict[str, float]:
        await stream.take()
        update(stream, manager)
        await asyncio.sleep(10)
        return stream.statistics(await stream.take())

    manager = FakeRollouts(seconds=lambda row: 1.0 + number(row) / 10, outcome=outcome)
    found = with_stream(test, manager, Limits(2, staleness_threshold=0.1, over_sample=2), one_by_one(9))
    lengths = {key.removeprefix("fully_async/response_length/"): v for key, v in found.items() if "length" in key}
    assert {key: lengths[f"kept/{key}"] for key in ("rows", "mean", "max")} == {"rows": 2, "mean": 12, "max": 14}
    assert {key: lengths[f"carried/{key}"] for key in ("rows", "mean", "max")} == {"rows": 2, "mean": 20, "max": 22}
    assert lengths["dropped/rows"] == 0
    assert "kept 2 rows of 12 tokens (12, 14), carried 2 rows of 20 tokens" in lengths_line(found)
