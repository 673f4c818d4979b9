"""Agent loops that take their worker along, each amid its trajectory, and a service that its callers can end. Imported
in workers by `rollout.imports`."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import zagent

#: Beyond any limit of a test.
FOREVER_S = 3600.0


@zagent.register("three_turns")
class ThreeTurns(zagent.AgentLoopBase):
    """Samples three times. After the first time it does `between`."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> zagent.AgentLoopOutput:
        prompt = await self.apply_chat_template(row["raw_prompt"])
        params = {**sampling_params, "max_new_tokens": 8, "ignore_eos": True}
        ids: list[int] = []
        for turn in range(3):
            out = await self.server_manager.generate(self.session, np.array(prompt + ids), params)
            ids += [int(token) for token in out.token_ids]
            if turn == 0:
                await self.between()
        return zagent.AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids), num_turns=2)

    async def between(self) -> None:
        """Nothing."""


def killer(between: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Register a loop of that name, with that `between`."""
    zagent.register(between.__name__)(type(between.__name__, (ThreeTurns,), {"between": between}))
    return between


@killer
async def exits_at_once(self: Any) -> None:
    os._exit(3)


@killer
async def segfaults(self: Any) -> None:
    ctypes.string_at(0)


@killer
async def blocks(self: Any) -> None:
    time.sleep(FOREVER_S)  # noqa: ASYNC251 (that is its purpose)


@killer
async def holds_the_interpreter(self: Any) -> None:
    """As a regular expression may: no other thread runs any more, the heartbeat's neither."""
    ctypes.PyDLL(None).sleep(int(FOREVER_S))


@killer
async def holds_the_tokenizer(self: Any) -> None:
    """As a chat template that loops may."""
    await self.in_tokenizer_thread(lambda: time.sleep(FOREVER_S))


@killer
async def floods(self: Any) -> None:
    flood()


def flood() -> None:
    held: list[bytearray] = []
    while True:
        held.append(bytearray(b"x" * 10_000_000))


@killer
async def raises(self: Any) -> None:
    raise ValueError("made of cheese")


@killer
async def hangs(self: Any) -> None:
    await asyncio.Event().wait()


class Fragile:
    """A service."""

    async def pid(self) -> int:
        return os.getpid()

    async def block(self) -> None:
        time.sleep(FOREVER_S)  # noqa: ASYNC251 (that is its purpose)

    def flood(self) -> None:
        """In a thread."""
        flood()


@zagent.register("harms_a_service")
class HarmsAService(zagent.AgentLoopBase):
    """Calls ``method`` of the service `fragile`; tells its pids before and after, and what it heard."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> zagent.AgentLoopOutput:
        fragile = self.services["fragile"]
        before, heard = await fragile.pid(), ""
        try:
            await getattr(fragile, row["method"])()
        except zagent.MemberLost as error:
            heard = str(error)
        told = {"pids": [before, await fragile.pid()], "heard": heard}
        return zagent.AgentLoopOutput(
            prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2, extra_fields=told
        )
