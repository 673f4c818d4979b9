"""The rows of a batch under way: one outcome each, whatever happens to them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from support.cluster_in_memory import Cluster
from support.virtual_clock import run
from zagent.client.calls import Calls, Retry
from zagent.config import RolloutConfig
from zagent.data_proto import DataProto
from zagent.errors import ConnectionLost, EncodeError, LoopError, MemberLost, to_wire
from zagent.trainer.rollout import Rollout, read_outcome
from zagent.trainer.rows import Row, rows_of
from zagent.types import AgentLoopOutput, Outcome
from zagent.wire.messages import Call


def rows(count: int, **columns: list[Any]) -> list[Row]:
    prompts = [[{"role": "user", "content": f"row {i}"}] for i in range(count)]
    batch = DataProto(non_tensor_batch={"raw_prompt": prompts, "uid": [f"u{i}" for i in range(count)], **columns})
    return rows_of(batch, RolloutConfig())


def reply(token: int, **fields: Any) -> dict[str, Any]:
    """A worker's description of a finished row."""
    ids = np.array([token], np.int32)
    output = {"prompt_ids": ids, "response_ids": ids, "response_mask": np.ones(1, np.int32)}
    return {"status": "ok", "output": output, "error": None, "attempt": 1, **fields}


class Worker:
    """Row i takes `seconds(i)`; notes how many run at once and which were cancelled."""

    def __init__(self, seconds: Any = lambda i: 0.0) -> None:
        self._seconds = seconds
        self.most = self.running = 0
        self.cancelled: list[int] = []

    async def __call__(self, row: Any, call: Call) -> dict[str, Any]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self._seconds(row["index"]))
            return reply(row["index"], attempt=call.attempt)
        except asyncio.CancelledError:
            self.cancelled.append(row["index"])
            raise
        finally:
            self.running -= 1


async def serving(cluster: Cluster, *workers: Any, credits: int = 1000) -> Calls:
    for number, worker in enumerate(workers):
        await cluster.member(f"w{number}", {"run": worker}, pool="worker", credits=credits)
    return await cluster.caller()


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 61])
def test_outcomes_come_in_input_order(count: int, workers: int) -> None:
    """Any number of rows on any number of workers, whatever order they finish in (pitfall F1)."""

    async def main() -> list[Outcome]:
        async with Cluster() as cluster:
            calls = await serving(cluster, *(Worker(lambda i: (i * 7) % 5) for _ in range(workers)), credits=4)
            return await Rollout(calls, rows(count), window=asyncio.Semaphore(1000)).rest()

    outcomes = run(main())
    assert [o.index for o in outcomes] == list(range(count))
    assert [o.uid for o in outcomes] == [f"u{i}" for i in range(count)]
    assert [int(o.output.response_ids[0]) for o in outcomes if o.output] == list(range(count))
    assert {o.status for o in outcomes} <= {"ok"}


def test_next_gives_outcomes_as_they_finish_and_then_none() -> None:
    """The quickest first; None again and again after the last."""

    async def main() -> list[int | None]:
        async with Cluster() as cluster:
            rollout = Rollout(await serving(cluster, Worker(lambda i: 3 - i)), rows(3), window=asyncio.Semaphore(10))
            given = [await rollout.next() for _ in range(5)]
            return [outcome and outcome.index for outcome in given]

    assert run(main()) == [2, 1, 0, None, None]


def test_rest_gives_what_next_has_not() -> None:
    """Each outcome once."""

    async def main() -> tuple[int, list[int]]:
        async with Cluster() as cluster:
            rollout = Rollout(await serving(cluster, Worker(lambda i: 3 - i)), rows(3), window=asyncio.Semaphore(10))
            first = await rollout.next()
            assert first is not None
            return first.index, [outcome.index for outcome in await rollout.rest()]

    assert run(main()) == (2, [0, 1])


def test_the_window_bounds_what_is_on_the_wire() -> None:
    """At most that many rows at once, and all of them run."""

    async def main() -> tuple[int, int]:
        async with Cluster() as cluster:
            worker = Worker(lambda i: 1)
            outcomes = await Rollout(await serving(cluster, worker), rows(20), window=asyncio.Semaphore(6)).rest()
            return worker.most, len(outcomes)

    assert run(main()) == (6, 20)


def test_a_row_that_fails_is_an_outcome_among_the_others() -> None:
    """The worker's own error, with its class (pitfalls B6, K22)."""

    async def main() -> list[Outcome]:
        async with Cluster() as cluster:

            async def worker(row: Any, call: Call) -> dict[str, Any]:
                if row["index"] == 1:
                    return {"status": "failed", "output": None, "error": to_wire(LoopError("bad")), "attempt": 1}
                if row["index"] == 2:
                    raise ValueError("worse")
                return reply(row["index"])

            return await Rollout(await serving(cluster, worker), rows(4), window=asyncio.Semaphore(10)).rest()

    outcomes = run(main())
    assert [o.status for o in outcomes] == ["ok", "failed", "failed", "ok"]
    assert [type(o.error) for o in outcomes] == [type(None), LoopError, ValueError, type(None)]
    assert [o.output is None for o in outcomes] == [False, True, True, False]


def test_a_lost_workers_rows_run_again_elsewhere() -> None:
    """One outcome each, as attempt 2 (pitfalls B7, K1)."""

    async def main() -> list[Outcome]:
        async with Cluster() as cluster:
            calls = await serving(cluster, Worker(lambda i: 1000))
            dying = cluster.links[0]
            rollout = Rollout(calls, rows(3), window=asyncio.Semaphore(10))
            await asyncio.sleep(1)
            await cluster.member("w1", {"run": Worker()}, pool="worker")
            dying.close()
            outcomes = await rollout.rest()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()  # what the dead worker still runs
            await asyncio.sleep(0)
            return outcomes

    outcomes = run(main())
    assert [(o.status, o.attempt) for o in outcomes] == [("ok", 2)] * 3


def test_a_row_whose_workers_all_die_fails_with_the_number_of_attempts() -> None:
    """`MemberLost`; no hang."""

    async def main() -> list[Outcome]:
        async with Cluster() as cluster:

            async def worker(row: Any, call: Call) -> Any:
                raise MemberLost("dead again")

            await cluster.member("w", {"run": worker}, pool="worker")
            return await Rollout(await cluster.caller(Retry(attempts=3)), rows(1), window=asyncio.Semaphore(1)).rest()

    (outcome,) = run(main())
    assert (outcome.status, outcome.attempt, type(outcome.error)) == ("failed", 3, MemberLost)


def test_a_row_that_cannot_cross_the_wire_fails_alone() -> None:
    """`EncodeError`, naming the type."""

    async def main() -> list[Outcome]:
        async with Cluster() as cluster:
            calls = await serving(cluster, Worker())
            return await Rollout(calls, rows(2, extra=[{"x": {1, 2}}, {"x": 1}]), window=asyncio.Semaphore(10)).rest()

    first, second = run(main())
    assert isinstance(first.error, EncodeError)
    assert "set" in str(first.error)
    assert second.status == "ok"


def test_cancel_stops_the_rows_at_the_workers() -> None:
    """Running and waiting ones; it returns when all have ended here."""

    async def main() -> tuple[list[int], bool]:
        async with Cluster() as cluster:
            worker = Worker(lambda i: 1000)
            rollout = Rollout(await serving(cluster, worker), rows(10), window=asyncio.Semaphore(4))
            await asyncio.sleep(1)
            await rollout.cancel()
            await asyncio.sleep(0.1)
            return sorted(worker.cancelled), cluster.quiet()

    assert run(main()) == ([0, 1, 2, 3], True)


@pytest.mark.parametrize("count", [0, 3])
def test_cancel_right_after_the_start(count: int) -> None:
    """Before any row had its turn; twice does no harm."""

    async def main() -> bool:
        async with Cluster() as cluster:
            rollout = Rollout(await serving(cluster, Worker()), rows(count), window=asyncio.Semaphore(4))
            await rollout.cancel()
            await rollout.cancel()
            await asyncio.sleep(0.1)
            return cluster.quiet()

    assert run(main())


def test_cancelling_rest_cancels_the_rows() -> None:
    """A trainer that gives up leaves no work behind."""

    async def main() -> tuple[list[int], bool]:
        async with Cluster() as cluster:
            worker = Worker(lambda i: 1000)
            task = asyncio.create_task(
                Rollout(await serving(cluster, worker), rows(3), window=asyncio.Semaphore(10)).rest()
            )
            await asyncio.sleep(1)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0.1)
            assert task.cancelled()
            return sorted(worker.cancelled), cluster.quiet()

    assert run(main()) == ([0, 1, 2], True)


def test_a_lost_cluster_fails_every_row_that_ran() -> None:
    """`ConnectionLost` each; what had finished stays finished."""

    async def main() -> list[Outcome]:
        async with Cluster() as cluster:
            calls = await serving(cluster, Worker(lambda i: i * 10))
            rollout = Rollout(calls, rows(3), window=asyncio.Semaphore(10))
            await asyncio.sleep(5)
            calls.link.close("the cluster has ended")
            return await rollout.rest()

    outcomes = run(main())
    assert [o.status for o in outcomes] == ["ok", "failed", "failed"]
    assert isinstance(outcomes[2].error, ConnectionLost)


def test_the_row_arrives_whole() -> None:
    """Everything `run` needs, under the names of `Row`."""

    async def main() -> dict[str, Any]:
        async with Cluster() as cluster:
            seen = []

            async def worker(row: Any, call: Call) -> dict[str, Any]:
                seen.append(row)
                return reply(0)

            calls = await serving(cluster, worker)
            await Rollout(calls, rows(1, ground_truth=["42"]), window=asyncio.Semaphore(1)).rest()
            return seen[0]  # type: ignore[no-any-return]

    row = run(main())
    assert row["kwargs"]["ground_truth"] == "42"
    assert row["kwargs"]["raw_prompt"] == [{"role": "user", "content": "row 0"}]
    assert (row["index"], row["uid"], row["sample"], row["agent_name"]) == (0, "u0", 0, "single_turn_agent")
    assert row["seed_key"] == [0, -1, False, "u0", 0]


def test_an_outcome_is_read_back_with_arrays_as_they_are() -> None:
    """No lists are built on the way."""
    (row,) = rows(1)
    outcome = read_outcome(row, reply(7, status="partial", attempt=2))
    assert (outcome.status, outcome.attempt) == ("partial", 2)
    assert isinstance(outcome.output, AgentLoopOutput)
    assert isinstance(outcome.output.response_ids, np.ndarray)


@pytest.mark.parametrize("answer", [None, {}, {"status": "ok"}, reply(1, output={"prompt_ids": 5})], ids=repr)
def test_a_reply_of_another_form_fails_its_row(answer: Any) -> None:
    """And nobody else's."""

    async def main() -> Outcome:
        async with Cluster() as cluster:

            async def worker(row: Any, call: Call) -> Any:
                return answer

            return (await Rollout(await serving(cluster, worker), rows(1), window=asyncio.Semaphore(1)).rest())[0]

    outcome = run(main())
    assert outcome.status == "failed"
    assert outcome.error is not None
