"""The trainers' benchmark: its arithmetic, and on virtual time what it shows on real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import zagent
from benchmarks.rollout import trace
from benchmarks.rollout.agent import Done
from benchmarks.rollout.bounds import Engines, bound, calls
from benchmarks.rollout.trace import Row, Turn
from benchmarks.suite import Figure, Options
from benchmarks.trainers import suite
from benchmarks.trainers.loops import LOOPS, Work
from support.outcomes import ok
from support.virtual_clock import run
from zagent.data_proto import DataProto
from zagent.trainer.admission import Admission, Limits
from zagent.trainer.group_stream import GroupStream
from zagent.types import Outcome

ENGINES = Engines(count=4, slots=4)


def options(tmp_path: Path, **changed: object) -> Options:
    return replace(Options(True, None, suite.PEERS, None, tmp_path), **changed)  # type: ignore[arg-type]


# ---- the arithmetic -------------------------------------------------------------------------------------------------


def test_busy_until_the_last_row_begins() -> None:
    """Spans are cut at both ends; what follows the beginning of the last row is not looked at."""
    engines = Engines(count=1, slots=2, prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0)
    rows = [
        [Done("a", "", 100, 0, 20, 13.0), Done("a", "", 100, 100, 10, 15.0)],  # 10 to 13, 14 to 15
        [Done("b", "", 100, 0, 10, 16.0)],  # 14 to 16: the last to begin
    ]
    assert suite.busy_share(rows, engines, began=9.0) == pytest.approx(3 / 10)
    assert suite.busy_share(rows, engines, began=12.0) == pytest.approx(1 / 4)


def test_a_batch_takes_the_same_time_whatever_the_trace(tmp_path: Path) -> None:
    """Compressed; a short trace is repeated."""
    plan = suite.planned(0, options(tmp_path))
    assert len(plan.rows) == suite.QUICK_STEPS * suite.GROUPS * suite.SAMPLES
    assert plan.bound.work_s == pytest.approx(suite.QUICK_STEPS * suite.QUICK_BATCH_S)
    trace.write(file := tmp_path / "trace.jsonl", [Row(8, (Turn(1),)), Row(9, (Turn(2),))])
    assert suite.planned(0, options(tmp_path, trace=file)).rows[:3] == [
        Row(8, (Turn(1),)),
        Row(9, (Turn(2),)),
        Row(8, (Turn(1),)),
    ]


def test_all_trainers_get_the_same_rows(tmp_path: Path) -> None:
    """Prompt by prompt, or in batches with the samples beside one another."""
    plan = suite.planned(0, options(tmp_path))
    work = suite.work_of(plan, 1.0)
    batches = list(work.batches())
    assert (work.steps, len(batches)) == (suite.QUICK_STEPS, suite.QUICK_STEPS)
    found = [
        row["traces"][row["sample"]]
        for batch in batches
        for row in ({key: column[i] for key, column in batch.non_tensor_batch.items()} for i in range(len(batch)))
    ]
    assert found == [trace.plain(row) for row in plan.rows]
    assert [batch.meta_info["global_steps"] for batch in batches] == [1, 2, 3]


def test_the_table_names_the_trainers() -> None:
    """A line each, with the staleness beside its bound."""
    values = {"step_s": 2.0, "busy_share": 0.95, "trainer_idle_share": 0.1, "hidden_share": 0.9}
    values |= {"max_staleness": 1.0, "staleness_bound": 1.0}
    figures = [Figure("trainers", "c", peer, 0, name, v, "") for peer in suite.PEERS for name, v in values.items()]
    lines = suite.table(figures).splitlines()
    assert lines[4] == "| fully asynchronous | 2.00 | 1 | 95% | 10% | – | 1 (1) |"
    assert lines[5] == "| one-step-off | 2.00 | 1.00 (1.00–1.00) | 95% | 10% | 90% | 1 (1) |"


# ---- on real processes ----------------------------------------------------------------------------------------------


def test_every_trainer_sees_all_rows(tmp_path: Path) -> None:
    """A few, on one small cluster after the other's updates; and the figures are figures."""
    rows = [Row(8, (Turn(2 + i % 3), Turn(1))) for i in range(2 * 4 * 2)]
    plan = suite.Plan(rows, Engines(2, 4), 200.0, workers=1)
    work = replace(suite.work_of(plan, 0.1, samples=2), groups=4, parts=2, train_s=0.05)
    assert (work.steps, work.n) == (2, 2)
    with zagent.AgentLoopManager.launch(suite.config(plan, tmp_path)) as manager:
        for peer in suite.PEERS:
            seen = LOOPS[peer](manager, work)
            assert [len(calls) for calls in seen.rows] == [2] * len(rows)
            assert seen.staleness <= seen.bound
            figures = {name: value for name, value, _ in suite.measured(seen, plan, work)}
            assert 0 <= figures["busy_share"] <= 1
            assert figures["step_s"] >= work.train_s
        assert manager.version == 2 + 1 + 1


# ---- on virtual time ------------------------------------------------------------------------------------------------


@dataclass
class Modelled:
    """Engines with slots, and rows of the trace on them; `busy` collects slot-seconds, of which those after `until` are
    cut off when it is known."""

    work: Work
    engines: Engines

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.engines.all_slots)
        self.version = 0
        self.spans: list[tuple[float, float]] = []
        self.last_began = 0.0

    async def stream_async(self, batch: DataProto) -> AsyncIterator[Outcome]:
        columns = batch.non_tensor_batch
        self.last_began = asyncio.get_running_loop().time()
        rows = [
            trace.row_of(traces[sample]) for traces, sample in zip(columns["traces"], columns["sample"], strict=True)
        ]
        ran = await asyncio.gather(*map(self._run, rows))
        for index, versions in enumerate(ran):
            extra = {"rollout_versions": versions, "min_global_steps": min(versions)}
            yield _outcome(index, columns["uid"][index], extra)

    async def _run(self, row: Row) -> list[int]:
        versions = []
        for call in calls(row):
            async with self.slots:
                versions.append(self.version)
                began = asyncio.get_running_loop().time()
                await asyncio.sleep(self.engines.seconds(call.prompt, call.cached, call.new))
                self.spans.append((began, asyncio.get_running_loop().time()))
            await asyncio.sleep(call.tool_s)
        return versions

    def busy_share(self) -> float:
        """Until the last group began."""
        until = self.last_began
        busy = sum(max(0.0, min(end, until) - began) for began, end in self.spans)
        return busy / (self.engines.all_slots * until)


def _outcome(index: int, uid: str, extra: dict[str, object]) -> Outcome:
    return replace(ok(index, extra_fields=extra), uid=uid, sample=index)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("threshold", [0.5, 1.0])
def test_the_engines_are_busy_and_the_bound_holds_on_the_long_tailed_trace(seed: int, threshold: float) -> None:
    """At least 90 % of all slots over twelve steps, where training takes 0.8 of the time that generation takes at best.
    Nothing is dropped, and no token is older than the bound."""
    rows = trace.generate(seed, suite.STEPS * suite.GROUPS * suite.SAMPLES)
    plan = suite.Plan(rows, ENGINES, 1.0)
    batch_s = bound(rows, ENGINES).work_s / suite.STEPS
    work = suite.work_of(plan, batch_s)

    async def main() -> tuple[float, Admission, int]:
        clock = asyncio.get_running_loop().time
        manager = Modelled(work, ENGINES)
        limits = Limits(work.groups // work.parts, work.parts, threshold, max_concurrent_samples=8)
        stream = GroupStream(manager, _each(work), admission := Admission(limits), n=work.n, clock=clock)
        oldest = 0
        while groups := await stream.take():
            found = stream.statistics(groups)
            oldest = max(oldest, int(found["fully_async/trajectory_staleness/max"]))
            await asyncio.sleep(work.train_s / work.parts)
            if stream.update_due:
                manager.version += 1
                stream.follow(manager.version)
        await stream.close()
        return manager.busy_share(), admission, oldest

    busy, admission, oldest = run(main())
    assert busy >= 0.9
    assert oldest <= admission.limits.max_staleness
    assert not admission.dropped
    assert admission.staleness.total() == len(work.prompts)


async def _each(work: Work) -> AsyncIterator[DataProto]:
    for prompt in work.prompts:
        yield prompt
