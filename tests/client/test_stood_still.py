"""A process that stands still is not heard, though it may hear all that has come for it when it goes on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from support.cluster_in_memory import Cluster
from support.rough_router import RoughRouter
from support.virtual_clock import run
from zagent.broker.pulse import PULSE_S
from zagent.wire.messages import Call


def test_an_answer_that_never_left_is_not_dropped_for_the_pulses_that_waited() -> None:
    """A member was stopped with its answer in its own queue; the broker's pulses of that time are there at once when it
    goes on, and then the broker dies. The next one is told of the answer, and the call does not run again."""
    ran: list[int] = []

    async def do(argument: Any, call: Call) -> int:
        ran.append(call.attempt)
        return len(ran)

    async def main() -> None:
        router = RoughRouter(random.Random(0), slowest=0.001)
        async with Cluster(router=router, pulses=True) as cluster:
            await cluster.member("m0", {"do": do})
            link, calls = cluster.links[-1], await cluster.caller()
            await calls.call("engine", "do")
            await asyncio.sleep(5 * PULSE_S)
            now = asyncio.get_running_loop().time()
            router.mute(link.nonce, now + 10 * PULSE_S)
            waiting = asyncio.create_task(calls.call("engine", "do"))
            await asyncio.sleep(5 * PULSE_S)
            assert (ran, waiting.done()) == ([1, 1], False)
            router.mute(link.nonce, now)
            await cluster.restart_broker()
            assert (await waiting, ran) == (2, [1, 1])

    run(main())
