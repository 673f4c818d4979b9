"""The worker process: agent-loop coroutines behind the broker. Imports neither torch nor sglang."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from zagent.client.calls import Calls
from zagent.client.link import Identity, Link
from zagent.client.member import Member
from zagent.client.process import stop_requested
from zagent.config import ModelConfig, RolloutConfig
from zagent.errors import ConfigError, LoopError
from zagent.loops.base import TrainerConfig
from zagent.loops.imports import import_listed
from zagent.loops.registry import find_loop, register_file
from zagent.loops.tokenizer import load_tokenizer, probe
from zagent.wire.messages import Call
from zagent.wire.sockets import DealerChannel
from zagent.worker.blocked import AT_LEAST_S, ends_when_blocked
from zagent.worker.runner import AgentLoopWorker

WORKER_POOL = "worker"


def prepare(settings: dict[str, Any]) -> tuple[Any, TrainerConfig]:
    """Tokenizer and configuration; imports the user's modules, so that their `@register` works here.

    Raises:
        ConfigError: a module that cannot be imported, a broken agent loop config file, no usable tokenizer.
        UnknownAgent: `rollout.agent`.
    """
    model = ModelConfig.model_validate(settings["model"])
    rollout = RolloutConfig.model_validate(settings["rollout"])
    for module in rollout.imports:
        import_listed(module)
    if rollout.agent_loop_config_path:
        register_file(rollout.agent_loop_config_path)
    find_loop(rollout.agent)  # the default loop must exist; rows may name others
    return _tokenizer(model), TrainerConfig(rollout, settings.get("context_length"), model.path)


def _tokenizer(model: ModelConfig) -> Any:
    key, path = ("tokenizer_path", model.tokenizer_path) if model.tokenizer_path else ("path", model.path)
    try:
        return load_tokenizer(path, auto=model.use_auto_tokenizer, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers and its hub have classes of their own for each way to fail
        raise ConfigError(
            f"model.{key}={path!r}: no tokenizer can be loaded: {type(error).__name__}: {error}"
        ) from error


def contained(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Task factory: `sys.exit()` or KeyboardInterrupt in a task is an error like others. asyncio would end the event
    loop, and with it all rows of this worker, for what a task of one agent loop has done."""

    async def run() -> Any:
        try:
            return await coroutine
        except (SystemExit, KeyboardInterrupt) as error:
            raise LoopError(f"a task of an agent loop raised {error!r}") from error

    task = asyncio.Task(run(), loop=loop, **options)
    task.add_done_callback(lambda _: coroutine.close())  # it never began if the task was cancelled at once
    return task


async def serve(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Serve until SIGTERM."""
    stop = stop_requested()
    asyncio.get_running_loop().set_task_factory(contained)
    tokenizer, trainer_config = prepare(settings)
    identity = Identity(
        WORKER_POOL,
        settings["name"],
        settings["epoch"],
        settings["credits"],
        settings["secret"],
        {"pid": os.getpid()},
    )
    link = Link(partial(DealerChannel, settings["endpoint"]), identity)
    worker = AgentLoopWorker(Calls(link), tokenizer, trainer_config)

    async def run(row: Any, call: Call) -> dict[str, Any]:
        return await worker.run(row, call.attempt)

    async def about(argument: Any, call: Call) -> dict[str, Any]:
        pad = tokenizer.pad_token_id
        return {"pad_token_id": tokenizer.eos_token_id if pad is None else pad}

    member = Member(link, {"run": run, "about": about})
    await link.open()
    ready({"tokenizer_probe": probe(tokenizer)})
    async with ends_when_blocked(max(trainer_config.rollout.trajectory_timeout_s, AT_LEAST_S)):
        await stop.wait()
        await member.leave("the cluster stops")
    link.close()


def main(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Entry point of a worker process.

    Settings: `endpoint`, `secret`, `name`, `epoch`, `credits`, `model`, `rollout` (sections as plain data),
    `context_length`. Reports the `tokenizer_probe` when ready.
    """
    asyncio.run(serve(settings, ready))
