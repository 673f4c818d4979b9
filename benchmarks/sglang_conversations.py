"""Conversations of several turns on two engines of SGLang's, routed in three ways."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

import zagent
from benchmarks.sglang_overhead import IDS
from zagent.client.calls import Calls
from zagent.client.llm_client import ENGINE_POOL, AsyncLLMServerManager, unpack_output
from zagent.trainer.links import open_calls
from zagent.types import TokenOutput

ENGINES = 2
#: Seconds until the broker answers, and without a sign of it.
PATIENCE_S = 30.0

#: Session, prompt, answer's length -> answer.
Ask = Callable[[str, np.ndarray, int], Awaitable[TokenOutput]]


@dataclass(frozen=True)
class Talk:
    """``conversations`` conversations, ``at_once`` at a time, of ``turns`` answers each; in tokens: what opens one,
    each ``answer``, and the ``reply`` to it (a tool's, say)."""

    conversations: int
    at_once: int
    turns: int
    opening: int
    answer: int
    reply: int


@dataclass(frozen=True)
class Talked:
    """Seconds for all of them; the share of all prompts' tokens that the engine had in its cache."""

    seconds: float
    cached_share: float


class Conversations:
    """A cluster of two engines; a context manager."""

    def __init__(self, logs: Path) -> None:
        settings = ("model.path=tiny", f"engine.count={ENGINES}", "worker.count=1", f"logs.dir={logs}")
        lengths = ("rollout.prompt_length=1024", "rollout.response_length=1024")
        self._manager = zagent.AgentLoopManager.launch(zagent.Config.load(overrides=[*settings, *lengths]))
        self._names = list(self._manager.status()["pools"][ENGINE_POOL])

    def __enter__(self) -> Conversations:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._manager.close()

    def hold(self, peer: str, talk: Talk, seed: int) -> Talked:
        """All conversations of ``talk``, from cold caches."""
        self._manager.clear_kv_cache()
        return asyncio.run(self._hold(peer, talk, seed))

    async def _hold(self, peer: str, talk: Talk, seed: int) -> Talked:
        calls = await open_calls(self._manager.endpoint, PATIENCE_S, PATIENCE_S)
        try:
            ways = {"zagent": _sticky(calls), "least": _least(calls), "random": _random(calls, self._names, seed)}
            return await held(talk, seed, ways[peer])
        finally:
            calls.link.close()


async def held(talk: Talk, seed: int, ask: Ask) -> Talked:
    """All conversations, as ``ask`` routes them."""
    numbers, prompted, cached = iter(range(talk.conversations)), 0, 0

    async def converse(number: int) -> None:
        nonlocal prompted, cached
        words = np.random.default_rng([seed, number])
        said = words.integers(IDS.start, IDS.stop, talk.opening, np.int32)
        for _ in range(talk.turns):
            answer = await ask(f"conversation-{seed}-{number}", said, talk.answer)
            prompted += len(said)
            cached += answer.cached_tokens
            reply = words.integers(IDS.start, IDS.stop, talk.reply, np.int32)
            said = np.concatenate([said, np.asarray(answer.token_ids, np.int32), reply])

    async def lane() -> None:
        for number in numbers:
            await converse(number)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(talk.at_once):
            group.create_task(lane())
    return Talked(time.monotonic() - began, cached / prompted)


def _parameters(tokens: int) -> dict[str, object]:
    return {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}


def _sticky(calls: Calls) -> Ask:
    manager = AsyncLLMServerManager(calls)
    return lambda session, prompt, tokens: manager.generate(session, prompt, _parameters(tokens))


def _least(calls: Calls) -> Ask:
    """A call without a session goes to whoever has the fewest in flight."""
    manager = AsyncLLMServerManager(calls)
    return lambda session, prompt, tokens: manager.generate("", prompt, _parameters(tokens))


def _random(calls: Calls, names: list[str], seed: int) -> Ask:
    drawn = random.Random(seed)

    async def ask(session: str, prompt: np.ndarray, tokens: int) -> TokenOutput:
        argument = [prompt, _parameters(tokens), None, None]
        return unpack_output(await calls.call(ENGINE_POOL, "generate", argument, member=drawn.choice(names)))

    return ask
