"""Engines that sleep while the trainer uses their GPUs.

Each engine says itself to the broker what it lacks, and gets no calls until that is nothing, whatever becomes of its
trainer. The gate is closed beside that, so that nothing passes while some engines wake up before others, or start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zagent.client.llm_client import ENGINE_POOL
from zagent.errors import StateError
from zagent.trainer.control import Control
from zagent.trainer.gate import Gate

#: Of what an engine lacks, that which no `wake_up` restores: new weights.
UPDATE = "update"


class Sleep:
    """Memory of the engines' pool, behind its gate. All methods on the loop of ``control``."""

    def __init__(self, control: Control, gate: Gate) -> None:
        self._control, self._gate = control, gate
        #: What has to come before calls may pass. An engine that has died since may lack less.
        self._lacks: set[str] = set()

    async def sleep(self, level: int | None) -> dict[str, dict[str, int]]:
        """See `EngineControls.sleep`. All engines do, or none."""
        async with self._gate.turn():
            await self._gate.close("asleep")
            try:
                results = await self._all_sleep(level)
            except BaseException:
                await self._open()
                raise
            self._lacks = {tag for released in results.values() for tag in released}
            return results

    async def _all_sleep(self, level: int | None) -> dict[str, dict[str, int]]:
        members = await self._engines()
        busy = {name: member["in_flight"] for name, member in members.items() if member["in_flight"]}
        if busy:
            raise StateError(f"calls run ({busy}): wait for them, or abort_all_requests(), before sleep()")
        awake = [name for name, member in members.items() if not set(member["lacks"]) - {UPDATE}]
        try:
            return await self._control.on_members(ENGINE_POOL, "sleep", level)
        except BaseException:
            await self._control.try_members(ENGINE_POOL, "wake_up", names=awake)
            raise

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """See `EngineControls.wake_up`."""
        async with self._gate.turn():
            if tags is not None and not self._lacks and not any(m["lacks"] for m in (await self._engines()).values()):
                raise StateError(f"{' and '.join(tags)} is not released: no engine sleeps")
            asked = None if tags is None else list(tags)
            still = await self._control.on_members(ENGINE_POOL, "wake_up", asked)
            restored = self._lacks if asked is None else {*asked, UPDATE}
            self._lacks = (self._lacks - restored) | {lack for lacks in still.values() for lack in lacks}
            await self._open()

    async def updated(self) -> None:
        """The engines have new weights."""
        self._lacks.discard(UPDATE)
        await self._open()

    async def _engines(self) -> dict[str, dict[str, Any]]:
        members = (await self._control.status())["pools"][ENGINE_POOL]
        return {name: member for name, member in members.items() if member["state"] != "dead"}

    async def _open(self) -> None:
        if not self._lacks:
            await self._gate.open("asleep")
