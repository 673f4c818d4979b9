"""`AgentLoopManager`: what a trainer holds. Batches in, token-exact tensors out."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType

from zagent.client.link import WELCOME_TIMEOUT_S
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.client.services import Services
from zagent.config import Config
from zagent.data_proto import DataProto
from zagent.errors import ConnectionLost, RolloutError, ZagentError
from zagent.trainer.collate import collate
from zagent.trainer.controls import EngineControls
from zagent.trainer.embed import Launched, start_launcher
from zagent.trainer.io_thread import IoThread
from zagent.trainer.links import Links, open_launcher
from zagent.trainer.rollout import Rollout
from zagent.trainer.rows import Row, rows_of
from zagent.types import Outcome

#: Seconds that a broker may be away before a manager that only joined the cluster takes it for gone. One that is
#: started again answers within two; on the launcher's own host its end is seen at once.
BROKER_PATIENCE_S = 30.0


class AgentLoopManager(EngineControls):
    """Runs agent loops on a cluster: one it launched (`launch`, `create`) or one it joined (`connect`).

    The synchronous methods may be called from any thread, also inside a running event loop; the ``_async`` ones are
    awaited on the caller's loop. A context manager: leaving it closes what it launched.
    """

    def __init__(self, endpoint: str, launched: Launched | None = None, timeout: float = WELCOME_TIMEOUT_S) -> None:
        self.endpoint = endpoint
        self._launched = launched
        self._io = IoThread("zagent-io")
        self._pid = os.getpid()
        self._closed = False
        self._closing = threading.RLock()
        try:
            self._links = Links(endpoint, patience_s=BROKER_PATIENCE_S if launched is None else math.inf)
            self._calls = self._io.run(self._links.here(timeout))
        except BaseException:
            self._io.close()
            raise
        facts = self._calls.link.facts
        self.config = Config.from_dict(facts["config"])
        self.run_id: str = facts.get("run_id", "")
        super().__init__(self._calls, self._io, self.config, run_id=self.run_id, endpoint=endpoint)
        self._window = asyncio.Semaphore(self.config.broker.max_pending)
        #: Calls engines directly: `await manager.server_manager.generate(…)` on any loop.
        self.server_manager = AsyncLLMServerManager(self._links.here)
        #: Calls services: `await manager.services["sandbox"].run(…)` on any loop.
        self.services = Services.configured(self._links.here, facts["config"].get("services", {}))
        launcher = os.pidfd_open(launched.pid) if launched is not None else open_launcher(endpoint, facts)
        if launcher is not None:
            self._io.loop.call_soon_threadsafe(self._watch_launcher, launcher)

    @classmethod
    def launch(cls, config: Config | None = None) -> AgentLoopManager:
        """Start a cluster on this machine and connect to it, as soon as its engines and services can be called: a
        trainer can be set up while the workers start. All that needs them waits for them.

        Raises:
            ConfigError, UnknownAgent: the configuration cannot be used here.
            StartupError: a process did not become ready.
            Nothing is left of what was started. What only a worker finds out (about a loop, a tool, a reward function,
            a tokenizer) is raised by `wait_until_started`, and by whatever waits.
        """
        launched = start_launcher(config or Config())
        try:
            return cls(launched.endpoint, launched)
        except BaseException:
            launched.close()
            raise

    @classmethod
    async def create(cls, config: Config | None = None) -> AgentLoopManager:
        """`launch` from inside an event loop."""
        launching: Future[AgentLoopManager] = Future()
        launching.set_running_or_notify_cancel()  # it cannot be taken back any more

        def launch() -> None:
            try:
                launching.set_result(cls.launch(config))
            except BaseException as error:
                launching.set_exception(error)

        threading.Thread(target=launch, name="zagent-launch", daemon=True).start()
        try:
            return await asyncio.wrap_future(launching)
        except asyncio.CancelledError:
            launching.add_done_callback(_close_unwanted)
            raise

    @classmethod
    def connect(cls, endpoint: str, timeout: float = WELCOME_TIMEOUT_S) -> AgentLoopManager:
        """Join a cluster that somebody else launched. Raises `ConnectionLost` if nobody answers there within
        ``timeout`` seconds; until then the cluster may still be starting."""
        return cls(endpoint, timeout=timeout)

    def wait_until_started(self) -> None:
        """Wait for the workers of a cluster that this process launched.

        Raises:
            ConfigError, UnknownAgent: one of them cannot use its part of the configuration.
            StartupError: one did not become ready.
            The cluster has ended then.
        """
        self._io.run(self._started())

    async def _started(self) -> None:
        if self._launched is not None:
            await asyncio.wrap_future(self._launched.started)

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    def generate_sequences(self, batch: DataProto) -> DataProto:
        """One trajectory per row of ``batch``, padded, in input order (zagent.trainer.collate says which tensors).

        ``batch.non_tensor_batch["raw_prompt"]`` holds each row's chat messages; ``meta_info`` may hold `validate` and
        `global_steps`.

        Raises:
            InputError: a batch that cannot be used; nothing has run.
            RolloutError: more than `rollout.max_failed_fraction` of the rows failed; has every row's outcome.
        """
        rows = rows_of(batch, self.config.rollout)
        outcomes, pad = self._io.run(self._run(rows))
        return self._collated(outcomes, batch, pad)

    async def generate_sequences_async(self, batch: DataProto) -> DataProto:
        """`generate_sequences` from inside an event loop. Cancelling it cancels the rows."""
        rows = rows_of(batch, self.config.rollout)
        outcomes, pad = await asyncio.wrap_future(self._io.submit(self._run(rows)))
        return await asyncio.to_thread(self._collated, outcomes, batch, pad)

    def stream(self, batch: DataProto) -> Iterator[Outcome]:
        """Outcomes in order of completion, unpadded; rows start with the first `next`. Closing the iterator cancels
        the rows that still run. Raises `InputError` at once for a batch that cannot be used."""
        return self._stream(rows_of(batch, self.config.rollout))

    def _stream(self, rows: list[Row]) -> Iterator[Outcome]:
        rollout = self._io.run(self._start(rows))
        try:
            while (outcome := self._io.run(rollout.next())) is not None:
                yield outcome
        finally:
            # Not waited for: the garbage collector may be the one that closes us, on the I/O thread, or in a fork.
            with suppress(ConnectionLost):
                self._io.submit(rollout.cancel())

    async def stream_async(self, batch: DataProto) -> AsyncIterator[Outcome]:
        """`stream` from inside an event loop."""
        rows = rows_of(batch, self.config.rollout)
        rollout = await asyncio.wrap_future(self._io.submit(self._start(rows)))
        try:
            while (outcome := await asyncio.wrap_future(self._io.submit(rollout.next()))) is not None:
                yield outcome
        finally:
            with suppress(ConnectionLost):  # closed meanwhile, and the rows with it
                await asyncio.wrap_future(self._io.submit(rollout.cancel()))

    async def _start(self, rows: list[Row]) -> Rollout:
        await self._started()  # else the first worker that is there would be given all of them
        return Rollout(self._calls, rows, self._window)

    async def _run(self, rows: list[Row]) -> tuple[list[Outcome], int]:
        await self._started()
        pad = await self._control.pad_token_id()  # before the work: what is done then needs nobody any more
        return await (await self._start(rows)).rest(), pad

    def collate(self, outcomes: Sequence[Outcome], batch: DataProto | None = None) -> DataProto:
        """Outcomes of `stream`, padded as `generate_sequences` does it; ``batch`` is what their indices count."""
        return self._padded(outcomes, batch, self._ask(self._control.pad_token_id))

    def _collated(self, outcomes: list[Outcome], batch: DataProto, pad_token_id: int) -> DataProto:
        check_failures(outcomes, self.config.rollout.max_failed_fraction)
        return self._padded(outcomes, batch, pad_token_id)

    def _padded(self, outcomes: Sequence[Outcome], batch: DataProto | None, pad_token_id: int) -> DataProto:
        rollout = self.config.rollout
        return collate(
            outcomes,
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            pad_token_id=pad_token_id,
            batch=batch,
        )

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _watch_launcher(self, handle: int) -> None:
        """On the I/O loop: when the launcher is gone, nobody will answer any more."""

        def gone() -> None:
            self._io.loop.remove_reader(handle)
            os.close(handle)
            self._links.close(self._end_of_cluster())

        self._io.loop.add_reader(handle, gone)

    def _end_of_cluster(self) -> str:
        if self._launched is None:
            return "the cluster's launcher has ended"
        reason = self._launched.exit_reason()
        return "the cluster was closed" if reason is None else f"the cluster has ended: {reason}"

    def close(self) -> None:
        """End what was launched, or just leave. Rows that still run are cancelled. Called again, from whichever thread,
        it returns when the first call has done its work."""
        if os.getpid() != self._pid:  # a forked data loader has no part in it
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            try:
                with suppress(ZagentError):  # the cluster is gone, or does not answer
                    self._io.run(self._weights.close(engines_stay=self._launched is None))
                self._links.close("the manager was closed")
            finally:
                if self._launched is not None:
                    self._launched.close()
                self._io.close()

    def __enter__(self) -> AgentLoopManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _close_unwanted(launching: Future[AgentLoopManager]) -> None:
    if launching.exception() is None:
        launching.result().close()


def check_failures(outcomes: list[Outcome], max_failed_fraction: float, of: int | None = None) -> None:
    """Raise `RolloutError` with all ``outcomes`` if more than that share of them (or of ``of`` rows) failed."""
    failed = [outcome for outcome in outcomes if outcome.status in ("failed", "cancelled")]
    rows = len(outcomes) if of is None else of
    if len(failed) <= max_failed_fraction * rows:
        return
    shown = [f"row {o.index} (uid {o.uid}): {_text(o.error)}" for o in failed[:3]]
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    error = RolloutError(f"{len(failed)} of {rows} rows failed: {'; '.join(shown)}{more}", outcomes)
    raise error from failed[0].error


def _text(error: Exception | None) -> str:
    return str(error) if isinstance(error, ZagentError) else f"{type(error).__name__}: {error}"
