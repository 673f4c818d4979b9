"""SGLang's control plane: flush, pause, new weights, checksums, memory. With `sglang_engine` and `sglang_launch`, all
that knows its internals."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from hashlib import blake2b
from typing import Any

from zagent.engine.base import PauseMode, TensorSpec, WeightsGroup
from zagent.engine.entrance import Entrance
from zagent.engine.sglang_life import Life
from zagent.errors import EngineError

#: Seconds SGLang may wait for idleness before it flushes its cache, and what its answer may take on top.
FLUSH_TIMEOUT_S = 10.0
FLUSH_GRACE_S = 5.0
#: Seconds between two rounds of aborts: a call that was just being handed over is missed by the first.
ABORT_AGAIN_S = 0.05
#: SGLang says this when the weights are new, but calls in flight kept it from clearing its cache.
NOT_FLUSHED = "the cache was not flushed"


class SGLangControl:
    """What is asked of SGLang beside generating.

    Args:
        manager: its tokenizer manager, which has one request of each kind under way at most: a cancelled one's answer
            would go to the next. So none is ever cancelled (`Life.keep`), and one follows the other.
    """

    def __init__(self, manager: Any, life: Life, update_timeout_s: float) -> None:
        self._manager, self._life = manager, life
        self._update_timeout_s = update_timeout_s
        self._turn = asyncio.Lock()
        self.entrance = Entrance()
        self._frozen = False

    async def flush(self) -> None:
        """Clear the prefix cache, once idle. Raises `EngineError`."""
        asked = self._manager.flush_cache(timeout_s=FLUSH_TIMEOUT_S)
        answer = await self._ask("flush_cache", asked, FLUSH_TIMEOUT_S + FLUSH_GRACE_S)
        if not answer.success:
            raise EngineError(f"SGLang did not clear its cache: {answer.message}")

    async def pause(self, mode: PauseMode) -> None:
        """As `Engine.pause`. SGLang's own abort mode takes a second at least."""
        self.entrance.close(mode)
        if mode == "abort":
            await self._abort_all()
            return
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._frozen = True
        await self._ask("pause", self._manager.pause_generation(PauseGenerationReqInput(mode=mode)))

    async def resume(self) -> None:
        """As `Engine.resume`."""
        await self._thaw()
        self.entrance.open()

    async def _abort_all(self) -> None:
        """Calls that stand still hear of it as they go on; those that were just being handed over, with the next
        round."""
        self._manager.abort_request(abort_all=True)
        await self._thaw()
        await asyncio.sleep(ABORT_AGAIN_S)
        while self._manager.rid_to_state:
            self._check_alive()
            self._manager.abort_request(abort_all=True)
            await asyncio.sleep(ABORT_AGAIN_S)

    async def _thaw(self) -> None:
        if self._frozen:
            from sglang.srt.managers.io_struct import ContinueGenerationReqInput

            request = ContinueGenerationReqInput(torch_empty_cache=False)
            await self._ask("continue", self._manager.continue_generation(request))
            self._frozen = False

    async def update_from_disk(self, directory: str, version: int, *, flush: bool) -> None:
        """Load the safetensors there.

        Raises:
            EngineError: SGLang could not. Its roll-back reads the new directory again, so what it serves then is
                anybody's guess.
        """
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        request = UpdateWeightFromDiskReqInput(
            model_path=directory, load_format="safetensors", weight_version=str(version), flush_cache=flush
        )
        await self._done("update_weights_from_disk", self._manager.update_weights_from_disk(request))

    async def join_group(self, group: WeightsGroup) -> None:
        """As `Engine.join_group`."""
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(
            master_address=group.address,
            master_port=group.port,
            rank_offset=group.rank,
            world_size=group.world_size,
            group_name=group.name,
            backend=group.backend,
        )
        await self._done("init_weights_update_group", self._manager.init_weights_update_group(request))

    async def leave_group(self, name: str) -> None:
        """As `Engine.leave_group`."""
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        request = DestroyWeightsUpdateGroupReqInput(group_name=name)
        await self._done("destroy_weights_update_group", self._manager.destroy_weights_update_group(request))

    async def receive(self, name: str, tensors: Sequence[TensorSpec], version: int, *, flush: bool) -> None:
        """As `Engine.receive_weights`; between SGLang's begin and end, without which it refuses."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromDistributedReqInput,
        )

        request = UpdateWeightsFromDistributedReqInput(
            names=[tensor.name for tensor in tensors],
            dtypes=[tensor.dtype for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
            group_name=name,
            flush_cache=flush,
            weight_version=str(version),
        )
        await self._done("begin_weight_update", self._manager.begin_weight_update(BeginWeightUpdateReqInput()))
        asked = self._manager.update_weights_from_distributed(request)
        await self._done("update_weights_from_distributed", asked)
        await self._done("end_weight_update", self._manager.end_weight_update(EndWeightUpdateReqInput()))

    async def _done(self, what: str, asked: Coroutine[Any, Any, Any]) -> None:
        """Raises `EngineError` where SGLang says that it did not do it."""
        success, message, *_ = await self._ask(what, asked, self._update_timeout_s)
        if not success and NOT_FLUSHED not in message:
            raise EngineError(f"{what} of SGLang failed: {message}")

    async def checksum(self) -> str:
        """Of all parameters, over all ranks."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        asked = self._manager.check_weights(CheckWeightsReqInput(action="checksum"))
        success, message, ranks, *_ = await self._ask("check_weights", asked, self._update_timeout_s)
        if not success:
            raise EngineError(f"SGLang gave no checksum: {message}")
        sums = [f"{name} {value}" for rank in ranks for name, value in sorted(rank["checksums"].items())]
        return blake2b("\n".join(sums).encode(), digest_size=8).hexdigest()

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """As `Engine.release`; by SGLang's own account of what the memory holds."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        held = (await self._manager.get_loads(include=["memory"]))[0].memory
        sizes = {"weights": held.weight_gb, "kv_cache": held.kv_cache_gb}
        await self.flush()
        asked = self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags)), None)
        await self._ask("release_memory_occupation", asked, self._update_timeout_s)
        return {tag: int(sizes[tag] * 2**30) for tag in tags}

    async def restore(self, tags: Sequence[str]) -> None:
        """As `Engine.restore`."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        asked = self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags)), None)
        await self._ask("resume_memory_occupation", asked, self._update_timeout_s)

    async def _ask(self, what: str, asked: Coroutine[Any, Any, Any], timeout: float = FLUSH_GRACE_S) -> Any:
        """SGLang's answer; raises `EngineError` if it dies, or says nothing in time."""
        async with self._turn:
            task = self._life.keep(asyncio.ensure_future(asked))
            await asyncio.wait((task, self._life.died), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            self._check_alive()
            if not task.done():
                raise EngineError(f"SGLang has not answered {what} within {timeout:.0f} s")
            return task.result()

    def _check_alive(self) -> None:
        if self._life.died.done():
            raise EngineError(f"the engine died: {self._life.died.result().reason}")
