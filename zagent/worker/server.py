"""The worker process: agent-loop coroutines behind the broker. Imports neither torch nor sglang."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zagent import alive
from zagent.client.calls import Calls
from zagent.client.link import Identity, Link
from zagent.client.member import Member
from zagent.client.process import contained, end_cut_off, run_main, stop_requested, stopped
from zagent.client.services import Services
from zagent.config import ModelConfig, RewardConfig, RolloutConfig, TraceConfig
from zagent.errors import ConfigError, LoopError
from zagent.loops.base import TrainerConfig
from zagent.loops.imports import import_listed
from zagent.loops.interactions import BaseInteraction, load_interactions
from zagent.loops.parsers import parser_names
from zagent.loops.registry import find_loop, register_file
from zagent.loops.tokenizer import load_tokenizer, probe
from zagent.loops.tools import Toolbox
from zagent.loops.vision_processor import VisionProcessor
from zagent.models import hub_facts
from zagent.wire.messages import Call
from zagent.wire.sockets import DealerChannel
from zagent.worker.reward import Reward
from zagent.worker.runner import AgentLoopWorker
from zagent.worker.trace import Tracing

WORKER_POOL = "worker"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a worker makes once, before it serves."""

    tokenizer: Any
    trainer_config: TrainerConfig
    toolbox: Toolbox
    interactions: Mapping[str, BaseInteraction]
    reward: Reward | None
    tracing: Tracing | None
    processor: VisionProcessor | None


def prepare(settings: dict[str, Any]) -> Prepared:
    """Everything that can be wrong with the user's modules, files and names is found here; modules are imported first,
    so that their `@register`, `@tool` and the like work.

    Raises:
        ConfigError: a module that cannot be imported, a broken file of loops, tools or interactions, an unknown parser,
            a reward function or tracer that cannot be used, no usable tokenizer. Names key, value and reason.
        UnknownAgent: `rollout.agent`.
    """
    model = ModelConfig.model_validate(settings["model"])
    rollout = RolloutConfig.model_validate(settings["rollout"])
    trace = TraceConfig.model_validate(settings.get("trace", {}))
    for module in rollout.imports:
        import_listed(module)
    if rollout.agent_loop_config_path:
        register_file(rollout.agent_loop_config_path)
    find_loop(rollout.agent)  # the default loop must exist; rows may name others
    check_parser(rollout.multi_turn.format)
    toolbox = Toolbox.load(rollout.multi_turn)
    interactions = load_interactions(rollout.multi_turn.interaction_config_path)
    if rollout.agent == "tool_agent" and not toolbox.names and not interactions:
        raise ConfigError(
            "rollout.agent=tool_agent, but there is no tool: list modules with @zagent.tool under rollout.imports, or "
            "name a file in rollout.multi_turn.tool_config_path"
        )
    reward = Reward.load(RewardConfig.model_validate(settings.get("reward", {})))
    tokenizer = _tokenizer(model)
    tracing = Tracing.load(trace, settings.get("name", ""), tokenizer)
    config = TrainerConfig(rollout, settings.get("context_length"), model.path)
    return Prepared(tokenizer, config, toolbox, interactions, reward, tracing, _processor(model))


def check_parser(name: str) -> None:
    """Raise `ConfigError` where no parser has the ``name``; lists those there are."""
    if name not in parser_names():
        known = ", ".join(parser_names())
        raise ConfigError(f"rollout.multi_turn.format={name!r}: no such parser; known: {known}")


def _tokenizer(model: ModelConfig) -> Any:
    key, path = ("tokenizer_path", model.tokenizer_path) if model.tokenizer_path else ("path", model.path)
    try:
        return load_tokenizer(path, auto=model.use_auto_tokenizer, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers and its hub have classes of their own for each way to fail
        raise ConfigError(
            f"model.{key}={path!r}: no tokenizer can be loaded: {type(error).__name__}: {error}"
        ) from error


def _processor(model: ModelConfig) -> VisionProcessor | None:
    """Of a model that sees. Nothing heavy is loaded before the first image."""
    facts = hub_facts(model.path)
    if facts is None or facts.image_token_id is None:
        return None
    trust = model.trust_remote_code
    return VisionProcessor(model.path, facts.model_type, facts.image_token_id, trust_remote_code=trust)


async def serve(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Serve until SIGTERM."""
    asyncio.get_running_loop().set_task_factory(contained(LoopError, "a task of an agent loop"))
    made = prepare(settings)
    identity = Identity(
        WORKER_POOL,
        settings["name"],
        settings["epoch"],
        settings["credits"],
        settings["secret"],
        {"pid": os.getpid()},
    )
    link = Link(partial(DealerChannel, settings["endpoint"]), identity)
    calls = Calls(link)
    worker = AgentLoopWorker(
        calls,
        made.tokenizer,
        made.trainer_config,
        toolbox=made.toolbox,
        interactions=made.interactions,
        reward=made.reward,
        tracing=made.tracing,
        services=Services.configured(calls, settings.get("services", {})),
        processor=made.processor,
    )

    async def run(row: Any, call: Call) -> dict[str, Any]:
        return await worker.run(row, call.attempt)

    async def about(argument: Any, call: Call) -> dict[str, Any]:
        pad = made.tokenizer.pad_token_id
        return {"pad_token_id": made.tokenizer.eos_token_id if pad is None else pad}

    member = Member(link, {"run": run, "about": about})
    await link.open()
    stop = stop_requested()  # not before: there is nothing yet that would have to end in order
    link.keep()
    alive.watch_loop()
    ready({"tokenizer_probe": probe(made.tokenizer)})
    cut_off = await stopped(stop, link)
    await member.leave(cut_off or "the cluster stops")
    if made.tracing is not None:
        await made.tracing.close()
    link.close()
    if cut_off:
        end_cut_off(settings["name"], cut_off)


def main(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Entry point of a worker process.

    Settings: `endpoint`, `secret`, `name`, `epoch`, `credits`, `model`, `rollout`, `reward`, `trace` (sections as plain
    data), `services` (`{name: {model: bool}}`), `context_length`. Reports the `tokenizer_probe` when ready.
    """
    run_main(serve(settings, ready))
