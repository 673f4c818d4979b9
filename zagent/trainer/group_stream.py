"""Groups under way while the trainer works: started as `Admission` lets them, taken in batches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from zagent.data_proto import DataProto
from zagent.errors import ConnectionLost, InputError, RolloutError, StateError
from zagent.trainer import stream_stats
from zagent.trainer.admission import Admission
from zagent.trainer.background import Pulled, as_error, raise_again
from zagent.trainer.groups import Group, oldest_version, prompts_of, rows_to_run
from zagent.trainer.manager import check_failures
from zagent.types import Outcome

Filter = Callable[[Sequence[Outcome]], bool]


class Rollouts(Protocol):
    """What is needed of an `AgentLoopManager`."""

    def stream_async(self, batch: DataProto) -> AsyncIterator[Outcome]: ...


class GroupStream:
    """``n`` rows a prompt. All methods on one event loop; rows start with the first `take`.

    ``drop_if`` is asked about each group that has all its rows. ``max_failed_fraction`` is of the rows of a batch:
    groups with failed rows are dropped, and more failed rows than that since the last batch are an error.
    """

    def __init__(
        self,
        manager: Rollouts,
        prompts: Iterable[DataProto] | AsyncIterable[DataProto],
        admission: Admission,
        *,
        n: int,
        drop_if: Filter | None = None,
        max_failed_fraction: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._prompts, self._admission = manager, Pulled(prompts), admission
        self._n, self._drop_if, self._max_failed = n, drop_if, max_failed_fraction
        self._clock = clock
        self._meter = stream_stats.Meter(clock())
        self._changed = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._finished: dict[int, Group] = {}
        self._blocked_since: float | None = None  # a prompt is there, and may not start
        self._ended = False
        self._end: BaseException | None = None  # why there are no more prompts, where it is no ordinary end
        self._error: BaseException | None = None  # the next `take` raises it; until then nothing starts
        self._failed: list[Outcome] = []  # of groups with failed rows, since the last batch
        self._dropped: list[Outcome] = []  # of all other groups that were dropped since then
        self._blocked_s = self._waited_s = 0.0
        self._closed = False

    @property
    def update_due(self) -> bool:
        return self._admission.update_due

    @property
    def version(self) -> int:
        """Of the engines' weights, as far as it was told."""
        return self._admission.version

    async def take(self) -> list[Group]:
        """The next batch: `Limits.required_samples` groups, the oldest first; fewer where the prompts have ended, none
        after that.

        Raises:
            RolloutError: more than ``max_failed_fraction`` of a batch's rows failed. Asked again, it goes on.
            InputError: nothing will finish before the next weight update.
            Whatever the prompts' iterator raised; there are no further prompts.
            Whatever ``drop_if`` raised, or a rollout in place of outcomes. Asked again, it goes on without that group.
        """
        if self._producer is None:
            self._meter = stream_stats.Meter(self._clock())
            self._producer = asyncio.create_task(self._produce())
        began = self._clock()
        try:
            while (batch := self._next_batch()) is None:
                await self._change()
        finally:
            self._waited_s += self._clock() - began
        self._admission.take(batch)
        self._failed.clear()
        self._turn()
        return [self._finished.pop(number) for number in batch]

    def _next_batch(self) -> list[int] | None:
        if self._closed:
            raise ConnectionLost("the stream of groups was closed")
        if self._error is not None:
            error, self._error = self._error, None
            self._failed.clear()
            self._turn()
            raise error
        if (batch := self._admission.batch()) is not None:
            return batch
        if self._ended and not self._admission.running:
            batch = self._admission.rest()
            if not batch and self._end is not None:
                raise self._end
            return batch
        if self._blocked_since is not None and self._admission.is_stuck:
            limits = self._admission.limits
            raise InputError(
                f"the {limits.max_required_samples} groups that weights of version {self._admission.version} may begin "
                f"are used up (trigger_parameter_sync_step={limits.trigger_parameter_sync_step}): update the weights"
            )
        return None

    def put_back(self, groups: Sequence[Group]) -> None:
        """They were taken, and nobody has got them: they are there for the next `take`, but for those that new weights
        have made too stale meanwhile."""
        self._finished |= {group.number: group for group in groups}
        self._drop(self._admission.put_back([group.number for group in groups]))

    def follow(self, version: int, updates: int = 1) -> None:
        """The engines have weights of ``version``, the last of so many ``updates``; if new, it is the next window."""
        if version > self.version:
            lost_anyway = self._admission.limits.max_staleness + 1  # what that many updates have passed over
            self._drop(self._admission.advance(version, min(updates, lost_anyway)))

    def notice(self, version: int) -> None:
        """`follow`, where others gave the engines weights: each version between may have been an update.

        Raises:
            StateError: those may be more than one, and more than the bound of the staleness. What is too stale then was
                dropped; asked again, it goes on.
        """
        known = self.version
        self.follow(version, updates=version - known)
        if version - known > max(1, self._admission.limits.max_staleness):
            raise StateError(
                f"the weights went from version {known} to {version} behind this stream's back: give them by its own "
                "update_weights as long as it is there, so that it can count the updates"
            )

    def _drop(self, late: Sequence[int]) -> None:
        for number in late:
            self._dropped.extend(self._finished.pop(number).outcomes)
        self._turn()

    # ---- the other side ---------------------------------------------------------------------------------------------

    async def _produce(self) -> None:
        try:
            async for batch in self._prompts:
                for prompt in prompts_of(batch):
                    await self._room()
                    # Nothing is admitted if that fails.
                    rows = rows_to_run(prompt, self._n, self._admission.admitted, self._admission.version)
                    number = self._admission.admit()
                    self._tasks[number] = asyncio.create_task(self._run(number, rows))
                    self._turn()
        except asyncio.CancelledError:
            self._end = ConnectionLost("the stream of groups was cancelled")  # never an ordinary end
            raise
        except BaseException as error:
            self._end = error
        finally:
            self._ended = True
            self._turn()

    async def _room(self) -> None:
        """Until one more group may start."""
        while not self._admission.is_open or self._error is not None:
            if self._blocked_since is None:
                self._blocked_since = self._clock()
                self._turn()
            await self._change()
        if self._blocked_since is not None:
            self._blocked_s += self._clock() - self._blocked_since
            self._blocked_since = None

    async def _run(self, number: int, rows: DataProto) -> None:
        try:
            outcomes = sorted([outcome async for outcome in self._manager.stream_async(rows)], key=lambda o: o.index)
            if reason := self._reason_to_drop(outcomes):
                self._admission.drop(number, reason)
            elif self._admission.finish(number, oldest_version(outcomes)):
                self._finished[number] = Group(number, rows, tuple(outcomes))
            else:
                self._dropped.extend(outcomes)
        except BaseException as error:
            found = as_error(error, f"the rollout of group {number}", ConnectionLost)  # the manager was closed
            if isinstance(found, asyncio.CancelledError):
                self._admission.drop(number, "cancelled")
                raise
            self._admission.drop(number, "failed")
            self._remember(found, number)
        finally:
            del self._tasks[number]
            self._turn()

    def _remember(self, error: BaseException, number: int) -> None:
        """For the next `take`. Of several the first, but a `RolloutError` has the outcomes of those before it."""
        if self._error is None or (isinstance(error, RolloutError) and isinstance(self._error, RolloutError)):
            self._error = error
        else:
            self._error.add_note(f"group {number} ended with {type(error).__name__}: {error}")

    def _reason_to_drop(self, outcomes: list[Outcome]) -> str:
        """ "" for a group that the trainer may have."""
        statuses = {outcome.status for outcome in outcomes}
        if statuses & {"failed", "cancelled"}:
            self._failed.extend(outcomes)
            self._check_failures()
            return "failed"
        if "partial" in statuses:
            reason = "aborted"
        elif self._is_unwanted(outcomes):
            reason = "filtered"
        else:
            return ""
        self._dropped.extend(outcomes)
        return reason

    def _is_unwanted(self, outcomes: list[Outcome]) -> bool:
        try:
            return self._drop_if is not None and bool(self._drop_if(outcomes))
        except BaseException as error:
            raise_again(error, "drop_if")

    def _check_failures(self) -> None:
        rows = self._admission.limits.required_samples * self._n
        check_failures(self._failed, self._max_failed, of=rows)

    # ---- both -------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._meter.set(self._admission.running, self._clock())
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def statistics(self, batch: Sequence[Group] | None = None) -> dict[str, float]:
        """Of the stream so far, and of a ``batch`` that was just taken."""
        now = self._clock()
        self._meter.set(self._admission.running, now)
        elapsed_s = self._meter.elapsed_s
        blocked_s = self._blocked_s + (0.0 if self._blocked_since is None else now - self._blocked_since)
        found = stream_stats.totals(self._admission) | {
            "rollouter/idle_ratio": self._meter.idle_share(),
            "rollouter/active_tasks_mean": self._meter.mean(),
            "rollouter/blocked_s": blocked_s,
            "trainer/idle_ratio": self._waited_s / elapsed_s if elapsed_s else 0.0,
            "trainer/wait_s": self._waited_s,
        }
        if batch is not None:
            found |= stream_stats.of_batch(batch, self._admission.age)
            carried = [outcome for group in self._finished.values() for outcome in group.outcomes]
            kept = [outcome for group in batch for outcome in group.outcomes]
            for name, outcomes in (("kept", kept), ("carried", carried), ("dropped", self._dropped)):
                found |= {f"response_length/{name}/{k}": v for k, v in stream_stats.lengths(outcomes).items()}
            self._dropped.clear()
        return {f"{stream_stats.STATISTICS}/{key}": value for key, value in found.items()}

    async def close(self) -> None:
        """Cancel what runs; a `take` that waits raises `ConnectionLost`."""
        self._closed = True
        running = [*([self._producer] if self._producer else []), *self._tasks.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._prompts.close()
        self._turn()
