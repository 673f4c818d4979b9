"""A manager without a cluster: rows take as long as the test says, and carry the version of the moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import zagent
from support.outcomes import failed, ok
from zagent.config import Config
from zagent.data_proto import DataProto
from zagent.trainer.rows import Row, rows_of
from zagent.types import Outcome


def prompts(count: int, **columns: Sequence[Any]) -> DataProto:
    """A batch of ``count`` one-message prompts."""
    messages = [[{"role": "user", "content": f"prompt {i}"}] for i in range(count)]
    return DataProto(non_tensor_batch={"raw_prompt": messages, **columns})


async def one_by_one(count: int) -> AsyncIterator[DataProto]:
    """Prompts 0 to ``count``, each in a batch of its own; column `number`."""
    for number in range(count):
        yield prompts(1, number=[number])


class FakeRollouts:
    """``seconds(row)`` is how long a row runs on the loop's clock, ``outcome(row, versions)`` what becomes of it; an
    exception it returns is raised in place of outcomes."""

    def __init__(
        self,
        seconds: Callable[[Row], float] = lambda row: 1.0,
        outcome: Callable[[Row, list[int]], Outcome | Exception] | None = None,
        version: int = 0,
        **rollout: Any,
    ) -> None:
        self.config = Config.from_dict({"rollout": rollout})
        self.version = version
        self.seconds, self.outcome = seconds, outcome or scored
        self.started: list[Row] = []
        self.cancelled: list[Row] = []
        self.log: list[Any] = []  #: what was asked, in order

    async def stream_async(self, batch: DataProto) -> AsyncIterator[Outcome]:
        rows = rows_of(batch, self.config.rollout)
        self.log.append(("start", rows[0].kwargs.get("number")))
        outcomes: asyncio.Queue[Outcome | Exception] = asyncio.Queue()  # in the same order each time
        tasks = [asyncio.create_task(self._run(row, outcomes)) for row in rows]
        try:
            for _ in rows:
                outcome = await outcomes.get()
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def generate_sequences_async(self, batch: DataProto) -> DataProto:
        outcomes = [outcome async for outcome in self.stream_async(batch)]
        return self.collate(outcomes, batch)

    async def _run(self, row: Row, outcomes: asyncio.Queue[Outcome | Exception]) -> None:
        self.started.append(row)
        versions = [self.version]
        try:
            await asyncio.sleep(self.seconds(row))
        except asyncio.CancelledError:
            self.cancelled.append(row)
            raise
        outcomes.put_nowait(self.outcome(row, [*versions, self.version]))

    def collate(self, outcomes: Sequence[Outcome], batch: DataProto | None = None) -> DataProto:
        return zagent.collate(outcomes, batch=batch)

    def status(self) -> dict[str, Any]:
        return {"pools": {"engine": {"engine-0": {}, "engine-1": {}}}}

    def update_weights(self, source: Any, *, version: int | None = None, mode: str = "wait") -> Any:
        if isinstance(source, Exception):
            raise source
        self.version = self.version + 1 if version is None else version
        self.log.append(("update", source, mode))
        return SimpleNamespace(version=self.version)

    async def update_weights_async(self, source: Any, *, version: int | None = None, mode: str = "wait") -> Any:
        return self.update_weights(source, version=version, mode=mode)


def scored(row: Row, versions: list[int], reward: float | None = None) -> Outcome:
    """Finished: one token of each version. The reward is the sample's number unless given."""
    extra = {
        "rollout_versions": versions,
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
    }
    score = float(row.sample) if reward is None else reward
    made = ok(row.index, response=[7] * len(versions), reward_score=score, extra_fields=extra)
    return replace(made, uid=row.uid, sample=row.sample)


def broken(row: Row) -> Outcome:
    """A row whose loop raised."""
    return replace(failed(row.index), uid=row.uid, sample=row.sample)
