"""Unit tests on virtual time: what a simulated engine tells of a call on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from support.sim_engines import request, started
from support.virtual_clock import run
from zagent.types import TokenOutput

PROMPT = np.arange(10, 210, dtype=np.int32)


def generated(
    tokens: int, *, checkpoint_tokens: int = 10, params: dict[str, Any] | None = None, **sim: Any
) -> tuple[TokenOutput, list[tuple[float, TokenOutput]], float]:
    """The answer, what was told on the way with the (virtual) seconds it came at, and those of the answer."""

    async def main() -> tuple[TokenOutput, list[tuple[float, TokenOutput]], float]:
        engine = await started(checkpoint_tokens=checkpoint_tokens, **sim)
        clock, pieces = asyncio.get_running_loop().time, []
        call = request(PROMPT, tokens, logprobs=True, **(params or {}))
        answer = await engine.generate(call, lambda piece: pieces.append((clock(), piece)))
        return answer, pieces, clock()

    return run(main())


@pytest.mark.parametrize(("tokens", "sizes"), [(35, [10, 10, 10]), (30, [10, 10]), (11, [10]), (10, []), (3, [])])
@pytest.mark.parametrize("speed", [0, 5])
def test_pieces_are_the_answer_up_to_its_last_tokens(tokens: int, sizes: list[int], speed: int) -> None:
    """Ids, log-probabilities and versions of ten tokens each, in order; the last ones come with the answer only."""
    answer, pieces, _ = generated(tokens, decode_tokens_per_s=speed)
    assert [len(piece.token_ids) for _, piece in pieces] == sizes
    told = sum(sizes)
    ids = [token for _, piece in pieces for token in piece.token_ids.tolist()]
    log_probs = [value for _, piece in pieces for value in piece.log_probs.tolist()]
    assert (ids, log_probs) == (answer.token_ids[:told].tolist(), answer.log_probs[:told].tolist())
    assert all(piece.versions == [(0, 0, 10)] for _, piece in pieces)
    assert len(answer.token_ids) == tokens


def test_pieces_come_as_their_tokens_are_sampled() -> None:
    """200 tokens of prompt at 100/s, then ten every two seconds; the answer when it would have come anyway."""
    *_, pieces, seconds = generated(35, prefill_tokens_per_s=100, decode_tokens_per_s=5)
    assert [at for at, _ in pieces] == pytest.approx([4, 6, 8])
    assert seconds == pytest.approx(9)


def test_an_answer_is_the_same_whether_or_not_it_is_told_of() -> None:
    """Same tokens, same end, same cache."""
    told, _, _ = generated(3000, eos_probability=0.01)
    plain, none, _ = generated(3000, eos_probability=0.01, checkpoint_tokens=0)
    assert told.token_ids.tolist() == plain.token_ids.tolist()
    assert (told.stop_reason, told.versions, none) == ("stop", plain.versions, [])


def test_nobody_is_told_who_did_not_ask() -> None:
    """A call without a listener is served as if there were no checkpoints."""

    async def main() -> float:
        engine = await started(checkpoint_tokens=10, decode_tokens_per_s=10)
        await engine.generate(request(PROMPT, 35))
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(3.5)


def test_an_aborted_call_tells_of_what_it_had() -> None:
    """Half of 40 tokens: one piece of ten, as the other comes with the answer."""
    answer, pieces, _ = generated(40, faults=({"do": "abort", "at_call": 1},))
    assert ([len(piece.token_ids) for _, piece in pieces], len(answer.token_ids)) == ([10], 20)


def test_a_dead_engine_tells_nothing() -> None:
    """From the moment of its death: two pieces in five seconds, and no third."""

    async def main() -> int:
        engine = await started(checkpoint_tokens=10, decode_tokens_per_s=5, faults=({"do": "exit", "at_s": 5},))
        pieces: list[TokenOutput] = []
        task = asyncio.create_task(engine.generate(request(PROMPT, 100), pieces.append))
        await asyncio.sleep(1000)
        assert not task.done()
        task.cancel()
        return len(pieces)

    assert run(main()) == 2


def test_a_cancelled_call_tells_nothing_more() -> None:
    """And the engine holds it no longer."""

    async def main() -> tuple[int, int]:
        engine = await started(checkpoint_tokens=10, decode_tokens_per_s=5)
        pieces: list[TokenOutput] = []
        task = asyncio.create_task(engine.generate(request(PROMPT, 100), pieces.append))
        await asyncio.sleep(5)
        task.cancel()
        await asyncio.sleep(1000)
        return len(pieces), engine.in_flight()

    assert run(main()) == (2, 0)
