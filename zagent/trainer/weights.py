"""New weights into running engines: gate, drain or pause, update, version, reopen; all of them or none."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from zagent.client.calls import Calls
from zagent.client.llm_client import ENGINE_POOL
from zagent.config import EngineConfig
from zagent.errors import CallerError, DeadlineExceeded, InputError, WeightUpdateError, ZagentError
from zagent.trainer.checkpoint import Source
from zagent.trainer.control import Control
from zagent.trainer.delivery import TRANSPORTS, Broadcasts, Delivery, FromDisk, Transport, in_thread
from zagent.trainer.gate import Gate

logger = logging.getLogger(__name__)

Mode = Literal["wait", "abort", "in_place"]
MODES = ("wait", "abort", "in_place")
#: Pauses between two looks whether the engines are idle, in seconds: the first, and the longest.
LOOK_S, LONGEST_LOOK_S = 0.005, 0.1


@dataclass(slots=True)
class WeightUpdate:
    """What an update did.

    ``seconds`` per stage, in order: `write`, `gate`, `drain`, `update`, `reopen`. ``engines`` by name: `updated`, or
    `restarted` where the engine could not load them: it is started again, and does so then or leaves the pool.
    ``checksum``: of the weights in the engines; equal for equal ones of one model, dtype and parallel size.
    """

    version: int
    seconds: dict[str, float] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    checksum: str = ""


class Weights:
    """Updates the engines' pool, when it is its turn. All methods on the loop of ``control``.

    Args:
        directory: for weights that are written.
        reference: the checkpoint the engines started with, if it can be seen from here.
        address: by which engines find this host.
    """

    def __init__(
        self,
        calls: Calls,
        control: Control,
        gate: Gate,
        config: EngineConfig,
        *,
        directory: Path,
        reference: Path | None,
        address: str,
    ) -> None:
        self._control, self._gate, self._config = control, gate, config
        self._directory, self._reference = directory, reference
        self._broadcasts = Broadcasts(control, config, address)
        #: What a broker that has lost it is told again: pool, version, directory.
        self._told: list[Any] | None = None
        self._telling: asyncio.Task[None] | None = None
        calls.link.on_rejoin(self._rejoined)

    async def version(self) -> int:
        """Of the weights that the engines serve; a broker that was started again may not have heard yet."""
        told = 0 if self._told is None else int(self._told[1])
        return max(told, int((await self._control.status())["versions"][ENGINE_POOL]))

    async def update(
        self, source: Source, version: int | None, mode: Mode, transport: Transport = "disk"
    ) -> WeightUpdate:
        """See `EngineControls.update_weights`."""
        for name, value, known in (("mode", mode, MODES), ("transport", transport, TRANSPORTS)):
            if value not in known:
                raise InputError(f"{name} is one of {', '.join(known)}, got {value!r}")
        async with self._gate.turn():
            version = await self._next(version)
            done = WeightUpdate(version)
            try:
                async with self._timed(done, "write"):
                    delivery = await self._prepare(source, version, transport)
                await self._bring(delivery, mode, done)
            except BaseException as error:
                # Broken off later, an engine may have them, and others follow it.
                if "update" not in done.seconds or isinstance(error, (CallerError, WeightUpdateError)):
                    await self._forget()
                raise
            self._told = [ENGINE_POOL, version, delivery.directory]
            await self._forget()
            return done

    async def _prepare(self, source: Source, version: int, transport: Transport) -> Delivery:
        if transport == "distributed":
            return await self._broadcasts.prepare(source, self._reference)
        place = self._directory / f"{version}-{uuid4().hex[:8]}"  # a broken-off update may have left one
        return await FromDisk.prepare(self._control, self._config, source, place, self._reference)

    async def close(self, *, engines_stay: bool) -> None:
        """Leave the process group, if there is one."""
        await self._broadcasts.close(engines_stay=engines_stay)

    def _rejoined(self, same_broker: bool) -> None:
        if self._told is not None:
            self._telling = asyncio.get_running_loop().create_task(self._tell(self._told))

    async def _tell(self, told: list[Any]) -> None:
        with suppress(ZagentError):  # gone again: we shall hear
            await self._control.broker("set_version", told)

    async def _next(self, version: int | None) -> int:
        now = await self.version()
        if version is not None and (type(version) is not int or version <= now):
            raise InputError(f"version {version!r} does not follow {now}: versions only grow")
        return now + 1 if version is None else version

    async def _bring(self, delivery: Delivery, mode: Mode, done: WeightUpdate) -> None:
        async with self._timed(done, "gate"):
            await self._gate.close("update")
        try:
            async with nullcontext() if mode == "wait" else self._paused():
                async with self._timed(done, "drain"):
                    await self._calm(mode)
                async with self._timed(done, "update"):
                    await self._load(delivery, done, flush=mode != "in_place")
        finally:
            async with self._timed(done, "reopen"):
                await self._gate.open("update")

    async def abort(self) -> None:
        """All that runs is broken off; the gate is closed for that reason then. Raises what keeps it from that."""
        async with self._gate.turn():  # the end of the pause would end that of an update, too
            await self._gate.close("aborted")
            try:
                async with self._paused():
                    await self._calm("abort")
            except BaseException:
                await self._gate.open("aborted")
                raise

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """What is paused within goes on then, also where this process ends before."""
        longest = 3 * self._config.update_timeout_s  # to pause, to become idle, to load
        async with self._control.beside(ENGINE_POOL, "resume_afterwards", timeout=longest):
            try:
                yield
            finally:
                await self._control.try_members(ENGINE_POOL, "resume")

    async def _calm(self, mode: Mode) -> None:
        """Whatever runs has ended, or stands still. An engine that does not pause is taken out."""
        if mode != "wait":
            epochs, timeout = await self._control.epochs(ENGINE_POOL), self._config.update_timeout_s
            await self._without_failed(
                epochs, await self._control.try_members(ENGINE_POOL, "pause", mode, timeout=timeout), "did not pause"
            )
        if mode != "in_place":
            await self.idle()

    async def _without_failed(self, epochs: Mapping[str, int], results: Mapping[str, Any], what: str) -> set[str]:
        """Engines that gave an exception are taken out, and start again; their names."""
        failed = {name: result for name, result in results.items() if isinstance(result, BaseException)}
        for name, error in failed.items():
            logger.error("engine %s %s: %s", name, what, error)
            await self._control.remove(ENGINE_POOL, name, epochs.get(name))
        return set(failed)

    async def idle(self) -> None:
        """Wait until no call is in flight. Raises `DeadlineExceeded` after `engine.update_timeout_s`."""
        pause, until = LOOK_S, asyncio.get_running_loop().time() + self._config.update_timeout_s
        while True:
            members = (await self._control.status())["pools"][ENGINE_POOL]
            busy = {name: member["in_flight"] for name, member in members.items() if member["in_flight"]}
            if not busy:
                return
            if asyncio.get_running_loop().time() > until:
                waited = f"{self._config.update_timeout_s:g} s (engine.update_timeout_s)"
                raise DeadlineExceeded(f"engines are not idle after {waited}: calls in flight {busy}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_S)

    async def _load(self, delivery: Delivery, done: WeightUpdate, *, flush: bool) -> None:
        what = f"version {done.version} of the weights"
        epochs = await self._control.epochs(ENGINE_POOL)
        results = await delivery.deliver(done.version, flush=flush)
        if not results:
            raise WeightUpdateError(f"no engine is there to take {what}")
        if all(isinstance(result, CallerError) for result in results.values()):  # nothing has been touched
            raise next(iter(results.values()))
        # Nobody knows what those serve now: they start again, and catch up.
        failed = await self._without_failed(epochs, results, f"did not take {what}")
        if len(failed) == len(results):
            raise WeightUpdateError(f"no engine took {what}: {results}")
        await self._control.broker("set_version", [ENGINE_POOL, done.version, delivery.directory])
        done.engines.update({name: "restarted" if name in failed else "updated" for name in results})
        sums = {name: result for name, result in results.items() if name not in failed}
        done.checksum = next(iter(sums.values()))
        if len(set(sums.values())) > 1:
            logger.warning("the engines' weights differ at version %d, by their checksums: %s", done.version, sums)

    async def _forget(self) -> None:
        """Remove directories that no engine will be told to load."""
        keep = None if self._told is None else self._told[2]
        for path in [path for path in self._directory.glob("*") if str(path) != keep]:
            await in_thread(shutil.rmtree, path)

    @asynccontextmanager
    async def _timed(self, done: WeightUpdate, stage: str) -> AsyncIterator[None]:
        clock: Callable[[], float] = asyncio.get_running_loop().time
        began = clock()
        try:
            yield
        finally:
            done.seconds[stage] = clock() - began
