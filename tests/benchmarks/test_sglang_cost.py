"""What is asked of SGLang, and how it is told: without SGLang."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sglang_cost
from benchmarks.processes import Failed
from benchmarks.sglang_conversations import Talk, held
from benchmarks.sglang_cost import CALLS, OVERHEAD, PEERS, TALKING, table
from benchmarks.sglang_overhead import ANSWER, IDS, PROMPT, Round, timed
from benchmarks.suite import Figure, Options
from zagent.types import TokenOutput


def answer(tokens: int, cached: int = 0) -> TokenOutput:
    ids = np.full(tokens, 7, np.int32)
    return TokenOutput(ids, ids.astype(np.float32), cached_tokens=cached)


def test_a_round_asks_every_prompt_once_and_no_more_at_a_time_than_it_says() -> None:
    """Seven calls, three in flight; all prompts differ, also from another round's."""
    seen: list[np.ndarray] = []
    running = most = 0

    async def ask(number: int, prompt: np.ndarray) -> TokenOutput:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        seen.append(prompt)
        return answer(ANSWER)

    for seed in (1, 2):
        found = asyncio.run(timed(Round(7, 3, seed), ask))
        assert found.tokens_per_s > 0
    assert most == 3
    assert len({prompt.tobytes() for prompt in seen}) == 14
    assert {prompt.shape for prompt in seen} == {(PROMPT,)}


@pytest.mark.parametrize("wrong", [answer(ANSWER - 1), TokenOutput(np.zeros(ANSWER, np.int32))])
def test_an_answer_of_another_form_ends_the_round(wrong: TokenOutput) -> None:
    """Too short, or without log-probabilities: its speed says nothing."""

    async def ask(number: int, prompt: np.ndarray) -> TokenOutput:
        return wrong

    with pytest.raises(Failed, match="an answer of"):
        asyncio.run(timed(Round(2, 1, 0), ask))


def test_each_turn_says_all_that_was_said_before() -> None:
    """Opening, answer, reply, and so on, in one session a conversation; the cached share is of all prompts."""
    said: dict[str, list[np.ndarray]] = {}

    async def ask(session: str, prompt: np.ndarray, tokens: int) -> TokenOutput:
        before = said.setdefault(session, [])
        cached = len(before[-1]) if before else 0
        before.append(prompt)
        await asyncio.sleep(0)
        return answer(tokens, cached)

    talk = Talk(conversations=3, at_once=2, turns=3, opening=10, answer=2, reply=5)
    found = asyncio.run(held(talk, 1, ask))
    assert sorted(map(len, said.values())) == [3, 3, 3]
    for turns in said.values():
        assert [len(prompt) for prompt in turns] == [10, 17, 24]
        assert all(np.array_equal(later[: len(first)], first) for first, later in pairwise(turns))
        assert np.array_equal(turns[1][10:12], [7, 7])
    assert found.cached_share == pytest.approx((10 + 17) / (10 + 17 + 24))


def figures(
    of: Callable[[str, str, int], Sequence[tuple[str, float]]], case: str, peers: Sequence[str]
) -> list[Figure]:
    return [
        Figure("sglang", case, peer, repeat, name, value, "")
        for repeat in range(3)
        for peer in peers
        for name, value in of(case, peer, repeat)
    ]


def test_the_tables_show_medians_and_ratios_of_pairs() -> None:
    """zagent at 9/10 of the speed in process; random routing twice as long as sticky."""
    made: list[Figure] = []
    for in_flight in CALLS:
        made += figures(
            lambda case, peer, repeat: [
                ("tokens_per_s", (repeat + 1) * (90 if peer == "zagent" else 100)),
                ("p50_ms", 5),
            ],
            f"{OVERHEAD}: {in_flight}",
            PEERS[:2],
        )
    made += figures(
        lambda case, peer, repeat: [("makespan_s", 2.0 if peer == "random" else 1.0), ("cached_share", 0.5)],
        TALKING,
        ("zagent", "random"),
    )
    text = table(made)
    assert "| 8 in flight | 180 | 200 | 0.90 (0.90–0.90) | 5 | 5 | 1.00 (1.00–1.00) |" in text
    assert "| random | 2.0 (2.0–2.0) | 2.00 (2.00–2.00) | 0.50 (0.50–0.50) |" in text
    assert "fewest" not in text
    assert table([figure for figure in made if figure.case == TALKING]).startswith("| conversations")


def test_prompts_fit_the_model() -> None:
    """Only plain bytes of its 259 ids, and no conversation beyond its 2048 tokens of context."""
    assert 0 <= IDS.start < IDS.stop <= 256
    talk = sglang_cost.TALK
    assert talk.opening + talk.turns * (talk.answer + talk.reply) < 2048


def test_every_peer_has_its_turn_in_every_place() -> None:
    """Whoever goes first changes, so that no way of routing always meets the warmer machine."""
    order: list[str] = []

    class Silent:
        def hold(self, peer: str, talk: Talk, seed: int) -> sglang_cost.Talked:
            order.append(peer)
            return sglang_cost.Talked(1.0, 0.5)

    recorded: list[Figure] = []
    options = Options(quick=True, repeats=3, peers=PEERS, trace=None, out=Path())
    routed = ("zagent", "least", "random")
    sglang_cost._conversations(Silent(), routed, 3, options, recorded.append)  # type: ignore[arg-type]
    assert Counter(order[3::3]) == Counter(routed)
    assert {figure.repeat for figure in recorded} == {0, 1, 2}
