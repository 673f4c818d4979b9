"""What becomes of calls that come while an engine is paused."""

from __future__ import annotations

import asyncio

import pytest

from support.virtual_clock import run
from zagent.engine.base import no_tokens
from zagent.engine.entrance import Entrance


def test_they_pass_wait_or_are_broken_off() -> None:
    """As long as nothing is paused; while calls stand still; while these are broken off, at once."""

    async def main() -> list[bool]:
        entrance = Entrance()
        found = [await entrance.enter()]
        entrance.close("abort")
        found.append(await entrance.enter())
        entrance.close("in_place")
        waiting = asyncio.create_task(entrance.enter())
        await asyncio.sleep(1)
        assert not waiting.done()
        entrance.open()
        return [*found, await waiting]

    assert run(main()) == [True, False, True]


def test_a_freeze_may_follow_a_freeze_or_become_an_abort() -> None:
    """Who waits goes on only when nothing stands still any more."""

    async def main() -> bool:
        entrance = Entrance()
        entrance.close("in_place")
        waiting = asyncio.create_task(entrance.enter())
        await asyncio.sleep(0)
        entrance.open()
        entrance.close("in_place")
        await asyncio.sleep(1)
        assert not waiting.done()
        entrance.close("abort")
        return await waiting

    assert run(main()) is False


@pytest.mark.parametrize("logprobs", [True, False])
def test_an_answer_without_tokens_has_no_log_probability(logprobs: bool) -> None:
    """But where they were asked for, there is an array."""
    output = no_tokens("length", logprobs=logprobs)
    assert (len(output.token_ids), output.stop_reason) == (0, "length")
    assert (output.log_probs is not None) == logprobs
