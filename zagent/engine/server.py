"""The engine process: one engine (simulated ones: several) behind the broker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from zagent import alive
from zagent.client.continuing import may_continue, pack_piece
from zagent.client.link import Identity, Link
from zagent.client.llm_client import ENGINE_POOL, pack_output
from zagent.client.member import Member
from zagent.client.process import stop_requested
from zagent.config import EngineConfig, ModelConfig
from zagent.engine import sglang_parsers
from zagent.engine.base import Death, Engine, GenerateRequest, Progress
from zagent.engine.chat import ChatTokenizer
from zagent.engine.memory import Memory
from zagent.engine.sim import build as build_sim
from zagent.engine.weights import EngineWeights
from zagent.errors import ConfigError, EngineError, InvalidRequest, StateError
from zagent.loops.tokenizer import load_tokenizer
from zagent.models import facts
from zagent.types import TokenOutput, int_array
from zagent.wire.binding import allow_files
from zagent.wire.messages import Call, Outdated
from zagent.wire.sockets import DealerChannel, terminate

#: Seconds a dead engine's children get before the process ends without them (they have been sent SIGKILL): with half a
#: second for the broker to take what is said to it, the process ends within one.
CLOSE_AFTER_DEATH_S = 0.2
#: Exit code of a process whose broker has let go of it, or that cannot catch up with its pool.
CUT_OFF = 1


class EngineServer:
    """One engine as a member of its pool: methods `generate`, `chat`, `parse_tool_calls`, `clear_cache`, `stats`, and
    those of `EngineWeights`."""

    def __init__(
        self,
        engine: Engine,
        link: Link,
        chat_tokenizer: ChatTokenizer | None = None,
        *,
        checkpoints: bool = True,
        memory: Memory | None = None,
    ) -> None:
        self.engine = engine
        self._checkpoints = checkpoints  #: the engine tells of parts of its answers
        self.link = link
        self._chat_tokenizer = chat_tokenizer
        self.counts: Counter[str] = Counter()
        #: Resolved with the reason where the process is of no use any more, though its engine lives.
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._memory = memory or Memory("standalone")
        weights = EngineWeights(engine, self._memory, self._serves, self._fail)
        own = (self.generate, self.chat, self.parse_tool_calls, self.clear_cache, self.stats)
        self.member = Member(link, {method.__name__: method for method in (*own, *weights.methods)})
        link.on(Outdated, lambda message, body: weights.catch_up(message.version, message.weights))

    def _serves(self, version: int, directory: str) -> None:
        """Other weights than before."""
        self.link.identity.facts.update(version=version, weights=directory)
        self.link.announce()

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    async def generate(self, argument: Any, call: Call) -> list[Any]:
        """[prompt ids, sampling params, images, videos] → `pack_output` of the answer; on the way `pack_piece` of its
        parts, where `engine.checkpoint_tokens` asks for them and another engine could go on from there."""
        request = read_request(argument, call)
        telling = self._telling(call) if self._checkpoints and may_continue(request.sampling_params) else None
        output = await self._generate(request, telling)
        if output.stop_reason == "abort" and (seen := self._first_placeholder(output)) is not None:
            output = output.cut(seen)
        return pack_output(output)

    def _telling(self, call: Call) -> Progress:
        """Sends pieces to the caller, up to the first with a placeholder in it: as part of a prompt that would ask for
        an image."""
        start: int | None = 0

        def tell(piece: TokenOutput) -> None:
            nonlocal start
            if start is None or self._first_placeholder(piece) is not None:
                start = None
                return
            self.member.progress(call, pack_piece(start, piece))
            start += len(piece.token_ids)

        return tell

    def _first_placeholder(self, output: TokenOutput) -> int | None:
        info = self.engine.info
        placeholders = [i for i in (info.image_token_id, info.video_token_id) if i is not None]
        found = np.flatnonzero(np.isin(output.token_ids, placeholders))
        return int(found[0]) if found.size else None

    async def chat(self, argument: Any, call: Call) -> str:
        """[messages, sampling params] → the answer's text without special tokens."""
        if not isinstance(argument, list) or [type(part) for part in argument] != [list, dict]:
            raise InvalidRequest("chat takes [messages, sampling_params]")
        if self._chat_tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer")
        messages, params = argument
        ids = await self._chat_tokenizer.encode(messages)
        output = await self._generate(read_request([ids, params, None, None], call))
        if output.stop_reason == "abort":
            raise EngineError("the answer was aborted")
        return await self._chat_tokenizer.decode(np.asarray(output.token_ids))

    async def _generate(self, request: GenerateRequest, progress: Progress | None = None) -> TokenOutput:
        if self._memory.missing:
            raise StateError(f"nothing can be generated: {self._memory.missing}")
        output = await self.engine.generate(request, progress)
        self.counts["calls"] += 1
        self.counts["prompt_tokens"] += len(output.extra_fields.get("prompt_token_ids", request.prompt_ids))
        self.counts["cached_tokens"] += output.cached_tokens
        self.counts["response_tokens"] += len(output.token_ids)
        return output

    async def parse_tool_calls(self, argument: Any, call: Call) -> list[Any]:
        """[format, text, tool schemas] → [text around the calls, calls] (`sglang_parsers.parse`), in a thread."""
        if not isinstance(argument, list) or [type(part) for part in argument] != [str, str, list]:
            raise InvalidRequest("parse_tool_calls takes [format, text, schemas]")
        format, text, schemas = argument
        tokenizer = getattr(self.engine, "tokenizer", None)
        return list(await asyncio.to_thread(sglang_parsers.parse, format, text, schemas, tokenizer))

    async def clear_cache(self, argument: Any, call: Call) -> None:
        """Forget all prefix KV."""
        await self.engine.clear_cache()

    async def stats(self, argument: Any, call: Call) -> dict[str, Any]:
        """Tokens and calls so far, and what the engine itself counts as in flight."""
        return {
            **{key: self.counts[key] for key in ("calls", "prompt_tokens", "cached_tokens", "response_tokens")},
            "in_flight": self.engine.in_flight(),
        }


def read_request(argument: Any, call: Call) -> GenerateRequest:
    """The engine call in a message; its request id is the call's id and attempt, so it is unique and of fixed length.

    Raises:
        InvalidRequest: the argument has another form.
    """
    if not isinstance(argument, list) or len(argument) != 4:
        raise InvalidRequest("generate takes [prompt_ids, sampling_params, images, videos]")
    prompt, params, images, videos = argument
    ids = int_array(prompt) if prompt is not None else None
    if ids is None:
        raise InvalidRequest("prompt_ids must be a one-dimensional array of 32-bit ints")
    if not isinstance(params, dict):
        raise InvalidRequest("sampling_params must be a map")
    rid = f"{call.call.hex()}{call.attempt:08x}"
    return GenerateRequest(rid, ids, params, _files("images", images), _files("videos", videos))


def _files(name: str, values: Any) -> list[bytes] | None:
    """Encoded files, which travel as uint8 arrays."""
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(v, np.ndarray) and v.dtype == np.uint8 for v in values):
        raise InvalidRequest(f"{name} must be a list of uint8 arrays, each an encoded file")
    return [value.tobytes() for value in values]


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
    code = asyncio.run(serve(settings, engines, ready))
    if code:
        sys.stderr.flush()
        os._exit(code)  # what is left of a dead engine must not delay or change the exit code
