"""`OneStepOffAgentLoopManager`: the next batch is generated while the trainer works on the last one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from zagent.data_proto import DataProto
from zagent.errors import ConnectionLost, InputError
from zagent.trainer.admission import Admission, Limits
from zagent.trainer.background import Pulled, raise_again
from zagent.trainer.checkpoint import Source
from zagent.trainer.groups import checked
from zagent.trainer.io_thread import IoThread
from zagent.trainer.manager import AgentLoopManager
from zagent.trainer.weights import Mode

#: A "group" is a whole batch here: the trainer has one, and the one after it runs or waits.
LIMITS = Limits(1, staleness_threshold=1.0, max_concurrent_samples=1, max_queue_size=1)
#: Key of the batches' `meta_info`.
STATISTICS = "one_step_off"


@dataclass(frozen=True, slots=True)
class Made:
    """A batch, and the seconds it took: of the data loader, and of the rollout."""

    batch: DataProto
    data_s: float
    generate_s: float


@dataclass(slots=True)
class Step:
    """One turn of the trainer's loop, in seconds."""

    asked_at: float
    ahead: bool  #: the batch was begun before it was asked for
    train_s: float
    wait_s: float = 0.0
    sync_s: float = 0.0

    def statistics(self, made: Made) -> dict[str, float]:
        found = {
            "data_s": made.data_s,
            "generate_s": made.generate_s,
            "train_s": self.train_s,
            "wait_s": self.wait_s,
            "sync_s": self.sync_s,
        }
        made_s = made.data_s + made.generate_s
        shorter = min(made_s, self.train_s)
        if self.ahead and shorter > 0:
            found["hidden_share"] = min(1.0, max(0.0, made_s - self.wait_s) / shorter)
        return found


class OneStepOffAgentLoopManager:
    """An iterator over generated batches, one step ahead of the trainer.

        with zagent.OneStepOffAgentLoopManager(manager, batches, weights=lambda: model) as steps:
            for batch in steps:
                train(batch)

    Asked for a batch, it waits until that is generated, gives the engines the weights (their caches are empty then),
    begins the next batch and hands this one over: each is sampled by the weights of one training step earlier.

    ``batches`` gives what `AgentLoopManager.generate_sequences` takes; their ``meta_info["global_steps"]`` becomes
    1, 2, … where it is not set. ``weights`` gives a source for `AgentLoopManager.update_weights`; it is asked each time
    but the first, in the thread that asks for the batch. None: they are as they were.

    ``meta_info["one_step_off"]`` of a batch: the `version` that sampled it, its `staleness` in updates, the seconds
    `data_s` and `generate_s` that it took, `wait_s` that the trainer waited for it, `train_s` that the trainer had
    been busy, `sync_s` for the weights. `hidden_share`, from the second on: how much of the shorter of the two, making
    the batch and training, was done beside the other.

    A context manager: leaving it cancels what runs, and leaves ``manager`` open. It has one user at a time.
    """

    def __init__(
        self,
        manager: AgentLoopManager,
        batches: Iterable[DataProto] | AsyncIterable[DataProto],
        *,
        weights: Callable[[], Source | None],
        mode: Mode = "wait",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs until the first batch is asked for. ``mode`` is `update_weights`'s, for others on the cluster:
        nothing of ours runs then. Raises `InputError` for ``batches`` that give none, and ``weights`` that are no
        function."""
        if not callable(weights) or hasattr(weights, "state_dict"):  # a torch module can be called, too
            raise InputError(
                f"weights is a function that gives them, such as lambda: model, got {type(weights).__name__}"
            )
        self._manager, self._weights, self._mode, self._clock = manager, weights, mode, clock
        self._batches = Pulled(batches)
        self._io = IoThread("zagent-one-step-off", "this OneStepOffAgentLoopManager")
        self._admission = Admission(LIMITS)  # whatever the version is: what counts are updates
        self._pending: Future[Made | None] | None = None
        self._number = 0  # of the pending batch, by admission
        self._trained = False  # since the weights were last given to the engines
        self._handed_at: float | None = None

    # ---- the trainer's side -----------------------------------------------------------------------------------------

    def __iter__(self) -> OneStepOffAgentLoopManager:
        return self

    def __next__(self) -> DataProto:
        """The next batch.

        Raises:
            StopIteration: ``batches`` has ended. The engines do not have the weights of the last step.
            WeightUpdateError: the weights could not be given to the engines. Asked again, it tries that again.
            Whatever ``batches`` raised, `SystemExit` and its like as well (`CancelledError`, a signal, comes as a
            `RuntimeError`); asked again, it raises that again.
            Whatever the rollout raised (`RolloutError`; `InputError`, also for what is no batch); asked again, it goes
            on with the next batch.
            Whatever ``weights`` raised; asked again, it asks that again.
            ConnectionLost: closed.
        """
        step = self._step()
        if not step.ahead:
            self._sync(step)
            self._begin()
        with suppress(CancelledError):
            self._future().exception()  # waits for its end; an interrupt (Ctrl-C) leaves the batch alone
        made = self._made(step)
        if made is None:
            raise StopIteration
        self._sync(step)
        return self._handed(step, made)

    def __aiter__(self) -> OneStepOffAgentLoopManager:
        return self

    async def __anext__(self) -> DataProto:
        """`__next__` from inside an event loop."""
        step = self._step()
        if not step.ahead:
            await self._sync_async(step)
            self._begin()
        waiting = asyncio.wrap_future(self._future())
        waiting.add_done_callback(_seen)
        await asyncio.wait([waiting])  # cancelling that leaves the batch alone
        made = self._made(step)
        if made is None:
            raise StopAsyncIteration
        await self._sync_async(step)
        return self._handed(step, made)

    def _step(self) -> Step:
        now = self._clock()
        train_s = 0.0 if self._handed_at is None else now - self._handed_at
        return Step(now, self._pending is not None, train_s)

    def _future(self) -> Future[Made | None]:
        assert self._pending is not None
        return self._pending

    def _made(self, step: Step) -> Made | None:
        """Of the pending batch, which has its end."""
        future = self._future()
        if future.cancelled():
            raise ConnectionLost("generation one step ahead was closed")
        if (error := future.exception()) is not None:
            self._admission.drop(self._number, "failed")
            self._pending = None
            raise error
        step.wait_s = self._clock() - step.asked_at
        return future.result()

    def _sync(self, step: Step) -> None:
        began, version = self._clock(), self._admission.version
        try:
            if self._trained and (source := self._weights()) is not None:
                version = self._manager.update_weights(source, mode=self._mode).version
        except BaseException as error:
            raise_again(error, "the weights")
        self._synced(step, began, version)

    async def _sync_async(self, step: Step) -> None:
        began, version = self._clock(), self._admission.version
        try:
            if self._trained and (source := self._weights()) is not None:
                version = (await self._manager.update_weights_async(source, mode=self._mode)).version
        except BaseException as error:
            raise_again(error, "the weights")
        self._synced(step, began, version)

    def _synced(self, step: Step, began: float, version: int) -> None:
        if self._trained:
            self._trained = False
            self._admission.advance(version)
            step.sync_s += self._clock() - began

    def _begin(self) -> None:
        self._pending = self._io.submit(self._make(self._admission.admitted + 1))  # nothing is admitted if that fails
        self._number = self._admission.admit()

    def _handed(self, step: Step, made: Made) -> DataProto:
        """The batch, described; the next one has begun."""
        oldest = oldest_of(made.batch)
        self._admission.finish(self._number, oldest)
        self._admission.take([self._number])
        version = self._admission.version if oldest is None else oldest
        made.batch.meta_info[STATISTICS] = {
            **step.statistics(made),
            "version": version,
            "staleness": self._admission.age(version),
        }
        self._begin()
        self._trained = True
        self._handed_at = self._clock()
        return made.batch

    # ---- on the I/O thread ------------------------------------------------------------------------------------------

    async def _make(self, global_steps: int) -> Made | None:
        """None: there are no more batches."""
        began = self._clock()
        try:
            batch = checked(await anext(self._batches))
        except StopAsyncIteration:
            return None
        loaded = self._clock()
        meta = {"global_steps": global_steps, **batch.meta_info}
        try:
            made = await self._manager.generate_sequences_async(DataProto(None, batch.non_tensor_batch, meta))
        except BaseException as error:
            raise_again(error, "the rollout", ConnectionLost)  # the manager was closed
        made.meta_info["global_steps"] = meta["global_steps"]
        return Made(made, loaded - began, self._clock() - loaded)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what runs; whoever waits for a batch gets `ConnectionLost`."""
        self._io.close()
        self._batches.close()

    def __enter__(self) -> OneStepOffAgentLoopManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def oldest_of(batch: DataProto) -> int | None:
    """The lowest version that sampled a token of it; None: nothing was sampled."""
    column = batch.non_tensor_batch.get("min_global_steps", ())
    return min((int(version) for version in column if version is not None), default=None)


def _seen(future: asyncio.Future[Any]) -> None:
    """No complaint about an error that the next one who asks is given."""
    if not future.cancelled():
        future.exception()
