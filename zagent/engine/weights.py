"""New weights in one engine: by order of whoever closed the pool's gate, or by itself where others have newer ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from zagent.client.member import Method
from zagent.engine.base import Engine, TensorSpec, WeightsGroup
from zagent.engine.memory import Memory
from zagent.errors import CallerError, InvalidRequest, StateError
from zagent.wire.messages import Call

Result = TypeVar("Result")


class EngineWeights:
    """The engine's methods for its weights and its memory (`methods`).

    Args:
        announce: tells the broker which version is served now, from which directory, and what the memory lacks.
        give_up: called with the reason where an engine cannot catch up with its pool.
    """

    def __init__(
        self, engine: Engine, memory: Memory, announce: Callable[[int, str], None], give_up: Callable[[str], None]
    ) -> None:
        self._engine, self._memory = engine, memory
        self._announce, self._give_up = announce, give_up
        self._turn = asyncio.Lock()
        self._served = (0, "")  #: version, directory
        self._wanted = (0, "")  #: what others serve
        self._catching_up: asyncio.Task[None] | None = None

    @property
    def methods(self) -> list[Method]:
        """All of them."""
        halts = [self.pause, self.resume, self.resume_afterwards]
        return [
            *halts,
            self.update_weights,
            self.checksum,
            self.sleep,
            self.wake_up,
            self.join_group,
            self.leave_group,
            self.receive_weights,
        ]

    async def pause(self, argument: Any, call: Call) -> None:
        """ "abort" or "in_place": what becomes of running calls; those that come wait."""
        if argument not in ("abort", "in_place"):
            raise InvalidRequest(f"pause takes 'abort' or 'in_place', got {argument!r:.80}")
        await self._engine.pause(argument)

    async def resume(self, argument: Any, call: Call) -> None:
        """After a pause."""
        await self._engine.resume()

    async def resume_afterwards(self, argument: Any, call: Call) -> None:
        """Runs until its caller cancels it, or is gone: then what is paused goes on."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self._engine.resume()

    async def update_weights(self, argument: Any, call: Call) -> None:
        """[directory, version, whether to clear the cache]. Goes on without its caller.

        Raises:
            EngineError: they could not be loaded.
            StateError: the engine serves others of that version, or newer ones.
        """
        if not isinstance(argument, list) or [type(part) for part in argument] != [str, int, bool]:
            raise InvalidRequest("update_weights takes [directory, version, flush]")
        await self._whole(self._update(*argument), "new weights could not be loaded")

    async def _update(self, directory: str, version: int, flush: bool) -> None:
        async with self._turn:
            if self._served[0] < version:
                await self._load(directory, version, flush=flush)
            elif self._served != (version, directory):
                number, place = self._served
                raise StateError(
                    f"the engine serves version {number} of the weights, from {place or 'a process group'}"
                )

    async def _whole(self, change: Coroutine[Any, Any, Result], failure: str) -> Result:
        """Not broken off where its call is: half of it would be nobody's weights, or nobody's memory. ``failure``: how
        the engine ends where it fails then."""
        task = asyncio.ensure_future(change)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(self._unheard, failure))
            raise

    def _unheard(self, failure: str, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, CallerError):
            self._give_up(f"{failure}: {error}")

    async def join_group(self, argument: Any, call: Call) -> None:
        """The fields of a `WeightsGroup`. Raises `EngineError`, `InvalidRequest`."""
        await self._engine.join_group(WeightsGroup(*_fields(argument, WeightsGroup)))

    async def leave_group(self, argument: Any, call: Call) -> None:
        """A group's name."""
        await self._engine.leave_group(str(argument))

    async def receive_weights(self, argument: Any, call: Call) -> None:
        """[group, tensors (the fields of a `TensorSpec` each), version, whether to clear the cache]. Raises
        `EngineError`."""
        if not isinstance(argument, list) or [type(part) for part in argument] != [str, list, int, bool]:
            raise InvalidRequest("receive_weights takes [group, tensors, version, flush]")
        name, tensors, version, flush = argument
        specs = [TensorSpec(*_fields(tensor, TensorSpec)) for tensor in tensors]
        await self._whole(self._receive(name, specs, version, flush=flush), "new weights could not be loaded")

    async def _receive(self, name: str, specs: Sequence[TensorSpec], version: int, *, flush: bool) -> None:
        async with self._turn:
            self._memory.check_update()
            await self._engine.receive_weights(name, specs, version, flush=flush and not self._memory.released)
            self._updated(version, "")

    async def _load(self, directory: str, version: int, *, flush: bool) -> None:
        self._memory.check_update()
        await self._engine.update_weights(directory, version, flush=flush and not self._memory.released)
        self._updated(version, directory)

    def _updated(self, version: int, directory: str) -> None:
        self._memory.updated()
        self._served = version, directory
        self._announce(version, directory)

    async def sleep(self, argument: Any, call: Call) -> dict[str, int]:
        """The level (1, 2 or None) → bytes released by kind of memory (`Memory.sleep`). Raises `StateError`. Goes on
        without its caller, as `wake_up` does."""
        return await self._whole(self._sleep(argument), "memory could not be released")

    async def _sleep(self, level: int | None) -> dict[str, int]:
        async with self._turn:
            tags = self._memory.sleep(level, self._engine.in_flight())
            self._announce(*self._served)
            return await self._engine.release(tags)

    async def wake_up(self, argument: Any, call: Call) -> list[str]:
        """Kinds of memory, or None → what the engine still lacks (`Memory.lacks`). Raises `StateError`."""
        if argument is not None and not isinstance(argument, list):
            raise InvalidRequest(f"wake_up takes kinds of memory, got {argument!r:.80}")
        return await self._whole(self._wake_up(argument), "memory could not be restored")

    async def _wake_up(self, tags: Sequence[str] | None) -> list[str]:
        async with self._turn:
            restored = self._memory.wake_up(tags)
            try:
                await self._engine.restore(restored)
            except BaseException:
                self._memory.not_restored(restored)
                raise
            self._announce(*self._served)
            return self._memory.lacks

    async def checksum(self, argument: Any, call: Call) -> str:
        """Of the weights; where the argument is a version, of that one. Raises `StateError`, `EngineError`."""
        async with self._turn:
            if argument not in (None, self._served[0]):
                raise StateError(f"the engine serves version {self._served[0]} of the weights, not {argument!r:.80}")
            return await self._engine.checksum()

    def catch_up(self, version: int, directory: str) -> None:
        """Others of the pool serve newer weights."""
        self._wanted = max(self._wanted, (version, directory))
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.get_running_loop().create_task(self._catch_up())

    async def _catch_up(self) -> None:
        async with self._turn:
            done = -1
            while done < self._wanted[0]:  # more may come meanwhile
                done, directory = self._wanted
                if self._served[0] >= done:
                    self._announce(*self._served)
                elif not directory:  # they came over the trainer's process group, and are in no file
                    print(f"waiting for weights beyond version {self._served[0]}", file=sys.stderr, flush=True)
                else:
                    await self._load_or_give_up(directory, done)

    async def _load_or_give_up(self, directory: str, version: int) -> None:
        try:
            await self._load(directory, version, flush=not self._engine.in_flight())
        except Exception as error:
            self._give_up(f"version {version} of the weights cannot be loaded: {error}")


def _fields(values: Any, of: type[tuple[Any, ...]]) -> list[Any]:
    """As many as a named tuple has. Raises `InvalidRequest`."""
    names: tuple[str, ...] = of._fields  # type: ignore[attr-defined]
    if not isinstance(values, list) or len(values) != len(names):
        raise InvalidRequest(f"{of.__name__} has {len(names)} fields ({', '.join(names)}), got {values!r:.80}")
    return values
