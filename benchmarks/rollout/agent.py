"""The agent loop that replays a row of a trace, and the ways in which its engine calls are given to engines.

Imported in workers by `rollout.imports`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

import zagent
from zagent.client.llm_client import ENGINE_POOL, unpack_output
from zagent.errors import LoopError
from zagent.types import TokenOutput

NAME = "replay"
#: Ids of prompts and tools: of every vocabulary, and no special ones.
IDS = range(64, 250)
#: How a row's calls find their engines: `session` and `calls` leave it to the broker (one session a row, or one for
#: each call, so that only requests in flight decide), `local` and `random` name it themselves.
WAYS = ("session", "calls", "local", "random")
#: Rows of this process so far: the local balancer's counts, which go in turns through the engines.
_turns = itertools.count(random.randrange(1 << 16))


class Done(NamedTuple):
    """One finished engine call: its session or the named engine (the other is ""), tokens, and the monotonic time."""

    session: str
    engine: str
    prompt: int
    cached: int
    new: int
    end: float


@zagent.register(NAME)
class Replay(zagent.AgentLoopBase):
    """Asks for exactly the tokens of the row's turns, and waits as long as its tools took."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> zagent.AgentLoopOutput:
        rng = np.random.default_rng(row["content"])
        context = tokens(rng, row["trace"]["prompt_tokens"])
        start = len(context)
        mask: list[np.ndarray] = []
        log_probs: list[np.ndarray] = []
        done: list[Done] = []
        engine = self._engine(row)
        for turn in row["trace"]["turns"]:
            params = {**sampling_params, "max_new_tokens": turn["response_tokens"], "ignore_eos": True}
            answer, call = await self._call(row, engine, context, params)
            done.append(call)
            if turn["tool_s"]:
                await asyncio.sleep(turn["tool_s"] / row["speedup"])
            said = tokens(rng, turn["tool_tokens"])
            context = np.concatenate([context, answer.token_ids, said])
            mask += [np.ones(len(answer.token_ids), np.int32), np.zeros(len(said), np.int32)]
            log_probs += [np.asarray(answer.log_probs), np.zeros(len(said), np.float32)]
        return zagent.AgentLoopOutput(
            prompt_ids=context[:start],
            response_ids=context[start:],
            response_mask=np.concatenate(mask),
            response_logprobs=np.concatenate(log_probs),
            num_turns=2 * len(done),
            extra_fields={"calls": [list(call) for call in done]},
        )

    def _engine(self, row: dict[str, Any]) -> str:
        """Of all calls of a row: the next one in turn, as in verl, whose workers hold a heap each, count a session when
        it begins, and never down. Workers begin at different engines."""
        return row["engines"][next(_turns) % len(row["engines"])] if row["way"] == "local" else ""

    async def _call(
        self, row: dict[str, Any], engine: str, context: np.ndarray, params: dict[str, Any]
    ) -> tuple[TokenOutput, Done]:
        session = self.session if row["way"] == "session" else uuid4().hex if row["way"] == "calls" else ""
        if session:
            answer = await self.server_manager.generate(session, context, params)
        else:
            engine = engine or random.choice(row["engines"])
            answer = await self._named(engine, context, params)
        if len(answer.token_ids) != params["max_new_tokens"]:
            raise LoopError(f"{len(answer.token_ids)} tokens instead of {params['max_new_tokens']}")
        call = Done(session, engine, len(context), answer.cached_tokens, len(answer.token_ids), time.monotonic())
        return answer, call

    async def _named(self, engine: str, context: np.ndarray, params: dict[str, Any]) -> TokenOutput:
        """A call to that engine and no other, past the broker's own choice."""
        calls = await self.server_manager._table()  # the worker's link: a second one would cost what zagent's does not
        value = await calls.call(ENGINE_POOL, "generate", [context, params, None, None], member=engine)
        return unpack_output(value)


def tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    """Int32 [count]."""
    return rng.integers(IDS.start, IDS.stop, count, np.int32)
