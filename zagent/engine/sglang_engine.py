"""SGLang 0.5.23 embedded in the engine process. With `sglang_launch` and `sglang_control` (and `sglang_life`, which
watches it), this is all that knows SGLang's internals.

`build` blocks for the 15 to 40 s that SGLang needs; `SGLangEngine` then lives on the event loop of the main thread.
Four of SGLang's habits are not let in, because the process is zagent's and not SGLang's:

* It would take over SIGTERM and SIGQUIT at the first call, and answer SIGQUIT (a child's cry for help) by sleeping 5 s
  and sending SIGKILL to the process itself. `start` runs SGLang's receive loop without them.
* It would notice a dead child by polling once a second, and a silent one not at all. `sglang_life` watches them.
* It would replace the handlers of the root logger. They are put back.
* It would leave sockets, shared memory and semaphores behind. They go with `close`, or with the process.

Left as they are: the event-loop policy becomes uvloop's, multiprocessing's start method becomes spawn, the limits for
open files and stack rise, some NCCL and CUDA variables are set; `Engine.shutdown` kills all descendants of the process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zagent.config import EngineConfig, ModelConfig
from zagent.engine import cpu_platform
from zagent.engine import sglang_arguments as setup
from zagent.engine import sglang_calls as calls
from zagent.engine import sglang_launch as internals
from zagent.engine.base import (
    Death,
    GenerateRequest,
    PauseMode,
    Progress,
    TensorSpec,
    WeightsGroup,
    check_media,
    check_prompt,
    no_tokens,
)
from zagent.engine.sglang_control import SGLangControl
from zagent.engine.sglang_life import Life
from zagent.errors import EngineError, StartupError, ZagentError
from zagent.models import resolve
from zagent.types import TokenOutput

#: Seconds a cancelled call may take to send its abort (it does not wait for the scheduler).
ABORT_TIMEOUT_S = 5.0


def build(
    *, model: ModelConfig, engine: EngineConfig, index: int, seed: int, nccl_port: int, port: int
) -> SGLangEngine:
    """Start SGLang; blocks. To be called on the main thread, before its event loop runs.

    ``index`` is the engine's number, ``seed`` the pool's: engines sample differently. ``nccl_port`` and ``port`` must
    be free, and no other engine's.

    Raises:
        ConfigError: sglang missing or of another version, an argument it does not know, tensor parallelism on a CPU.
        StartupError: SGLang could not start; its own messages are in the log.
    """
    setup.check_version()
    cpu = cpu_platform.is_active()
    # `auto` is at most 2 on a CPU, the only place where the number matters here.
    setup.set_environment(cpu=cpu)
    arguments = setup.server_arguments(
        model, engine, model_path=resolve(model.path), cpu=cpu, seed=seed + index, nccl_port=nccl_port, port=port
    )
    scratch = setup.scratch_directory()
    try:
        with setup.own_logging(arguments["log_level"]), setup.temporary_files_in(scratch):
            sglang = internals.launch(arguments, engine)
        return SGLangEngine(sglang, scratch, engine)
    except BaseException as error:
        internals.kill_descendants()  # a half-started SGLang would keep this process from ending
        shutil.rmtree(scratch)
        if isinstance(error, ZagentError) or not isinstance(error, Exception):
            raise
        raise StartupError(f"SGLang could not start: {error}") from error


class SGLangEngine:
    """`zagent.engine.base.Engine` on an embedded SGLang."""

    def __init__(self, engine: Any, scratch: Path, config: EngineConfig) -> None:
        self._engine = engine
        self._scratch = scratch
        self._manager = engine.tokenizer_manager
        self.tokenizer = self._manager.tokenizer
        self._manager._subprocess_watchdog.stop()  # it polls, and would have this process killed
        self._checkpoint_tokens = config.checkpoint_tokens
        self._keep_seed = setup.honours_seeds(config)
        self._experts_shape = setup.experts_shape(config, self._manager.model_config.hf_text_config)
        self._converters = internals.converters()
        self._life = Life(engine.get_all_child_pids(), config.hung_after_s)
        self._releases = setup.releases_memory(config, cpu=cpu_platform.is_active())
        self._control = SGLangControl(self._manager, self._life, config.update_timeout_s)
        self.version = 0
        self._closed = False
        self.info = internals.info_of(engine)

    @property
    def died(self) -> asyncio.Future[Death]:
        return self._life.died

    async def start(self) -> None:
        """Take SGLang's children, its SIGQUIT and its receive loop onto the running event loop."""
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        loop = asyncio.get_running_loop()
        # Instead of `auto_create_handle_loop`, which returns at once when there is a loop: it would install signal
        # handlers, and have the process killed where the receive loop fails.
        self._manager.event_loop = loop
        self._life.start(self._manager.get_internal_state)
        self._life.died.add_done_callback(lambda _: self._abandon_calls())
        self._life.receives(loop.create_task(self._manager.handle_loop()))
        self._manager.server_status = ServerStatus.Up

    async def generate(self, request: GenerateRequest, progress: Progress | None = None) -> TokenOutput:
        self._check_alive()
        check_prompt(request.prompt_ids, self.info)
        check_media(request, self.info)
        params, logprobs = calls.to_sampling(
            request.sampling_params, request.prompt_ids.size, self.info, self._converters, keep_seed=self._keep_seed
        )
        if params["max_new_tokens"] == 0:
            return no_tokens("length", logprobs=logprobs)  # SGLang would give a log-probability without a token
        if not await self._control.entrance.enter():
            return no_tokens("abort", logprobs=logprobs)
        pieces = None
        if progress is not None and self._checkpoint_tokens:
            pieces = calls.Pieces(progress, self._checkpoint_tokens, logprobs, self.version)
        answer = await self._answer(self._input(request, params, logprobs, stream=pieces is not None), pieces)
        return calls.to_output(answer, logprobs, self._experts_shape)

    async def clear_cache(self) -> None:
        self._check_alive()
        await self._control.flush()

    async def pause(self, mode: PauseMode) -> None:
        self._check_alive()
        await self._control.pause(mode)

    async def resume(self) -> None:
        self._check_alive()
        await self._control.resume()

    async def update_weights(self, directory: str, version: int, *, flush: bool) -> None:
        self._check_alive()
        await self._control.update_from_disk(directory, version, flush=flush)
        self.version = version

    async def join_group(self, group: WeightsGroup) -> None:
        self._check_alive()
        await self._control.join_group(group)

    async def leave_group(self, name: str) -> None:
        self._check_alive()
        await self._control.leave_group(name)

    async def receive_weights(self, name: str, tensors: Sequence[TensorSpec], version: int, *, flush: bool) -> None:
        self._check_alive()
        await self._control.receive(name, tensors, version, flush=flush)
        self.version = version

    async def checksum(self) -> str:
        self._check_alive()
        return await self._control.checksum()

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        self._check_alive()
        if not self._releases:
            return dict.fromkeys(tags, 0)
        return await self._control.release(tags)

    async def restore(self, tags: Sequence[str]) -> None:
        self._check_alive()
        if self._releases:
            await self._control.restore(tags)

    def in_flight(self) -> int:
        return len(self._manager.rid_to_state)

    async def close(self) -> None:
        """End SGLang and every other descendant of this process. Raises `EngineError` if one outlives its SIGKILL."""
        if self._closed:
            return
        self._closed = True
        self._life.stop()
        self._abandon_calls()
        internals.kill_descendants(wait_timeout=None)
        internals.remove_shared_memory(self._engine)  # now: the wait for the killed may be cut short
        shutil.rmtree(self._scratch)
        try:
            await asyncio.wait_for(asyncio.to_thread(self._engine.shutdown), internals.CLOSE_TIMEOUT_S)
        except (TimeoutError, RuntimeError) as error:
            raise EngineError(f"processes of SGLang outlived their SIGKILL: {error}") from error
        for child in multiprocessing.active_children():
            child.join(1.0)  # they are dead: reaps them

    def _input(self, request: GenerateRequest, params: dict[str, Any], logprobs: bool, *, stream: bool) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=request.rid,
            input_ids=request.prompt_ids.tolist(),
            sampling_params=params,
            return_logprob=logprobs,
            return_routed_experts=self._experts_shape is not None,
            stream=stream,
            # KV of other weights is never found again.
            cache_salt=str(self.version) if self.version else None,
            **calls.media(request),
        )

    async def _answer(self, call_input: Any, pieces: calls.Pieces | None) -> dict[str, Any]:
        """SGLang's answer, or the end of SGLang: on its death an answer never comes."""
        call = self._life.keep(asyncio.create_task(self._collect(call_input, pieces)))
        try:
            await asyncio.wait((call, self.died), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait((call,), timeout=ABORT_TIMEOUT_S)
        if not call.done() or call.cancelled():
            raise self._ended()
        try:
            answer: dict[str, Any] = call.result()
        except Exception as error:
            raise calls.to_error(error) from error
        return answer

    async def _collect(self, call_input: Any, pieces: calls.Pieces | None) -> dict[str, Any]:
        """Closed explicitly: a suspended stream holds SGLang's update lock; closing early aborts the request."""
        stream = self._manager.generate_request(call_input, None)
        try:
            async for reply in stream:
                answer: dict[str, Any] = reply
                if pieces is None or calls.is_last(answer):
                    return answer
                pieces.look(answer)
        finally:
            await stream.aclose()
        raise EngineError("SGLang ended the call without an answer")

    def _check_alive(self) -> None:
        if self.died.done() or self._closed:
            raise self._ended()

    def _ended(self) -> EngineError:
        if self.died.done():
            return EngineError(f"the engine died: {self.died.result().reason}")
        return EngineError("the engine is closed")

    def _abandon_calls(self) -> None:
        """Let the end of a call drop it, instead of asking a scheduler that is gone to abort it."""
        for state in self._manager.rid_to_state.values():
            state.dispatched = False
