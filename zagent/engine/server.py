"""The engine process: one engine (simulated ones: several) behind the broker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zagent import alive
from zagent.client.link import Identity, Link
from zagent.client.llm_client import ENGINE_POOL
from zagent.client.process import run_main, stop_requested
from zagent.config import EngineConfig, ModelConfig
from zagent.engine.base import Death, Engine
from zagent.engine.chat import ChatTokenizer
from zagent.engine.memory import Memory
from zagent.engine.methods import EngineServer
from zagent.engine.sim import build as build_sim
from zagent.errors import ConfigError
from zagent.loops.tokenizer import load_tokenizer
from zagent.models import facts
from zagent.wire.binding import allow_files
from zagent.wire.sockets import DealerChannel, terminate

#: Seconds a dead engine's children get before the process ends without them (they have been sent SIGKILL): with half a
#: second for the broker to take what is said to it, the process ends within one.
CLOSE_AFTER_DEATH_S = 0.2
#: Exit code of a process whose broker has let go of it, or that cannot catch up with its pool.
CUT_OFF = 1


def build(settings: dict[str, Any]) -> list[Engine]:
    """The engines of this process; blocks while a model loads."""
    config = EngineConfig.model_validate(settings["engine"])
    members = settings["members"]
    if config.kind == "sim":
        model_facts = facts(settings["model"]["path"])
        shared: dict[str, Any] = {
            "sim": config.sim,
            "checkpoint_tokens": config.checkpoint_tokens,
            "model_vocab_size": model_facts.vocab_size if model_facts else None,
            "model_image_token_id": model_facts.image_token_id if model_facts else None,
        }
        return [build_sim(name=m["name"], index=m["index"], **shared) for m in members]
    from zagent.engine.sglang_engine import build as build_sglang

    model = ModelConfig.model_validate(settings["model"])
    ports = {key: settings[key] for key in ("nccl_port", "port")}
    return [build_sglang(model=model, engine=config, index=m["index"], seed=settings["seed"], **ports) for m in members]


def _build(settings: dict[str, Any]) -> list[Engine]:
    """`build`; what is wrong with a service's engines is said about that service."""
    try:
        return build(settings)
    except ConfigError as error:
        if settings["pool"] == ENGINE_POOL:
            raise
        raise ConfigError(f"services.{settings['pool']}: {error}") from error


async def serve(settings: dict[str, Any], engines: Sequence[Engine], ready: Callable[[dict[str, Any]], None]) -> int:
    """Serve until SIGTERM (returns 0), until an engine is broken (returns its `Death.exit_code`), or until the broker
    lets go of the process (returns `CUT_OFF`)."""
    alive.watch_loop()
    servers = []
    for engine, member in zip(engines, settings["members"], strict=True):
        await engine.start()
        servers.append(await _join(settings, engine, member))
    stop = stop_requested()  # not before: there is nothing yet that would have to end in order
    info = engines[0].info
    ready({"tokenizer_probe": info.tokenizer_probe, "pids": [pid for e in engines for pid in e.info.pids]})
    return await _run(stop, servers)


async def _run(stop: asyncio.Event, servers: Sequence[EngineServer]) -> int:
    """Until the end, and through it; returns the exit code."""
    death = await _first_end(stop, servers)
    if death is not None:
        return await _end_dead(servers, death)
    closed = [f"cut off from the broker: {server.link.closed}" for server in servers if server.link.closed]
    failed = [server.failed.result() for server in servers if server.failed.done()]
    if closed or failed:
        print(f"the engine ends, {(closed + failed)[0]}", file=sys.stderr, flush=True)
        for server in servers:
            server.member.leave_at_once((closed + failed)[0], crashed=False)
        await _close_soon(servers)
        return CUT_OFF
    for server in servers:
        await server.member.leave("the cluster stops")
        server.link.close()
    for server in servers:
        await server.engine.close()
    return 0


async def _join(settings: dict[str, Any], engine: Engine, member: dict[str, Any]) -> EngineServer:
    facts = {"pid": os.getpid(), "version": 0, "context_length": engine.info.context_length}
    identity = Identity(
        settings["pool"], member["name"], member["epoch"], settings["credits"], settings["secret"], facts
    )  # fmt: skip
    link = Link(partial(DealerChannel, settings["endpoint"]), identity)
    config = EngineConfig.model_validate(settings["engine"])
    server = EngineServer(
        *(engine, link, ChatTokenizer(partial(_load_tokenizer, settings))),
        checkpoints=config.checkpoint_tokens > 0,
        memory=Memory(config.mode, keeps_weights=bool(config.args.get("enable_weights_cpu_backup"))),
    )
    await server.link.open()
    server.link.keep()
    return server


def _load_tokenizer(settings: dict[str, Any]) -> Any:
    model = ModelConfig.model_validate(settings["model"])
    auto, trust = model.use_auto_tokenizer, model.trust_remote_code
    return load_tokenizer(model.tokenizer_path or model.path, auto=auto, trust_remote_code=trust)


async def _first_end(stop: asyncio.Event, servers: Sequence[EngineServer]) -> Death | None:
    """Why an engine died, or None: asked to stop, a link was closed by the other side, or one failed."""
    others = [asyncio.create_task(stop.wait()), *(asyncio.create_task(one.link.wait_closed()) for one in servers)]
    ends: list[asyncio.Future[Any]] = [*others, *(server.engine.died for server in servers)]
    ends += [server.failed for server in servers]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    return next((server.engine.died.result() for server in servers if server.engine.died.done()), None)


async def _end_dead(servers: Sequence[EngineServer], death: Death) -> int:
    print(f"engine died: {death.reason}", file=sys.stderr, flush=True)
    for server in servers:  # those of an engine beside it are no suspects
        server.member.leave_at_once(death.reason, death.crashed and server.engine.died.done())
    terminate()
    await _close_soon(servers)
    return death.exit_code


async def _close_soon(servers: Sequence[EngineServer]) -> None:
    closing = asyncio.gather(*(server.engine.close() for server in servers), return_exceptions=True)
    await asyncio.wait([closing], timeout=CLOSE_AFTER_DEATH_S)


def main(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Entry point of an engine process.

    Settings: `endpoint`, `secret`, `pool`, `members` ([{name, index, epoch}]), `credits`, `model`, `engine` (sections
    as plain data), `seed`, `nccl_port`, `port`. The exit code is 0 after SIGTERM, else see `serve`.
    """
    allow_files()  # eight for each simulated engine
    engines = _build(settings)
    code = run_main(serve(settings, engines, ready))
    if code:
        sys.stderr.flush()
        os._exit(code)  # what is left of a dead engine must not delay or change the exit code
