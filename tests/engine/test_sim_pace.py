"""Modelled time: an event loop that wakes late delays answers, and slows no engine down."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.virtual_clock import run
from zagent.engine.sim.halt import Halt
from zagent.engine.sim.pace import Pace, Places


def test_a_place_is_handed_on_as_of_the_time_it_was_free() -> None:
    """In order of arrival; whoever came later has it since then."""

    async def main() -> list[float]:
        places = Places(1)
        loop = asyncio.get_running_loop()
        assert await places.take(asyncio.get_running_loop().time()) == loop.time()
        waiting = [loop.create_task(places.take(asyncio.get_running_loop().time())) for _ in range(2)]
        await asyncio.sleep(5.0)
        places.give_back(at=3.0)
        places.give_back(at=-1.0)
        return [await one for one in waiting]

    assert run(main()) == [3.0, 0.0]


@pytest.mark.parametrize("handed", [False, True])
def test_who_stops_waiting_takes_no_place(handed: bool) -> None:
    """Neither before it is handed one nor in that moment."""

    async def main() -> Any:
        places = Places(1)
        await places.take(asyncio.get_running_loop().time())
        first, second = (asyncio.create_task(places.take(asyncio.get_running_loop().time())) for _ in range(2))
        await asyncio.sleep(0)
        if handed:
            places.give_back(at=0.0)
            first.cancel()
        else:
            first.cancel()
            places.give_back(at=0.0)
        return await second

    assert run(main()) == 0.0


def test_a_late_call_makes_up_for_it() -> None:
    """The second part ends when it would have, had the first one been noticed in time."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        pace = Pace(loop.time(), 2.0, Halt())
        await pace.spend(10, 10.0)
        await asyncio.sleep(1.5)  # stands for a loop that is busy
        ends = []
        for tokens in (10, 10, 0):
            await pace.spend(tokens, 10.0)
            ends.append(loop.time())
        await pace.spend(10, 0.0)
        return [*ends, loop.time(), pace.time]

    assert run(main()) == pytest.approx([4.0, 6.0, 6.0, 6.0, 6.0])
