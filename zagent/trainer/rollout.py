"""The rows of one batch under way: each a call to the worker pool, each to one outcome."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from zagent.client.calls import Calls
from zagent.errors import EncodeError, from_wire
from zagent.trainer.rows import Row
from zagent.types import AgentLoopOutput, Outcome
from zagent.wire.codec import encode_body

WORKER_POOL = "worker"
#: Not `asdict`: it copies all values, and spoils those of dict subclasses (Counter, defaultdict).
ROW_FIELDS = tuple(field.name for field in dataclasses.fields(Row))


class Rollout:
    """Starts all rows at once, as many of them on the wire as ``window`` lets (all batches of a manager share it);
    `next` gives outcomes as they come.

    All methods on the loop of ``calls``.
    """

    def __init__(self, calls: Calls, rows: Sequence[Row], window: asyncio.Semaphore) -> None:
        self._calls = calls
        self._left = len(rows)
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()  # as long as the batch at most
        self._window = window
        self._tasks = [asyncio.create_task(self._run(row)) for row in rows]

    async def next(self) -> Outcome | None:
        """The next outcome, in order of completion; None after the last."""
        if not self._left:
            return None
        outcome = await self._outcomes.get()
        self._left -= 1
        return outcome

    async def rest(self) -> list[Outcome]:
        """All outcomes that `next` has not given, in input order. Cancelling it cancels the rows."""
        outcomes = []
        try:
            while (outcome := await self.next()) is not None:
                outcomes.append(outcome)
        except asyncio.CancelledError:
            await self.cancel()
            raise
        return sorted(outcomes, key=lambda outcome: outcome.index)

    async def cancel(self) -> None:
        """Stop the rows that still run, here, in the workers and in the engines."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, row: Row) -> None:
        async with self._window:
            self._outcomes.put_nowait(await self._outcome(row))

    async def _outcome(self, row: Row) -> Outcome:
        attempts = [1]
        try:
            reply = await self._calls.call(
                WORKER_POOL, "run", {key: getattr(row, key) for key in ROW_FIELDS}, on_attempt=attempts.append
            )  # fmt: skip
            return read_outcome(row, reply)
        except EncodeError as error:
            return Outcome(row.index, row.uid, row.sample, "failed", error=named(error, row), attempt=attempts[-1])
        except Exception as error:  # this row's end, not its siblings'
            return Outcome(row.index, row.uid, row.sample, "failed", error=error, attempt=attempts[-1])


def named(error: EncodeError, row: Row) -> EncodeError:
    """``error``, with the column of ``row`` whose value cannot cross the wire."""
    for key, value in row.kwargs.items():
        try:
            encode_body(value)
        except EncodeError as found:
            return EncodeError(f"column {key!r}: {found}")
    return error


def read_outcome(row: Row, reply: dict[str, Any]) -> Outcome:
    """The `Outcome` that a worker described."""
    output, error = reply["output"], reply["error"]
    return Outcome(
        row.index,
        row.uid,
        row.sample,
        reply["status"],
        None if output is None else AgentLoopOutput(**output),
        None if error is None else from_wire(error),
        reply["attempt"],
    )
