"""Balance on real processes and sockets: who gets which call, and whether everybody's counts agree."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import zagent
from support.clusters import sim_config

PARAMS = {"max_new_tokens": 8, "logprobs": True}


def totals(manager: zagent.AgentLoopManager) -> list[int]:
    return sorted(engine["total"] for engine in manager.status()["pools"]["engine"].values())


def counts_agree(manager: zagent.AgentLoopManager) -> bool:
    """Whether the broker's in-flight counts are the engines' own."""
    broker = {name: engine["in_flight"] for name, engine in manager.status()["pools"]["engine"].items()}
    return broker == {name: stats["in_flight"] for name, stats in manager.engine_stats().items()}


async def settled(holds: Callable[[], bool]) -> None:
    """Wait, at most 10 s, until ``holds``: what is under way between two processes needs a moment to arrive."""
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 (another process's state)
            await asyncio.sleep(0.01)


def test_calls_one_after_another_are_spread_evenly(tmp_path: Path) -> None:
    """1 000 sequential calls of distinct sessions on 4 engines: 250 on each, give or take one."""
    with zagent.AgentLoopManager.launch(sim_config(tmp_path, "engine.count=4")) as manager:

        async def calls() -> None:
            for i in range(1000):
                await manager.server_manager.generate(f"s{i}", np.array([1, 2, i % 200], np.int32), PARAMS)

        asyncio.run(calls())
        assert totals(manager) in ([250] * 4, [249, 250, 250, 251], [249, 249, 251, 251])
        assert counts_agree(manager)


SLOW = "engine.sim.faults=[{engine: 0, do: slow, factor: 10}]"
SPEED = "engine.sim.decode_tokens_per_s=2000"


def test_slow_engine_gets_fewer_calls(tmp_path: Path) -> None:
    """64 callers, one of 4 engines ten times slower: every new session went to a member with the fewest in flight,
    by the core's own record, and the slow engine ends with clearly fewer calls."""
    record = tmp_path / "record.jsonl"
    config = sim_config(tmp_path, "engine.count=4", SLOW, SPEED, f"routing.record={record}")
    with zagent.AgentLoopManager.launch(config) as manager:
        asyncio.run(gathered(manager, callers=64, rounds=20))
        per_engine = {name: e["total"] for name, e in manager.status()["pools"]["engine"].items()}
        assert {e["in_flight"] for e in manager.status()["pools"]["engine"].values()} == {0}
    assignments = [json.loads(line) for line in record.read_text().splitlines()]
    new = [a for a in assignments if a["pool"] == "engine" and a["why"] == "new"]
    assert len(new) == 64 * 20
    assert all(a["in_flight"][a["member"]] == min(a["in_flight"].values()) for a in new)
    slow = per_engine.pop("engine-0")
    assert slow < 0.5 * min(per_engine.values())


async def gathered(manager: zagent.AgentLoopManager, callers: int, rounds: int) -> None:
    async def caller(number: int) -> None:
        for turn in range(rounds):
            await manager.server_manager.generate(f"{number}/{turn}", [1, number, turn], {"max_new_tokens": 20})

    await asyncio.gather(*(caller(number) for number in range(callers)))


def test_counts_agree_whenever_callers_pause(tmp_path: Path) -> None:
    """Mid-run, after a storm of cancels and at the end, the broker's counts are the engines' own; all 0 at the end."""
    config = sim_config(tmp_path, "engine.count=3", "engine.sim.decode_tokens_per_s=200", "engine.max_in_flight=8")
    with zagent.AgentLoopManager.launch(config) as manager:
        asyncio.run(storm(manager))
        status = manager.status()
        assert status["pending"] == 0
        assert {engine["in_flight"] for engine in status["pools"]["engine"].values()} == {0}
        assert {stats["in_flight"] for stats in manager.engine_stats().values()} == {0}
        assert status["counters"]["malformed"] == status["counters"]["refused"] == 0


async def storm(manager: zagent.AgentLoopManager) -> None:
    choose = random.Random(7)

    def call(number: int, tokens: int) -> asyncio.Task[Any]:
        work: Awaitable[Any] = manager.server_manager.generate(f"s{number % 40}", [1, 2, 3], {"max_new_tokens": tokens})
        return asyncio.ensure_future(work)

    for wave in range(4):
        long = [call(wave * 100 + i, 4000) for i in range(20)]  # of 24 credits: nothing waits, so nothing moves
        await settled(lambda: sum(s["in_flight"] for s in manager.engine_stats().values()) == 20)
        await settled(lambda: counts_agree(manager))
        more = [call(wave * 100 + i, choose.randrange(1, 4000)) for i in range(60)]  # most must wait in the broker
        await asyncio.sleep(0)
        doomed = long + more
        choose.shuffle(doomed)
        for task in doomed:
            task.cancel()
            if choose.random() < 0.1:
                await asyncio.sleep(0)
        results = await asyncio.gather(*doomed, return_exceptions=True)
        assert Counter(type(result) for result in results) == {asyncio.CancelledError: 80}
        await settled(lambda: counts_agree(manager) and not any(e["in_flight"] for e in engines(manager)))


def engines(manager: zagent.AgentLoopManager) -> list[dict[str, Any]]:
    return list(manager.status()["pools"]["engine"].values())
