"""`FullyAsyncAgentLoopManager`: generation and training side by side, each at its own pace."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from zagent.client.llm_client import ENGINE_POOL
from zagent.data_proto import DataProto
from zagent.errors import ConnectionLost
from zagent.trainer.admission import Admission, Limits
from zagent.trainer.background import pulled
from zagent.trainer.checkpoint import Source
from zagent.trainer.group_stream import Filter, GroupStream
from zagent.trainer.groups import Group, joined
from zagent.trainer.io_thread import IoThread
from zagent.trainer.manager import AgentLoopManager
from zagent.trainer.weights import Mode, WeightUpdate

#: Groups that run at once for each engine, unless `max_concurrent_samples` says otherwise; verl's number.
CONCURRENT_PER_ENGINE = 16
#: Key of the batches' `meta_info`.
STATISTICS = "fully_async"

logger = logging.getLogger(__name__)


class FullyAsyncAgentLoopManager:
    """An iterator over batches, while what the next ones are made of is being generated.

    ``prompts`` gives `DataProto` with one or more rows, each of which becomes a *group* of ``n`` samples (default:
    `rollout.n`). A batch has ``ppo_mini_batch_size * require_batches`` groups, the rows of each beside one another; the
    last one may be shorter. Its ``meta_info["fully_async"]`` is `statistics`, and the batch's own.

        with zagent.FullyAsyncAgentLoopManager(manager, prompts, ppo_mini_batch_size=16) as batches:
            for batch in batches:
                train(batch)
                if batches.update_due:
                    batches.update_weights(model)

    How far generation runs ahead is bounded in groups and in updates (`zagent.trainer.admission.Limits`, whose keywords
    these are). ``drop_if`` is asked about the outcomes of each group that is complete; where it is true
    (`zagent.zero_variance`: all rewards are equal), another one is generated instead. Groups with failed rows are
    dropped as well; more than `rollout.max_failed_fraction` of a batch's rows are a `RolloutError`.

    Its methods may be called from any thread, those with ``async`` awaited on any loop. A context manager: leaving it
    cancels what runs, and leaves ``manager`` open.
    """

    def __init__(
        self,
        manager: AgentLoopManager,
        prompts: Iterable[DataProto] | AsyncIterable[DataProto],
        *,
        ppo_mini_batch_size: int,
        require_batches: int = 1,
        trigger_parameter_sync_step: int = 1,
        staleness_threshold: float = 0.5,
        over_sample: int = 0,
        n: int | None = None,
        drop_if: Filter | None = None,
        max_concurrent_samples: int | None = None,
        max_queue_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs until the first batch is asked for. Raises `ConfigError` for limits that cannot be."""
        self.limits = Limits(
            ppo_mini_batch_size * require_batches,
            trigger_parameter_sync_step=trigger_parameter_sync_step,
            staleness_threshold=staleness_threshold,
            over_sample=over_sample,
            max_concurrent_samples=max_concurrent_samples,
            max_queue_size=max_queue_size,
        )
        self._manager, self._prompts = manager, prompts
        self._n = manager.config.rollout.n if n is None else n
        self._drop_if, self._clock = drop_if, clock
        self._io = IoThread("zagent-fully-async")
        self._lock = threading.RLock()
        self._stream: GroupStream | None = None
        self._last: dict[str, float] = {}

    # ---- batches ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> FullyAsyncAgentLoopManager:
        return self

    def __next__(self) -> DataProto:
        """The next batch; waits for it.

        Raises:
            StopIteration: the prompts have ended, and all groups were given out.
            RolloutError: too many rows have failed. Asked again, it goes on.
            InputError: nothing can finish before the next `update_weights`; a row that cannot be used.
            Whatever ``prompts`` or ``drop_if`` raised; there are no further prompts after that.
        """
        stream = self._started()
        batch = self._io.run(self._take(stream, self._manager.version))
        if batch is None:
            raise StopIteration
        return self._collated(*batch)

    def __aiter__(self) -> FullyAsyncAgentLoopManager:
        return self

    async def __anext__(self) -> DataProto:
        stream = await asyncio.to_thread(self._started)
        version = await asyncio.to_thread(lambda: self._manager.version)
        batch = await asyncio.wrap_future(self._io.submit(self._take(stream, version)))
        if batch is None:
            raise StopAsyncIteration
        return await asyncio.to_thread(self._collated, *batch)

    def _started(self) -> GroupStream:
        with self._lock:
            if self._stream is None:
                limits = self.limits
                if limits.max_concurrent_samples is None:
                    engines = len(self._manager.status()["pools"][ENGINE_POOL])
                    limits = replace(limits, max_concurrent_samples=CONCURRENT_PER_ENGINE * engines)
                self._stream = self._io.run(self._made(Admission(limits, self._manager.version)))
            return self._stream

    async def _made(self, admission: Admission) -> GroupStream:
        return GroupStream(
            self._manager,
            pulled(self._prompts),
            admission,
            n=self._n,
            drop_if=self._drop_if,
            max_failed_fraction=self._manager.config.rollout.max_failed_fraction,
            clock=self._clock,
        )

    async def _take(self, stream: GroupStream, version: int) -> tuple[list[Group], dict[str, float]] | None:
        stream.follow(version)  # the weights may have been updated past us
        groups = await stream.take()
        return (groups, stream.statistics(groups)) if groups else None

    def _collated(self, groups: list[Group], statistics: dict[str, float]) -> DataProto:
        batch = self._manager.collate(*joined(groups))
        batch.meta_info[STATISTICS] = statistics
        logger.info("%s", lengths_line(statistics))
        return batch

    # ---- weights ----------------------------------------------------------------------------------------------------

    @property
    def update_due(self) -> bool:
        """Whether `trigger_parameter_sync_step` batches were taken since the last update."""
        return self._stream is not None and self._stream.update_due

    def update_weights(self, source: Source, *, version: int | None = None, mode: Mode | None = None) -> WeightUpdate:
        """`AgentLoopManager.update_weights`; then more groups may start. ``mode`` None: "abort", so that nobody waits
        for the longest answer, or "wait" with `rollout.partial_rollout=false`."""
        update = self._manager.update_weights(source, version=version, mode=mode or self._mode())
        self._io.run(self._follow(update.version))
        return update

    async def update_weights_async(
        self, source: Source, *, version: int | None = None, mode: Mode | None = None
    ) -> WeightUpdate:
        """`update_weights` from inside an event loop."""
        update = await self._manager.update_weights_async(source, version=version, mode=mode or self._mode())
        await asyncio.wrap_future(self._io.submit(self._follow(update.version)))
        return update

    def _mode(self) -> Mode:
        return "abort" if self._manager.config.rollout.partial_rollout else "wait"

    async def _follow(self, version: int) -> None:
        if self._stream is not None:
            self._stream.follow(version)

    # ---- what it tells ----------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, float]:
        """Of all that was generated so far (`zagent.trainer.stream_stats`); after `close`, of what had been."""
        with suppress(ConnectionLost):
            self._last = self._io.run(self._statistics())
        return self._last

    async def _statistics(self) -> dict[str, float]:
        return {} if self._stream is None else self._stream.statistics()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what runs. Whoever waits for a batch gets `ConnectionLost`."""
        with suppress(ConnectionLost):  # closed already, or in a fork
            self._last = self._io.run(self._end())
            self._io.close()

    async def _end(self) -> dict[str, float]:
        found = await self._statistics()
        if self._stream is not None:
            await self._stream.close()
        return found

    def __enter__(self) -> FullyAsyncAgentLoopManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def lengths_line(statistics: dict[str, float]) -> str:
    """Response lengths of a batch's rows beside those of rows that were finished but not taken, or dropped: where the
    first are shorter, it is short answers that the trainer sees."""
    parts = []
    for name in ("kept", "carried", "dropped"):
        rows, mean, median, most = (
            statistics[f"{STATISTICS}/response_length/{name}/{key}"] for key in ("rows", "mean", "median", "max")
        )
        parts.append(f"{name} {rows:.0f} rows" + (f" of {mean:.0f} tokens ({median:.0f}, {most:.0f})" if rows else ""))
    running = statistics[f"{STATISTICS}/monitor/active_tasks_size"]
    return "response lengths, mean (median, longest): " + ", ".join(parts) + f"; {running:.0f} groups run on"
