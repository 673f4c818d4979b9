"""Engines that sleep while the trainer uses their GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from zagent.client.llm_client import ENGINE_POOL
from zagent.errors import StateError
from zagent.trainer.control import Control
from zagent.trainer.gate import Gate


class Sleep:
    """Memory of the engines' pool, behind its gate. All methods on the loop of ``control``."""

    def __init__(self, control: Control, gate: Gate) -> None:
        self._control, self._gate = control, gate
        self._asleep = False
        self._waits_for_weights = False

    async def sleep(self, level: int | None) -> dict[str, dict[str, int]]:
        """See `EngineControls.sleep`. All engines do, or none."""
        await self._gate.close("asleep")
        try:
            results = await self._all_sleep(level)
        except BaseException:
            if not self._asleep:
                await self._gate.open("asleep")
            raise
        self._asleep = True
        return results

    async def _all_sleep(self, level: int | None) -> dict[str, dict[str, int]]:
        members = (await self._control.status())["pools"][ENGINE_POOL]
        busy = {name: member["in_flight"] for name, member in members.items() if member["in_flight"]}
        if busy:
            raise StateError(f"calls run ({busy}): wait for them, or abort_all_requests(), before sleep()")
        results = await self._control.try_members(ENGINE_POOL, "sleep", level)
        if not results:
            raise StateError("no engine is there")
        failed = [error for error in results.values() if isinstance(error, BaseException)]
        if failed and len(failed) < len(results):
            await self._control.try_members(ENGINE_POOL, "wake_up")
        if failed:
            raise failed[0]
        return results

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """See `EngineControls.wake_up`."""
        results = await self._control.on_members(ENGINE_POOL, "wake_up", None if tags is None else list(tags))
        self._asleep = any(released for released, _ in results.values())
        self._waits_for_weights = any(lost for _, lost in results.values())
        await self._open()

    async def updated(self) -> None:
        """The engines have new weights."""
        self._waits_for_weights = False
        await self._open()

    async def _open(self) -> None:
        if not self._asleep and not self._waits_for_weights:
            await self._gate.open("asleep")
