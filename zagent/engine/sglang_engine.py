"""SGLang 0.5.23 embedded in the engine process: the only file that knows SGLang's internals.

`build` blocks for the 15 to 40 s that SGLang needs; `SGLangEngine` then lives on the event loop of the main thread.
Four of SGLang's habits are not let in, because the process is zagent's and not SGLang's:

* It would take over SIGTERM and SIGQUIT at the first call, and answer SIGQUIT (a child's cry for help) by sleeping 5 s
  and sending SIGKILL to the process itself. `start` runs SGLang's receive loop without them.
* It would notice a dead child by polling once a second. We watch the children by pidfd.
* It would replace the handlers of the root logger. They are put back.
* It would leave sockets, shared memory and semaphores behind. They go with `close`, or with the process.

Left as they are: the event-loop policy becomes uvloop's, multiprocessing's start method becomes spawn, the limits for
open files and stack rise, some NCCL and CUDA variables are set; `Engine.shutdown` kills all descendants of the process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import os
import shutil
import signal
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, get_type_hints

from zagent.config import EngineConfig, ModelConfig
from zagent.engine import cpu_platform
from zagent.engine import sglang_arguments as setup
from zagent.engine import sglang_calls as calls
from zagent.engine.base import EngineInfo, GenerateRequest, check_media, check_prompt
from zagent.engine.children import ChildWatch
from zagent.errors import ConfigError, EngineError, StartupError, ZagentError
from zagent.loops.tokenizer import probe
from zagent.models import resolve
from zagent.types import TokenOutput

logger = logging.getLogger(__name__)

#: Seconds SGLang may wait for idleness before it flushes its cache, and what its answer may take on top.
FLUSH_TIMEOUT_S = 10.0
FLUSH_GRACE_S = 5.0
#: Seconds a cancelled call may take to send its abort (it does not wait for the scheduler), and the end of SGLang.
ABORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 15.0


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
            sglang = _launch(arguments, engine)
        experts_shape = setup.experts_shape(engine, sglang.tokenizer_manager.model_config.hf_text_config)
        return SGLangEngine(sglang, scratch, keep_seed=setup.honours_seeds(engine), experts_shape=experts_shape)
    except BaseException as error:
        _kill_descendants()  # a half-started SGLang would keep this process from ending
        shutil.rmtree(scratch)
        if isinstance(error, ZagentError) or not isinstance(error, Exception):
            raise
        raise StartupError(f"SGLang could not start: {error}") from error


def _launch(arguments: dict[str, Any], engine: EngineConfig) -> Any:
    from sglang.srt.entrypoints import engine as engine_module
    from sglang.srt.server_args import ServerArgs

    for key in engine.args:
        if key not in ServerArgs.__struct_fields__:
            raise ConfigError(f"engine.args has unknown key {key!r}{calls.nearest(key, ServerArgs.__struct_fields__)}")
    engine_module.kill_process_tree = _kill_descendants
    _name_shared_memory()
    return engine_module.Engine(**arguments)


class SGLangEngine:
    """`zagent.engine.base.Engine` on an embedded SGLang."""

    died: asyncio.Future[str]

    def __init__(self, engine: Any, scratch: Path, *, keep_seed: bool, experts_shape: tuple[int, int] | None) -> None:
        self._engine = engine
        self._scratch = scratch
        self._manager = engine.tokenizer_manager
        self.tokenizer = self._manager.tokenizer
        self._manager._subprocess_watchdog.stop()  # it polls, and would have this process killed
        self._keep_seed = keep_seed
        self._experts_shape = experts_shape
        self._converters = _converters()
        self._children = ChildWatch(engine.get_all_child_pids())
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.info = _info(engine)

    async def start(self) -> None:
        """Take SGLang's children, its SIGQUIT and its receive loop onto the running event loop."""
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        loop = asyncio.get_running_loop()
        self.died = loop.create_future()
        self._children.start(self._die)
        loop.add_signal_handler(signal.SIGQUIT, self._die, "a process of SGLang reported a failure")
        # Instead of `auto_create_handle_loop`, which returns at once when there is a loop: it would install signal
        # handlers, and have the process killed where the receive loop fails.
        self._manager.event_loop = loop
        receiver = self._keep(loop.create_task(self._manager.handle_loop()))
        receiver.add_done_callback(self._receiver_ended)
        self._manager.server_status = ServerStatus.Up

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        self._check_alive()
        check_prompt(request.prompt_ids, self.info)
        check_media(request, self.info)
        params, logprobs = calls.to_sampling(
            request.sampling_params, request.prompt_ids.size, self.info, self._converters, keep_seed=self._keep_seed
        )
        if params["max_new_tokens"] == 0:
            return calls.empty_output(logprobs)
        answer = await self._answer(self._input(request, params, logprobs))
        return calls.to_output(answer, logprobs, self._experts_shape)

    async def clear_cache(self) -> None:
        self._check_alive()
        # Never cancelled: SGLang would hand the late answer to whoever asks next.
        flush = self._keep(asyncio.create_task(self._manager.flush_cache(timeout_s=FLUSH_TIMEOUT_S)))
        await asyncio.wait(
            (flush, self.died), timeout=FLUSH_TIMEOUT_S + FLUSH_GRACE_S, return_when=asyncio.FIRST_COMPLETED
        )
        self._check_alive()
        if not flush.done():
            raise EngineError(f"SGLang has not answered flush_cache within {FLUSH_TIMEOUT_S + FLUSH_GRACE_S:.0f} s")
        if not flush.result().success:
            raise EngineError(f"SGLang did not clear its cache: {flush.result().message}")

    def in_flight(self) -> int:
        return len(self._manager.rid_to_state)

    async def close(self) -> None:
        """End SGLang and every other descendant of this process. Raises `EngineError` if one outlives its SIGKILL."""
        if self._closed:
            return
        self._closed = True
        self._children.stop()
        self._abandon_calls()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._engine.shutdown), CLOSE_TIMEOUT_S)
        except (TimeoutError, RuntimeError) as error:
            raise EngineError(f"processes of SGLang outlived their SIGKILL: {error}") from error
        for child in multiprocessing.active_children():
            child.join(1.0)  # they are dead: reaps them
        _remove_shared_memory(self._engine)
        shutil.rmtree(self._scratch)

    def _input(self, request: GenerateRequest, params: dict[str, Any], logprobs: bool) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=request.rid,
            input_ids=request.prompt_ids.tolist(),
            sampling_params=params,
            return_logprob=logprobs,
            return_routed_experts=self._experts_shape is not None,
            **calls.media(request),
        )

    async def _answer(self, call_input: Any) -> dict[str, Any]:
        """SGLang's answer, or the end of SGLang: on its death an answer never comes."""
        call = asyncio.create_task(self._collect(call_input))
        self._keep(call)
        try:
            await asyncio.wait((call, self.died), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait((call,), timeout=ABORT_TIMEOUT_S)
        if not call.done() or call.cancelled():
            raise self._ended()
        try:
            return call.result()
        except Exception as error:
            raise calls.to_error(error) from error

    async def _collect(self, call_input: Any) -> dict[str, Any]:
        """Closed explicitly: a suspended stream holds SGLang's update lock; closing early aborts the request."""
        stream = self._manager.generate_request(call_input, None)
        try:
            async for reply in stream:
                answer: dict[str, Any] = reply
                return answer
        finally:
            await stream.aclose()
        raise EngineError("SGLang ended the call without an answer")

    def _keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: no complaint that nobody looked

    def _check_alive(self) -> None:
        if self.died.done() or self._closed:
            raise self._ended()

    def _ended(self) -> EngineError:
        return EngineError(f"the engine died: {self.died.result()}" if self.died.done() else "the engine is closed")

    def _receiver_ended(self, receiver: asyncio.Task[Any]) -> None:
        if not receiver.cancelled():
            self._die(f"SGLang's receive loop ended: {receiver.exception()!r}")

    def _die(self, reason: str) -> None:
        if self.died.done() or self._closed:
            return
        logger.error("SGLang is broken: %s", reason)
        self.died.set_result(reason)
        self._abandon_calls()

    def _abandon_calls(self) -> None:
        """Let the end of a call drop it, instead of asking a scheduler that is gone to abort it."""
        for state in self._manager.rid_to_state.values():
            state.dispatched = False


def _converters() -> calls.Converters:
    """SGLang's public sampling parameters, with checks by the types its scheduler decodes them with."""
    import msgspec
    from sglang.srt.sampling.sampling_params import SamplingParams

    def convert(hint: Any, value: Any) -> Any:
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error

    fields = SamplingParams.__struct_fields__
    public = fields[: fields.index("stop_strs")]  # what follows are results of its normalisation
    hints = get_type_hints(SamplingParams)
    return {name: functools.partial(convert, hints[name]) for name in public if name not in calls.REFUSED_PARAMETERS}


def _info(engine: Any) -> EngineInfo:
    manager = engine.tokenizer_manager
    capacity = engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
    context = min(manager.context_len, capacity)
    placeholders = getattr(manager.mm_processor, "mm_tokens", None)
    return EngineInfo(
        vocab_size=manager.model_config.vocab_size,
        context_length=context,
        # The scheduler takes prompts shorter than max_req_input_len, which is context - 6 unless drafts need more.
        reserved_tokens=max(0, context - 1 - manager.max_req_input_len) + manager.num_reserved_tokens,
        tokenizer_probe=probe(manager.tokenizer) if manager.tokenizer is not None else "",
        image_token_id=getattr(placeholders, "image_token_id", None),
        video_token_id=getattr(placeholders, "video_token_id", None),
        pids=tuple(engine.get_all_child_pids()),
    )


def _kill_descendants(pid: int = 0, **options: Any) -> None:
    """SGLang's `kill_process_tree`, sparing Python's resource tracker, which removes the semaphores of the killed."""
    from sglang.srt.utils import kill_process_tree

    options = {"include_parent": False, "wait_timeout": CLOSE_TIMEOUT_S, **options}
    kill_process_tree(pid or os.getpid(), skip_pid=getattr(resource_tracker._resource_tracker, "_pid", None), **options)


def _name_shared_memory() -> None:
    """SGLang's file in /dev/shm gets a name with the run's id, so that the launcher finds it where SGLang could not
    remove it: a failed start, SIGKILL."""
    from sglang.srt.server_args import PortArgs

    init_new = PortArgs.init_new

    def named(*args: Any, **options: Any) -> Any:
        ports = init_new(*args, **options)
        ports.instance_id = f"{os.environ.get('ZAGENT_RUN_ID', 'no-run')}-{ports.instance_id}"
        return ports

    PortArgs.init_new = staticmethod(named)


def _remove_shared_memory(engine: Any) -> None:
    from sglang.srt.managers.load_snapshot import shm_path_for

    Path(shm_path_for(engine.port_args.instance_id)).unlink(missing_ok=True)
