"""What a trainer says to a cluster beside its rollouts: questions, and orders to the engines."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from zagent.client.calls import Calls
from zagent.client.llm_client import ENGINE_POOL
from zagent.config import Config
from zagent.errors import InputError
from zagent.trainer.checkpoint import Source
from zagent.trainer.control import Control
from zagent.trainer.delivery import Transport
from zagent.trainer.gate import Gate
from zagent.trainer.io_thread import IoThread
from zagent.trainer.places import trainer_name
from zagent.trainer.sleep import Sleep
from zagent.trainer.weights import Mode, Weights, WeightUpdate
from zagent.types import MEMORY_TAGS

Result = TypeVar("Result")
#: What the launcher removes at the end of the run, by its id in the name.
SHARED_MEMORY = Path("/dev/shm")


class EngineControls:
    """The part of `AgentLoopManager` that needs no rollouts."""

    def __init__(self, calls: Calls, io: IoThread, config: Config, *, run_id: str, endpoint: str) -> None:
        self._io = io
        self._control = Control(calls)
        self._gate = Gate(calls, self._control)
        self._sleep = Sleep(self._control, self._gate)
        base = SHARED_MEMORY if config.engine.weights_dir is None else Path(config.engine.weights_dir)
        self._weights = Weights(
            *(calls, self._control, self._gate, config.engine),
            directory=base / f"zagent-weights-{run_id}" / trainer_name(),
            reference=Path(config.model.path),
            address="127.0.0.1" if endpoint.startswith("ipc://") else socket.gethostname(),
        )

    @abstractmethod
    async def _started(self) -> None:
        """Wait until the cluster has: until then its pools are not complete."""

    def status(self) -> dict[str, Any]:
        """The broker's exact counts: `pools` (per member: state, in_flight, total, epoch, version, what it `lacks`
        while it sleeps, restarts, pid), `versions`, where their `weights` lie, and `gated` pools, `sessions`,
        `pending`, `counters`."""
        status: dict[str, Any] = self._ask(lambda: self._control.broker("status"))
        return status

    def engine_stats(self) -> dict[str, dict[str, Any]]:
        """Per engine, by its own count: calls, prompt_tokens, cached_tokens, response_tokens, in_flight."""
        return self._ask(lambda: self._control.on_members(ENGINE_POOL, "stats"))

    def clear_kv_cache(self) -> None:
        """Every engine forgets its prefix cache. Raises `EngineError` if one cannot (calls are running)."""
        self._ask(lambda: self._control.on_members(ENGINE_POOL, "clear_cache"))

    def drain(self, name: str, pool: str = ENGINE_POOL) -> None:
        """Give a member nothing new; what it has finishes. Its sessions move to others."""
        self._ask(lambda: self._control.broker("drain", [pool, name]))

    def remove(self, name: str, pool: str = ENGINE_POOL) -> None:
        """Take a member out at once; its calls run again elsewhere."""
        self._ask(lambda: self._control.broker("remove", [pool, name]))

    # ---- weights ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the weights that the engines serve: 0 at first, and what `update_weights` has made it since. Asks the
        broker."""
        return self._ask(self._weights.version)

    def update_weights(
        self, source: Source, *, version: int | None = None, mode: Mode = "wait", transport: Transport = "disk"
    ) -> WeightUpdate:
        """Bring new weights into all engines, while rows run or between batches.

        New engine calls wait meanwhile, and run on the new weights; KV of the former ones is not used again. An engine
        that cannot load them is started again and loads them then; one that starts later loads them before it serves.
        Where all engines are being started again, the first one is waited for, up to `engine.update_timeout_s`.

        Args:
            source: a directory of safetensors (used where it lies, and needed there until the next update), a model
                with `save_pretrained`, or named tensors (a map, or pairs), complete and by the checkpoint's names.
            version: of the weights, above the present one, and above that of an update that was broken off; default:
                the next.
            mode: what becomes of engine calls that run. `wait`: they end on the former weights, as long as it takes.
                `abort`: they are broken off, and go on on the new ones (`rollout.partial_rollout`), from a prompt that
                is computed anew. `in_place`: they stand still, and go on on the new ones with the KV they have.
            transport: `disk`: files, in shared memory unless `engine.weights_dir` says otherwise. `distributed`: over a
                torch process group of this process (rank 0) and the engines; by NCCL where this process has a GPU. No
                file has the weights then: an engine that starts later waits for the next update.

        Raises:
            InputError: weights with other names or shapes than the engines' checkpoint, or none of its kind; a version
                that does not follow, or is no 64-bit int.
            StateError: the engines sleep, and their weights with them; or another trainer is updating them; or there is
                no version beyond the present one.
            WeightUpdateError: no engine took them, or there is no room to write them. They serve the former ones, some
                after a restart.
            PoolLost: no engine is left, and none will be started again.
            DeadlineExceeded: calls still ran after `engine.update_timeout_s`; nothing has changed.
        """
        return self._ask(lambda: self._update(source, version, mode, transport))

    async def update_weights_async(
        self, source: Source, *, version: int | None = None, mode: Mode = "wait", transport: Transport = "disk"
    ) -> WeightUpdate:
        """`update_weights` from inside an event loop."""
        return await self._asked(lambda: self._update(source, version, mode, transport))

    async def _update(self, source: Source, version: int | None, mode: Mode, transport: Transport) -> WeightUpdate:
        done = await self._weights.update(source, version, mode, transport)
        await self._sleep.updated()
        return done

    def abort_all_requests(self) -> None:
        """Break off all engine calls that run. They go on after `resume_generation` (`rollout.partial_rollout`), and
        what comes meanwhile waits; rows notice nothing but the time. Raises `StateError` while another trainer is
        updating the engines."""
        self._ask(self._weights.abort)

    def resume_generation(self) -> None:
        """After `abort_all_requests`."""
        self._ask(lambda: self._gate.open("aborted"))

    # ---- memory -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int | None = None) -> dict[str, dict[str, int]]:
        """Engines give memory back, and engine calls wait until they wake up; per engine, bytes by kind of memory:
        zeros on a CPU, and on simulated engines, where nothing is released.

        Args:
            level: 1 releases KV, 2 the weights as well, which engines with GPUs of their own (`engine.mode=standalone`)
                keep. None: the most.

        Raises:
            InputError: there is no such level.
            StateError: calls run, the engines sleep already, or another trainer is updating them. They go on as they
                are.
            Whatever else keeps an engine from it (it died, say): the others wake up again. Weights that were released
            by then are garbage: calls run on engines that have some, or wait for `update_weights`.
        """
        if level not in (None, 1, 2):
            raise InputError(f"sleep has levels 1 (KV) and 2 (KV and weights), not {level!r:.80}")
        return self._ask(lambda: self._sleep.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Engines take their memory again (``tags``: `weights`, `kv_cache`; None: all that is released), whoever made
        them sleep. Calls pass when they have all of it, and weights. An engine that has started meanwhile has both.

        Weights that were released are garbage then. In SGLang's order: ``wake_up(["weights"])``, `update_weights`,
        ``wake_up(["kv_cache"])``; or ``wake_up()`` and `update_weights`, where there is room for that.

        Raises:
            InputError: there is no such memory.
            StateError: no engine sleeps; it is not that memory's turn; or another trainer is updating the engines.
        """
        if tags is not None and (isinstance(tags, str) or not set(tags) <= set(MEMORY_TAGS)):
            raise InputError(f"wake_up takes a list of {', '.join(MEMORY_TAGS)}, got {tags!r:.80}")
        self._ask(lambda: self._sleep.wake_up(tags))

    # ---- how --------------------------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Of a cluster that has started."""
        return self._io.run(self._when_started(question))

    async def _asked(self, question: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        return await asyncio.wrap_future(self._io.submit(self._when_started(question)))

    async def _when_started(self, question: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        await self._started()
        return await question()
