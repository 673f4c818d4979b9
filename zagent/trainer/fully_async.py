"""`FullyAsyncAgentLoopManager`: generation and training side by side, each at its own pace."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType

from zagent.client.llm_client import ENGINE_POOL
from zagent.data_proto import DataProto
from zagent.errors import ConfigError, ConnectionLost
from zagent.trainer.admission import Admission, Limits, check_count
from zagent.trainer.checkpoint import Source
from zagent.trainer.group_stream import Filter, GroupStream
from zagent.trainer.groups import Group, joined
from zagent.trainer.io_thread import IoThread
from zagent.trainer.manager import AgentLoopManager
from zagent.trainer.stream_stats import STATISTICS, lengths_line
from zagent.trainer.weights import Mode, WeightUpdate

#: Groups that run at once for each engine, unless `max_concurrent_samples` says otherwise; verl's number.
CONCURRENT_PER_ENGINE = 16

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    """A batch that somebody asks for. Changed on the I/O loop only."""

    groups: list[Group] = field(default_factory=list)  #: taken for him
    version: int = 0  #: that the stream knew of then
    given_up: bool = False


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

    As long as it is there, weights are given by its own `update_weights`, which counts updates; of others it sees only
    that the version has changed, and takes each version between for an update.

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
        """Nothing runs until the first batch is asked for. Raises `ConfigError` for limits that cannot be,
        counts that are none, and a ``drop_if`` that is no function."""
        check_count("ppo_mini_batch_size", ppo_mini_batch_size, 1)
        check_count("require_batches", require_batches, 1)
        if drop_if is not None and not callable(drop_if):
            raise ConfigError(f"drop_if is a function of a group's outcomes, got {drop_if!r:.80}")
        self._n: int = manager.config.rollout.n if n is None else n
        check_count("n", self._n, 1)
        self.limits = Limits(
            ppo_mini_batch_size * require_batches,
            trigger_parameter_sync_step=trigger_parameter_sync_step,
            staleness_threshold=staleness_threshold,
            over_sample=over_sample,
            max_concurrent_samples=max_concurrent_samples,
            max_queue_size=max_queue_size,
        )
        room = self.limits.max_required_samples - replace(self.limits, over_sample=0).max_required_samples
        if room < over_sample:
            text = "over_sample=%d: no more than %d groups have room in staleness_threshold=%g, rounded up"
            logger.warning(text, over_sample, room, staleness_threshold)
        self._manager, self._prompts = manager, prompts
        self._drop_if, self._clock = drop_if, clock
        self._io = IoThread("zagent-fully-async", "this FullyAsyncAgentLoopManager")
        self._lock = threading.RLock()
        self._updating = 0  # updates of ours that are under way: the version may have changed, and is not followed yet
        self._stream: GroupStream | None = None
        self._last: dict[str, float] = {}

    # ---- batches ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> FullyAsyncAgentLoopManager:
        return self

    def __next__(self) -> DataProto:
        """The next batch; waits for it. Interrupted (Ctrl-C) or cancelled, it leaves the batch to the next who asks.

        Raises:
            StopIteration: the prompts have ended, and all groups were given out.
            RolloutError: too many rows have failed. Asked again, it goes on.
            InputError: nothing can finish before the next `update_weights`; a row that cannot be used.
            StateError: others have updated the weights more often than `staleness_threshold` allows for; what was too
                stale was dropped. Asked again, it goes on.
            Whatever ``prompts`` raised, `SystemExit` and its like as well (`CancelledError`, a signal, comes as a
            `RuntimeError`); there are no further prompts, and asked again, it raises that again.
            Whatever ``drop_if`` raised, likewise; the group counts as failed. Asked again, it goes on.
            Whatever the rows could not be made a batch for; asked again, it tries that again.
            ConnectionLost: closed.
        """
        stream, asked = self._started(), _Asked()
        try:
            statistics = None
            while statistics is None:
                self._io.run(self._take(stream, asked, self._manager.version))
                statistics = self._io.run(self._taken(stream, asked, self._manager.version))
            if not asked.groups:
                raise StopIteration
            return self._collated(asked.groups, statistics)
        except BaseException:
            self._give_up(stream, asked)
            raise

    def __aiter__(self) -> FullyAsyncAgentLoopManager:
        return self

    async def __anext__(self) -> DataProto:
        """`__next__` from inside an event loop."""
        stream, asked = await asyncio.to_thread(self._started), _Asked()
        try:
            statistics = None
            while statistics is None:
                version = await asyncio.to_thread(self._version)
                await asyncio.wrap_future(self._io.submit(self._take(stream, asked, version)))
                version = await asyncio.to_thread(self._version)
                statistics = await asyncio.wrap_future(self._io.submit(self._taken(stream, asked, version)))
            if not asked.groups:
                raise StopAsyncIteration
            return await asyncio.to_thread(self._collated, asked.groups, statistics)
        except BaseException:
            self._give_up(stream, asked)
            raise

    def _version(self) -> int:
        return self._manager.version

    def _started(self) -> GroupStream:
        with self._lock:
            if self._stream is None:
                limits = self.limits
                if limits.max_concurrent_samples is None:
                    engines = len(self._manager.status()["pools"][ENGINE_POOL])
                    limits = replace(limits, max_concurrent_samples=CONCURRENT_PER_ENGINE * max(1, engines))
                self._stream = self._io.run(self._made(Admission(limits, self._manager.version)))
            return self._stream

    async def _made(self, admission: Admission) -> GroupStream:
        return GroupStream(
            self._manager,
            self._prompts,
            admission,
            n=self._n,
            drop_if=self._drop_if,
            max_failed_fraction=self._manager.config.rollout.max_failed_fraction,
            clock=self._clock,
        )

    async def _take(self, stream: GroupStream, asked: _Asked, version: int) -> None:
        self._notice(stream, version)
        asked.groups = await stream.take()
        asked.version = stream.version
        if asked.given_up:
            self._put_back(stream, asked)

    async def _taken(self, stream: GroupStream, asked: _Asked, version: int) -> dict[str, float] | None:
        """Its statistics; None: it was put back, since there are new weights, for which it may be too stale."""
        if not asked.groups:  # the end
            return {}
        self._notice(stream, version)
        if stream.version != asked.version:
            self._put_back(stream, asked)
            return None
        return stream.statistics(asked.groups)

    def _notice(self, stream: GroupStream, version: int) -> None:
        """The weights may have been updated past us."""
        if not self._updating:
            stream.notice(version)

    def _give_up(self, stream: GroupStream, asked: _Asked) -> None:
        async def give_up() -> None:
            asked.given_up = True
            self._put_back(stream, asked)

        with suppress(ConnectionLost):  # nobody is given anything any more
            self._io.submit(give_up())

    def _put_back(self, stream: GroupStream, asked: _Asked) -> None:
        groups, asked.groups = asked.groups, []
        stream.put_back(groups)

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
        for the longest answer, or "wait" with `rollout.partial_rollout=false`. Raises `StateError` before that, where
        others have updated the weights too often (see `next`)."""
        with self._own_update():
            if self._stream is not None:
                self._io.run(self._precede(self._stream, self._manager.version))
            update = self._manager.update_weights(source, version=version, mode=mode or self._mode())
            self._io.run(self._follow(update.version))
        return update

    async def update_weights_async(
        self, source: Source, *, version: int | None = None, mode: Mode | None = None
    ) -> WeightUpdate:
        """`update_weights` from inside an event loop."""
        with self._own_update():
            if self._stream is not None:
                now = await asyncio.to_thread(self._version)
                await asyncio.wrap_future(self._io.submit(self._precede(self._stream, now)))
            update = await self._manager.update_weights_async(source, version=version, mode=mode or self._mode())
            await asyncio.wrap_future(self._io.submit(self._follow(update.version)))
        return update

    @contextmanager
    def _own_update(self) -> Iterator[None]:
        with self._lock:
            self._updating += 1
        try:
            yield
        finally:
            with self._lock:
                self._updating -= 1

    def _mode(self) -> Mode:
        return "abort" if self._manager.config.rollout.partial_rollout else "wait"

    async def _precede(self, stream: GroupStream, version: int) -> None:
        if self._updating == 1:  # no other one of ours, which would follow its version itself
            stream.notice(version)

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
