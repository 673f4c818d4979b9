"""New weights into running engines: gate, drain or pause, update, version, reopen; all of them or none."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zagent.client.calls import Calls
from zagent.client.llm_client import ENGINE_POOL
from zagent.config import EngineConfig
from zagent.errors import (
    CallerError,
    DeadlineExceeded,
    EncodeError,
    InputError,
    StateError,
    WeightUpdateError,
    ZagentError,
)
from zagent.trainer.brought import Brought
from zagent.trainer.checkpoint import Source
from zagent.trainer.control import Control
from zagent.trainer.delivery import TRANSPORTS, Broadcasts, Delivery, FromDisk, Transport, in_thread
from zagent.trainer.gate import Gate
from zagent.trainer.places import Places
from zagent.wire.messages import LAST_VERSION

logger = logging.getLogger(__name__)

Mode = Literal["wait", "abort", "in_place"]
MODES = ("wait", "abort", "in_place")
#: Pauses between two looks whether the engines are idle, in seconds: the first, and the longest.
LOOK_S, LONGEST_LOOK_S = 0.005, 0.1
LOST = (
    "the broker and all engines were started again: they serve version %d of the weights, the latest that this "
    "trainer has brought; where another trainer has brought later ones, bring those again"
)
#: Seconds that a broker has to say what may be removed as the trainer leaves.
ASK_S = 5.0


@dataclass(slots=True)
class WeightUpdate:
    """What an update did.

    ``seconds`` per stage, in order: `write`, `gate`, `drain`, `update`, `reopen`. ``engines`` by name: `updated`, or
    `restarted` where the engine could not load them, or did not pause for it: it is started again, and loads them then
    or leaves the pool. ``checksum``: of the weights in the engines; equal for equal ones of one model, dtype and
    parallel size; "" where no engine gave it in time.
    """

    version: int
    seconds: dict[str, float] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    checksum: str = ""


class Weights:
    """Updates the engines' pool, when it is its turn. All methods on the loop of ``control``.

    Args:
        directory: for weights that are written; other trainers' lie beside it.
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
        self._places, self._reference = Places(directory), reference
        self._broadcasts = Broadcasts(control, config, address)
        self._brought = Brought()
        self._telling: asyncio.Task[None] | None = None
        calls.link.on_rejoin(self._rejoined)

    async def version(self) -> int:
        """Of the weights that the engines serve; a broker that was started again may not have heard yet."""
        return max(self._brought.served[0], (await self._seen())[0])

    async def _seen(self) -> tuple[int, str]:
        """What the broker says that the pool serves, and from which directory."""
        status = await self._control.status()
        version, directory = int(status["versions"][ENGINE_POOL]), str(status["weights"][ENGINE_POOL])
        self._brought.serve(version, directory)
        return version, directory

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
            finally:
                await _remove(place for place in self._places.own() if not self._brought.needs(str(place)))
            await _remove(self._places.left_by_others(version, delivery.directory))
            return done

    async def _prepare(self, source: Source, version: int, transport: Transport) -> Delivery:
        if transport == "distributed":
            return await self._broadcasts.prepare(source, self._reference)
        place = self._places.new(version)
        return await FromDisk.prepare(self._control, self._config, source, place, self._reference)

    async def close(self, *, engines_stay: bool) -> None:
        """Leave the process group, if there is one, and no more weights than engines that stay may be told to load."""
        if not engines_stay:
            await _remove(self._places.end())
        elif self._places.own():
            await _remove(self._places.leave(await self._needed_still()))
        await self._broadcasts.close(engines_stay=engines_stay)

    async def _needed_still(self) -> set[str]:
        """What the broker names; without its answer, what it may name."""
        with suppress(ZagentError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                return {(await self._seen())[1], *self._brought.pending}
        return {self._brought.served[1], *self._brought.pending}

    def _rejoined(self, same_broker: bool) -> None:
        if self._brought.served[0] and not same_broker:
            self._telling = asyncio.get_running_loop().create_task(self._tell(*self._brought.served))

    async def _tell(self, version: int, directory: str) -> None:
        """At once, before engines that were started again with the broker serve the weights of the start. What another
        trainer has brought since they would not know, either."""
        with suppress(ZagentError):  # gone again: we shall hear
            await self._control.broker("set_version", [ENGINE_POOL, version, directory])
            members = (await self._control.status())["pools"][ENGINE_POOL].values()
            if all(member["version"] < version for member in members):
                logger.warning(LOST, version)

    async def _next(self, version: int | None) -> int:
        now = max(await self.version(), self._brought.latest)
        if version is not None and type(version) is not int:
            raise InputError(f"version is a whole number, got {version!r:.80}")
        if version is not None and version <= now:
            raise InputError(f"version {version!r} does not follow {now}: versions only grow")
        if version is not None and version > LAST_VERSION:
            raise InputError(f"version {version} is beyond {LAST_VERSION}: versions are 64-bit ints")
        if now >= LAST_VERSION:
            raise StateError(f"no version follows {now}: versions are 64-bit ints, and only grow")
        return now + 1 if version is None else version

    async def _bring(self, delivery: Delivery, mode: Mode, done: WeightUpdate) -> None:
        async with self._timed(done, "gate"):
            await self._gate.close("update")
        try:
            async with nullcontext() if mode == "wait" else self._paused():
                async with self._timed(done, "drain"):
                    done.engines.update(dict.fromkeys(await self._calm(mode), "restarted"))
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

    async def _calm(self, mode: Mode) -> set[str]:
        """Whatever runs has ended, or stands still. Engines that do not pause are taken out; their names."""
        failed: set[str] = set()
        if mode != "wait":
            epochs, timeout = await self._control.epochs(ENGINE_POOL), self._config.update_timeout_s
            paused = await self._control.try_members(ENGINE_POOL, "pause", mode, timeout=timeout)
            failed = await self._without_failed(epochs, paused, "did not pause")
        if mode != "in_place":
            await self.idle()
        return failed

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
        epochs = await delivery.members()
        results = await self._deliver(delivery, done.version, flush=flush)
        if results and all(isinstance(result, CallerError) for result in results.values()):  # nothing has been touched
            self._brought.refused(delivery.directory)
            raise next(iter(results.values()))
        # Nobody knows what those serve now: they start again, and catch up.
        failed = await self._without_failed(epochs, results, f"did not take {what}")
        if len(failed) == len(results) and not await self._took_effect(done.version, delivery.directory):
            self._brought.refused(delivery.directory)
            raise WeightUpdateError(f"no engine took {what}: {results or 'none is there'}")
        await self._control.broker("set_version", [ENGINE_POOL, done.version, delivery.directory])
        self._brought.serve(done.version, delivery.directory)
        done.engines.update({name: "restarted" if name in failed else "updated" for name in results})
        done.checksum = await self._checksum(done.version, results.keys() - failed)

    async def _deliver(self, delivery: Delivery, version: int, *, flush: bool) -> dict[str, Any]:
        self._brought.sent(version, delivery.directory)
        try:
            return await delivery.deliver(version, flush=flush)
        except EncodeError:  # not to a single one
            self._brought.refused(delivery.directory)
            raise

    async def _took_effect(self, version: int, directory: str) -> bool:
        """Whether an engine has said that it serves that, before it failed: then others will load it."""
        await self._seen()
        return self._brought.served == (version, directory)

    async def _checksum(self, version: int, names: Iterable[str]) -> str:
        """Of the weights in these engines; who cannot say it serves them all the same."""
        results = await self._control.try_members(
            ENGINE_POOL, "checksum", version, names=sorted(names), timeout=self._config.update_timeout_s
        )
        for name in [name for name, result in results.items() if isinstance(result, BaseException)]:
            logger.warning("engine %s gave no checksum of version %d: %s", name, version, results.pop(name))
        if len(set(results.values())) > 1:
            logger.warning("the engines' weights differ at version %d, by their checksums: %s", version, results)
        return next(iter(results.values()), "")

    @asynccontextmanager
    async def _timed(self, done: WeightUpdate, stage: str) -> AsyncIterator[None]:
        clock: Callable[[], float] = asyncio.get_running_loop().time
        began = clock()
        try:
            yield
        finally:
            done.seconds[stage] = clock() - began


async def _remove(places: Iterable[Path]) -> None:
    """What cannot be removed now is tried again after the next update."""
    for place in places:
        await in_thread(shutil.rmtree, place, True)
