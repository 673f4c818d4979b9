"""The caller process: runs rounds over zagent or over bare sockets, and checks every token of every reply."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks import bare_sockets
from benchmarks.traffic import VOCABULARY, Case, Result, Round, prompts, sampling_params
from zagent.client.calls import Calls
from zagent.client.link import Link
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.config import SimConfig
from zagent.engine.sim.sampling import Sampler, parse_sampling
from zagent.engine.sim.tokens import token_source
from zagent.wire.sockets import DealerChannel

#: Calls before the clock starts: connections made, tables grown.
WARM_UP = 64

Rule = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def main(settings: dict[str, Any], line: Connection) -> None:
    """Entry point. For each `Round` received: prepares, says so, waits for the start, answers with a `Result`."""
    while True:
        round_ = line.recv()
        given = prompts(round_)
        warm = prompts(Round(round_.way, round_.case, WARM_UP, round_.in_flight, round_.seed + 1_000_003))
        gc.collect()
        gc.freeze()  # the prompts are not for the collector to look at again and again
        run = _zagent if round_.way == "zagent" else _sockets
        result, replies = run(settings, round_, warm, given, partial(_hand_shake, line))
        result.wrong = wrong_replies(round_, given, replies)
        gc.unfreeze()
        line.send(result)


def _hand_shake(line: Connection) -> None:
    line.send("prepared")
    line.recv()


def _sockets(
    settings: dict[str, Any], round_: Round, warm: list[Any], given: list[Any], start: Callable[[], None]
) -> tuple[Result, list[Any]]:
    caller = bare_sockets.Caller(settings["bare_endpoint"], round_)
    try:
        caller.run(warm)
        start()
        return caller.run(given)
    finally:
        caller.close()


def _zagent(
    settings: dict[str, Any], round_: Round, warm: list[Any], given: list[Any], start: Callable[[], None]
) -> tuple[Result, list[Any]]:
    async def run() -> tuple[Result, list[Any]]:
        link = Link(partial(DealerChannel, settings["endpoint"]))
        manager = AsyncLLMServerManager(Calls(link))
        await link.open()
        try:
            await generate_all(manager, round_, warm)
            start()
            return await generate_all(manager, round_, given)
        finally:
            link.close()

    return asyncio.run(run())


async def generate_all(manager: AsyncLLMServerManager, round_: Round, given: list[Any]) -> tuple[Result, list[Any]]:
    """One session a prompt, ``round_.in_flight`` at once; timings, and (ids, log-probabilities) by prompt."""
    params = sampling_params(round_.case)
    latencies = [0.0] * len(given)
    replies: list[Any] = [None] * len(given)
    numbers = iter(range(len(given)))

    async def lane() -> None:
        for number in numbers:
            began = time.monotonic()
            output = await manager.generate(f"session-{round_.seed}-{number}", given[number], params)
            latencies[number] = time.monotonic() - began
            replies[number] = output.token_ids, output.log_probs

    start, cpu = time.monotonic(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(round_.in_flight):
            group.create_task(lane())
    return Result(start, time.monotonic(), time.process_time() - cpu, latencies), replies


def wrong_replies(round_: Round, given: list[Any], replies: list[Any]) -> int:
    """Replies of the wrong form, or with an id or log-probability other than the answering side's own rule says."""
    rule = (
        simulated(round_.case) if round_.way == "zagent" else partial(bare_sockets.answer, count=round_.case.response)
    )
    kind = list if round_.case.as_lists else np.ndarray
    return sum(not _right(rule, kind, prompt, reply) for prompt, reply in zip(given, replies, strict=True))


def _right(rule: Rule, kind: type, prompt: Any, reply: Any) -> bool:
    wanted = rule(np.asarray(prompt, np.int32))
    return all(
        isinstance(got, kind) and np.array_equal(np.asarray(got, want.dtype), want)
        for got, want in zip(reply, wanted, strict=True)
    )


def simulated(case: Case) -> Rule:
    """What a simulated engine answers, computed here."""
    sim = SimConfig()
    sampler = Sampler(token_source(VOCABULARY, sim.eos_token_id, sim.seed), sim.eos_token_id, sim.eos_probability)
    sampling = parse_sampling(sampling_params(case))

    def rule(prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = sampler.answer(prompt, sampling, case.response)
        assert found.log_probs is not None
        return found.token_ids, found.log_probs

    return rule
