"""How weights get to the engines: from a directory, or over a torch process group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar
from uuid import uuid4

from zagent.client.llm_client import ENGINE_POOL
from zagent.config import EngineConfig
from zagent.errors import WeightUpdateError
from zagent.loops.threads import started
from zagent.trainer.background import raise_again
from zagent.trainer.checkpoint import Source, tensors_of, write_checkpoint
from zagent.trainer.control import Control
from zagent.trainer.weights_group import TrainerGroup

Result = TypeVar("Result")
Transport = Literal["disk", "distributed"]
TRANSPORTS = ("disk", "distributed")


class Delivery(Protocol):
    """Weights on their way. All methods on the loop of the manager."""

    #: Where engines that come later find them; "" = nowhere.
    directory: str

    async def members(self) -> dict[str, int]:
        """The engines that can take them: epochs by name. Raises `PoolLost` where no engine will come any more."""

    async def deliver(self, version: int, *, flush: bool) -> dict[str, Any]:
        """Into all engines; by name, None or the exception. Raises `EncodeError` before any of them is told."""


class FromDisk:
    """Each engine reads the files."""

    def __init__(self, control: Control, config: EngineConfig, directory: Path) -> None:
        self._control, self._timeout, self.directory = control, config.update_timeout_s, str(directory)

    @classmethod
    async def prepare(
        cls, control: Control, config: EngineConfig, source: Source, place: Path, reference: Path | None
    ) -> FromDisk:
        """Write ``source`` to ``place``, unless it is a directory (`write_checkpoint`)."""
        return cls(control, config, await in_thread(write_checkpoint, source, place, reference))

    async def members(self) -> dict[str, int]:
        return await self._control.there(ENGINE_POOL, self._timeout)

    async def deliver(self, version: int, *, flush: bool) -> dict[str, Any]:
        argument = [self.directory, version, flush]
        return await self._control.try_members(ENGINE_POOL, "update_weights", argument, timeout=self._timeout)


class Broadcasts:
    """Over a process group of the trainer and the engines that there are: made at the first, and anew when others are
    there than before."""

    def __init__(self, control: Control, config: EngineConfig, address: str) -> None:
        self._control, self._config, self._address = control, config, address
        self._group: TrainerGroup | None = None
        self._members: dict[str, int] = {}  #: of the group: epoch by name

    async def prepare(self, source: Source, reference: Path | None) -> Broadcast:
        """Check ``source``, and see that all engines are in the group. Raises `InputError`, what engines raise, and
        `WeightUpdateError` or `PoolLost` where there is none."""
        tensors = await in_thread(tensors_of, source, reference)
        members = await self._control.there(ENGINE_POOL, self._config.update_timeout_s)
        if not members:
            raise WeightUpdateError("no engine took the weights: none is there")
        if self._group is None or members != self._members:
            await self.close()
            self._group, self._members = await self._join(sorted(members)), members
        return Broadcast(self._control, self._config, self._group, tensors)

    async def _join(self, names: list[str]) -> TrainerGroup:
        width, timeout = self._config.tensor_parallel_size, self._config.update_timeout_s
        name = f"zagent-{uuid4().hex[:8]}"

        def make() -> TrainerGroup:
            size, backend = width * len(names), _backend()
            return TrainerGroup(name, size, address=self._address, backend=backend, timeout_s=timeout)

        group = await in_thread(make)
        arguments = {
            engine: [group.address, group.port, 1 + width * index, group.world_size, name, group.backend]
            for index, engine in enumerate(names)
        }
        joining = asyncio.ensure_future(self._control.on_each(ENGINE_POOL, "join_group", arguments, timeout=timeout))
        # A group that does not come about ends only with torch's own timeout.
        joined = asyncio.ensure_future(in_thread(group.join, until_over=False))
        try:
            await asyncio.gather(joining, joined)
        finally:
            joining.cancel()
            joined.cancel()
        return group

    async def close(self, *, engines_stay: bool = True) -> None:
        """Leave the group, if there is one, and let the engines that stay leave it."""
        group, self._group = self._group, None
        if group is None:
            return
        if engines_stay:
            await self._control.try_members(ENGINE_POOL, "leave_group", group.name)
        await in_thread(group.close)


class Broadcast:
    """One of them."""

    directory = ""

    def __init__(self, control: Control, config: EngineConfig, group: TrainerGroup, tensors: Mapping[str, Any]) -> None:
        self._control, self._timeout, self._group, self._tensors = control, config.update_timeout_s, group, tensors

    async def members(self) -> dict[str, int]:
        return await self._control.epochs(ENGINE_POOL)  # one that comes now is not in the group

    async def deliver(self, version: int, *, flush: bool) -> dict[str, Any]:
        specs = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in self._tensors.items()
        ]
        argument = [self._group.name, specs, version, flush]
        sending = asyncio.ensure_future(in_thread(self._group.send, self._tensors))
        results = await self._control.try_members(ENGINE_POOL, "receive_weights", argument, timeout=self._timeout)
        await asyncio.wait((sending,))  # it ends with the engines, or with torch's own timeout
        if error := sending.exception():
            return dict.fromkeys(results, error)
        return results


async def in_thread(function: Callable[..., Result], *arguments: Any, until_over: bool = True) -> Result:
    """What it returns or raises, in a daemon thread: one that blocks does not keep the process from ending. A cancel is
    over only when the thread is, which cannot be stopped; or at once, if not ``until_over``. A second one
    (`IoThread.close`) leaves it alone."""
    working = started(partial(function, *arguments), "zagent-weights")
    try:
        await asyncio.wait((working,))
    except asyncio.CancelledError:
        if until_over:
            await asyncio.wait((working,))
        raise
    result, error = working.result()
    if error is not None:
        raise_again(error, "the weights")
    return result  # type: ignore[no-any-return]


def _backend() -> str:
    import torch

    return "nccl" if torch.cuda.is_available() else "gloo"
