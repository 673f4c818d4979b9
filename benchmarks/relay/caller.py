"""The caller: makes prompts, keeps calls in flight through a peer's client, checks every token of every reply."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benchmarks.relay.traffic import Case, Round, Timing, prompts, wrong_replies
from zagent.client.process import loop_factory

#: Calls before the clock starts: connections made, tables grown.
WARM_UP = 64


class Client(Protocol):
    """How a peer's caller reaches servers."""

    async def open(self) -> None: ...

    async def generate(self, session: str, prompt: Any) -> tuple[Any, Any]:
        """Ids and log-probabilities, in the prompt's form."""

    async def close(self) -> None: ...


class Caller:
    """One round at a time, in three steps, so that all callers start together, and none checks while another works."""

    def __init__(self, connect: Callable[[Case], Client]) -> None:
        self._connect = connect

    async def prepare(self, round_: Round) -> None:
        """Make prompts, connect, warm up."""
        self._round = round_
        self._given = prompts(round_)
        warm = warm_up(round_)
        self._client = self._connect(round_.case)
        await self._client.open()
        await self._generate_all(warm, prompts(warm))
        freeze()

    async def run(self) -> Timing:
        """All calls."""
        timing, self._replies = await self._generate_all(self._round, self._given)
        return timing

    async def check(self) -> int:
        """Disconnect; how many replies were wrong."""
        await self._client.close()
        wrong = wrong_replies(self._round, self._given, self._replies)
        del self._given, self._replies, self._client
        gc.unfreeze()
        return wrong

    async def _generate_all(self, round_: Round, given: list[Any]) -> tuple[Timing, list[Any]]:
        """One session a prompt, ``round_.in_flight`` at once; timing, and the replies by prompt."""
        latencies = [0.0] * len(given)
        replies: list[Any] = [None] * len(given)
        numbers = iter(range(len(given)))
        generate, clock = self._client.generate, time.monotonic

        async def lane() -> None:
            for number in numbers:
                began = clock()
                replies[number] = await generate(round_.session(number), given[number])
                latencies[number] = clock() - began

        start, cpu = clock(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(round_.in_flight):
                group.create_task(lane())
        return Timing(start, clock(), time.process_time() - cpu, latencies, os.getpid()), replies


def warm_up(round_: Round) -> Round:
    """The round before the clock starts."""
    return Round(round_.case, WARM_UP, round_.in_flight, round_.seed + 1_000_003)


def freeze() -> None:
    """The prompts are not for the garbage collector to look at again and again."""
    gc.collect()
    gc.freeze()


def main(settings: dict[str, Any], line: Connection) -> None:
    """Entry point of a caller's process: ``settings["caller"]`` (``module:function``) makes the caller from
    ``settings``. Answers each (name of a step, arguments…) with what the step returns."""
    module, _, function = settings["caller"].partition(":")
    caller = getattr(importlib.import_module(module), function)(settings)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        while True:
            step, *arguments = line.recv()
            line.send(runner.run(_result(getattr(caller, step)(*arguments))))


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
