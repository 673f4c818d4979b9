"""One step off: the next batch runs while the trainer works, in a fixed order, and errors keep their type."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.fake_rollouts import FakeRollouts, broken, prompts, scored
from zagent.data_proto import DataProto
from zagent.errors import ConnectionLost, InputError, LoopError, WeightUpdateError
from zagent.trainer.manager import check_failures
from zagent.trainer.one_step_off import Made, OneStepOffAgentLoopManager, Step
from zagent.trainer.rows import Row
from zagent.types import Outcome


class Rollouts(FakeRollouts):
    """No latency; failed rows are a `RolloutError`, as in the real one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(seconds=lambda row: 0.0, **options)

    async def generate_sequences_async(self, batch: DataProto) -> DataProto:
        outcomes = [outcome async for outcome in self.stream_async(batch)]
        check_failures(outcomes, 0.0)
        made = self.collate(outcomes, batch)
        self.log.append("made")
        return made


def batches(count: int, size: int = 2) -> Iterator[DataProto]:
    for number in range(count):
        yield prompts(size, number=[number] * size)


def numbers(batch: DataProto) -> int:
    return int(batch.non_tensor_batch["number"][0])


def test_the_order_of_a_step() -> None:
    """Await the batch, give the weights (which clears the caches), start the next one, hand it over. The first: no
    weights; the last starts nothing."""
    manager = Rollouts()
    sources = itertools.count()
    with OneStepOffAgentLoopManager(manager, batches(3), weights=lambda: f"w{next(sources)}") as steps:
        assert [numbers(batch) for batch in steps] == [0, 1, 2]
    assert [entry for entry in manager.log if entry != "made"] == [
        ("start", 0),
        ("start", 1),
        ("update", "w0", "wait"),
        ("start", 2),
        ("update", "w1", "wait"),
    ]
    ordered = [entry for entry in manager.log if entry == "made" or entry[0] in ("start", "update")]
    assert ordered.index(("update", "w0", "wait")) > [i for i, entry in enumerate(ordered) if entry == "made"][1]


def test_the_next_batch_runs_while_the_trainer_has_the_last_one() -> None:
    """It has started when that is handed over, and finishes without anybody asking."""
    done = threading.Event()

    def outcome(row: Row, versions: list[int]) -> Outcome:
        if row.kwargs["number"] == 1:
            done.set()
        return scored(row, versions)

    manager = Rollouts(outcome=outcome)
    with OneStepOffAgentLoopManager(manager, batches(2, size=1), weights=lambda: None) as steps:
        assert numbers(next(steps)) == 0
        assert done.wait(10)
        assert numbers(next(steps)) == 1


def test_each_batch_says_which_version_made_it() -> None:
    """The first two the one that was there, then one step behind; the trainer's step number enters the seeds."""
    manager = Rollouts(version=3)
    with OneStepOffAgentLoopManager(manager, batches(4), weights=lambda: "w") as steps:
        found = [(numbers(b), b.meta_info["one_step_off"], manager.version) for b in steps]
    assert [(number, info["version"], info["staleness"], there) for number, info, there in found] == [
        (0, 3, 0, 3),
        (1, 3, 1, 4),
        (2, 4, 1, 5),
        (3, 5, 1, 6),
    ]
    assert [row.trajectory["step"] for row in manager.started] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_the_trainers_own_step_number_stays() -> None:
    """In `meta_info` of what goes in and what comes out."""
    source = [DataProto(None, batch.non_tensor_batch, {"global_steps": 70 + i}) for i, batch in enumerate(batches(2))]
    with OneStepOffAgentLoopManager(Rollouts(), source, weights=lambda: None) as steps:
        assert [batch.meta_info["global_steps"] for batch in steps] == [70, 71]


def test_weights_that_have_not_changed_are_not_sent() -> None:
    """`weights` says None: no update, no version, no staleness."""
    manager = Rollouts()
    with OneStepOffAgentLoopManager(manager, batches(3), weights=lambda: None) as steps:
        assert [batch.meta_info["one_step_off"]["staleness"] for batch in steps] == [0, 0, 0]
    assert not [entry for entry in manager.log if entry[0] == "update"]


def test_an_error_of_the_data_comes_with_its_own_type_after_the_batch_before_it() -> None:
    """Again and again: it is no end of data (pitfall B15)."""

    def source() -> Iterator[DataProto]:
        yield from batches(2)
        raise OSError("disk gone")

    with OneStepOffAgentLoopManager(Rollouts(), source(), weights=lambda: "w") as steps:
        assert [numbers(next(steps)), numbers(next(steps))] == [0, 1]
        for _ in range(3):
            with pytest.raises(OSError, match="disk gone"):
                next(steps)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_errors_of_the_data_that_are_no_exceptions_come_as_well(error: BaseException) -> None:
    """With their own type, again and again: the trainer does not wait for ever."""

    def source() -> Iterator[DataProto]:
        yield from batches(1)
        raise error

    with OneStepOffAgentLoopManager(Rollouts(), source(), weights=lambda: "w") as steps:
        assert numbers(next(steps)) == 0
        for _ in range(3):
            with pytest.raises(type(error)):
                next(steps)


@pytest.mark.parametrize("kind", [asyncio.CancelledError, concurrent.futures.CancelledError])
def test_a_cancel_of_the_datas_own_is_an_error(kind: type[BaseException]) -> None:
    """Not the end, and nothing was closed; also from inside an event loop, whose task was not cancelled."""

    def source() -> Iterator[DataProto]:
        yield from batches(1)
        raise kind("mine")

    async def main() -> None:
        with OneStepOffAgentLoopManager(Rollouts(), source(), weights=lambda: "w") as steps:
            assert numbers(await anext(steps)) == 0
            with pytest.raises(RuntimeError, match="the data loader raised CancelledError: mine"):
                await anext(steps)
            with pytest.raises(RuntimeError, match="the data loader raised CancelledError: mine"):
                next(steps)

    asyncio.run(main())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), KeyError("w")], ids=repr)
def test_an_error_of_the_weights_comes_with_its_own_type(error: BaseException) -> None:
    """It is the user's code; asked again, so is that, and no batch is lost."""
    found: list[Any] = [error, "w", "w"]

    def weights() -> Any:
        if isinstance(found[0], BaseException):
            raise found.pop(0)
        return found.pop(0)

    with OneStepOffAgentLoopManager(Rollouts(), batches(3), weights=weights) as steps:
        assert numbers(next(steps)) == 0
        with pytest.raises(type(error)):
            next(steps)
        assert [numbers(batch) for batch in steps] == [1, 2]


@pytest.mark.parametrize("signal", [StopIteration, asyncio.CancelledError])
def test_weights_cannot_end_the_loop_without_a_word(signal: type[BaseException]) -> None:
    """`weights=lambda: next(sources)` beyond the last one is no end of data."""

    def weights() -> Any:
        raise signal

    async def main() -> None:
        with OneStepOffAgentLoopManager(Rollouts(), batches(3), weights=weights) as steps:
            assert numbers(next(steps)) == 0
            with pytest.raises(RuntimeError, match=f"the weights raised {signal.__name__}"):
                next(steps)
            with pytest.raises(RuntimeError, match=f"the weights raised {signal.__name__}"):
                await anext(steps)

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [None, {"raw_prompt": []}], ids=["None", "dict"])
def test_what_is_no_batch_is_refused(wrong: Any) -> None:
    """By type, and it goes on with the next one."""
    with OneStepOffAgentLoopManager(Rollouts(), [wrong, *batches(2)], weights=lambda: "w") as steps:
        with pytest.raises(InputError, match=f"prompts come as zagent.DataProto, got {type(wrong).__name__}"):
            next(steps)
        assert [numbers(batch) for batch in steps] == [0, 1]


def test_closing_does_not_wait_for_a_loader_that_blocks() -> None:
    """Who waits for the batch is told so."""
    unblock = threading.Event()

    def source() -> Iterator[DataProto]:
        yield from batches(1)
        unblock.wait(30)

    with OneStepOffAgentLoopManager(Rollouts(), source(), weights=lambda: "w") as steps:
        next(steps)
        steps.close()
        with pytest.raises(ConnectionLost, match="closed"):
            next(steps)
    assert not unblock.is_set()
    unblock.set()


def test_the_end_is_the_end_again_and_again() -> None:
    """StopIteration, also without any batch."""
    with OneStepOffAgentLoopManager(Rollouts(), [], weights=lambda: "w") as steps:
        assert [list(steps), list(steps)] == [[], []]


def test_after_a_failed_rollout_it_goes_on_with_the_next_batch() -> None:
    """The error comes with its own type; the weights trained meanwhile are given before the next one starts."""

    def outcome(row: Row, versions: list[int]) -> Outcome:
        return broken(row) if row.kwargs["number"] == 1 else scored(row, versions)

    manager = Rollouts(outcome=outcome)
    with OneStepOffAgentLoopManager(manager, batches(4), weights=lambda: "w") as steps:
        assert numbers(next(steps)) == 0
        with pytest.raises(Exception, match="2 of 2 rows failed") as caught:
            next(steps)
        assert isinstance(caught.value.__cause__, LoopError)
        assert [numbers(batch) for batch in steps] == [2, 3]
    wanted = [("start", 0), ("start", 1), ("update", "w", "wait"), ("start", 2), ("start", 3)]
    assert [entry for entry in manager.log if entry != "made"][:5] == wanted


def test_a_failed_weight_update_is_tried_again_and_no_batch_is_lost() -> None:
    """The batch is there still; the next one did not start before the weights were."""
    manager = Rollouts()
    sources = iter([WeightUpdateError("no room"), "w1", "w2"])
    with OneStepOffAgentLoopManager(manager, batches(3), weights=lambda: next(sources)) as steps:
        assert numbers(next(steps)) == 0
        with pytest.raises(WeightUpdateError, match="no room"):
            next(steps)
        assert ("start", 2) not in manager.log
        assert [numbers(batch) for batch in steps] == [1, 2]


def test_closing_cancels_what_runs() -> None:
    """Who waits gets an error that is no end of data; the manager is nobody's to close."""
    manager = FakeRollouts(seconds=lambda row: 0.0 if row.kwargs["number"] == 0 else 1000.0)
    steps = OneStepOffAgentLoopManager(manager, batches(2), weights=lambda: None)
    next(steps)
    ends: list[Exception] = []

    def wait() -> None:
        try:
            next(steps)
        except Exception as error:
            ends.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    steps.close()
    steps.close()
    waiter.join(10)
    assert [type(error) for error in ends] == [ConnectionLost]
    assert len(manager.cancelled) in (0, 2)  # 0: it had not come to that


def test_from_inside_an_event_loop() -> None:
    """`async for`, over an asynchronous source, in the same order."""

    async def source() -> Any:
        for batch in batches(3):
            yield batch

    async def main(manager: Rollouts) -> list[int]:
        with OneStepOffAgentLoopManager(manager, source(), weights=lambda: "w") as steps:
            return [numbers(batch) async for batch in steps]

    manager = Rollouts()
    assert asyncio.run(main(manager)) == [0, 1, 2]
    assert [entry for entry in manager.log if entry != "made"][2:4] == [("update", "w", "wait"), ("start", 2)]


def test_giving_up_waiting_leaves_the_batch_alone() -> None:
    """A cancelled `anext`: the batch is there when asked again."""
    ready = threading.Event()

    def outcome(row: Row, versions: list[int]) -> Outcome:
        assert ready.wait(10)
        return scored(row, versions)

    async def main() -> int:
        with OneStepOffAgentLoopManager(Rollouts(outcome=outcome), batches(1, 1), weights=lambda: None) as steps:
            waiting = asyncio.create_task(anext(steps))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            ready.set()
            return numbers(await anext(steps))

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize(
    ("data_s", "generate_s", "train_s", "wait_s", "share"),
    [(0, 10, 4, 6, 1.0), (0, 4, 10, 0, 1.0), (1, 9, 8, 6, 0.5), (0, 10, 10, 10, 0.0)],
)
def test_the_hidden_share_is_of_the_shorter_of_making_and_training(
    data_s: float, generate_s: float, train_s: float, wait_s: float, share: float
) -> None:
    """What did not have to be waited for."""
    made = Made(DataProto(), data_s, generate_s)
    assert Step(0.0, True, train_s, wait_s).statistics(made)["hidden_share"] == share
    assert "hidden_share" not in Step(0.0, False, train_s, wait_s).statistics(made)


@pytest.mark.parametrize("weights", [torch.nn.Linear(1, 1), {"w": torch.zeros(1)}, None])
def test_weights_are_asked_for(weights: Any) -> None:
    """A model is refused at once, though it can be called, too."""
    with pytest.raises(InputError, match="such as lambda: model"):
        OneStepOffAgentLoopManager(Rollouts(), [], weights=weights)
