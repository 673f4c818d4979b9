"""`single_turn_agent`: one prompt, one answer, never beyond the limits."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest

from support.tiny_tokenizer import tiny_tokenizer
from zagent.config import RolloutConfig
from zagent.errors import PromptTooLong
from zagent.loops.base import TrainerConfig
from zagent.loops.single_turn import SingleTurnAgentLoop
from zagent.types import AgentLoopOutput, TokenOutput

TOKENIZER = tiny_tokenizer()
PROMPT = [{"role": "user", "content": "hi"}]
PROMPT_IDS = TOKENIZER.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=True, return_dict=False)


class Engine:
    """Answers with `tokens` ids 0, 1, 2 …, whatever was asked."""

    def __init__(self, tokens: int, **output: Any) -> None:
        self.tokens, self.output = tokens, output
        self.calls: list[tuple[str, np.ndarray, dict[str, Any]]] = []

    async def generate(
        self, request_id: str, prompt_ids: Any, sampling_params: dict[str, Any], image_data: Any = None
    ) -> TokenOutput:
        self.calls.append((request_id, prompt_ids, dict(sampling_params)))
        ids = np.arange(self.tokens, dtype=np.int32)
        fields = {"log_probs": -ids.astype(np.float32), "versions": [(4, 0, self.tokens)], **self.output}
        return TokenOutput(ids, **fields)


def answer(
    engine: Engine, params: dict[str, Any] | None = None, context: int | None = 500, **rollout: Any
) -> AgentLoopOutput:
    config = TrainerConfig(RolloutConfig(**{"response_length": 10, "prompt_length": 100, **rollout}), context)
    loop = SingleTurnAgentLoop(config, engine, TOKENIZER)  # type: ignore[arg-type]
    return asyncio.run(loop.run({} if params is None else params, raw_prompt=PROMPT))


def test_the_trajectory_is_prompt_and_answer() -> None:
    """All sampled, two turns, the text beside."""
    engine = Engine(5)
    output = answer(engine)
    assert list(output.prompt_ids) == list(engine.calls[0][1]) == PROMPT_IDS
    assert list(output.response_ids) == [0, 1, 2, 3, 4]
    assert list(output.response_mask) == [1] * 5
    assert list(output.response_logprobs) == [0, -1, -2, -3, -4]
    assert output.num_turns == 2
    assert output.extra_fields["response_text"] == TOKENIZER.decode([0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    ("params", "context", "asked"),
    [
        ({}, 500, 10),
        ({"max_new_tokens": 3}, 500, 3),
        ({"max_tokens": 4}, 500, 4),
        ({"max_new_tokens": 50}, 500, 10),
        ({}, len(PROMPT_IDS) + 8 + 6, 6),
        ({}, None, 10),
    ],
)
def test_the_engine_is_asked_for_the_smallest_limit(params: dict[str, Any], context: int | None, asked: int) -> None:
    """The caller's, R, or what the context leaves; in one key only."""
    engine = Engine(2)
    answer(engine, params, context)
    sent = engine.calls[0][2]
    assert sent["max_new_tokens"] == asked
    assert "max_tokens" not in sent


@pytest.mark.parametrize(
    ("params", "context"),
    [({"max_new_tokens": 0}, 500), ({"max_new_tokens": -3}, 500), ({}, len(PROMPT_IDS) + 8), ({}, len(PROMPT_IDS))],
)
def test_without_budget_the_engine_is_not_called(params: dict[str, Any], context: int) -> None:
    """An empty answer, no request for zero tokens (pitfalls D5, D21)."""
    engine = Engine(5)
    output = answer(engine, params, context)
    assert engine.calls == []
    assert list(output.response_ids) == list(output.response_mask) == []
    assert list(output.prompt_ids) == PROMPT_IDS


def test_an_answer_beyond_the_limit_is_cut() -> None:
    """Ids, mask and log-probabilities to R, experts to the prompt and R."""
    experts = np.zeros((len(PROMPT_IDS) + 14, 2, 2), np.int16)
    output = answer(Engine(15, routed_experts=experts))
    lengths = {len(v) for v in (output.response_ids, output.response_mask, output.response_logprobs)}
    assert lengths == {10}
    assert output.routed_experts.shape == (len(PROMPT_IDS) + 10, 2, 2)


def test_without_logprobs_there_are_none() -> None:
    """None is not an empty list."""
    assert answer(Engine(2, log_probs=None)).response_logprobs is None


def test_sampling_params_stay_as_they_are() -> None:
    """The dict belongs to the row (pitfall D4)."""
    params = {"max_tokens": 4, "temperature": 0.7}
    before = copy.deepcopy(params)
    answer(Engine(2), params)
    assert params == before


def test_each_trajectory_is_a_session_of_its_own() -> None:
    """Two rows never share an id."""
    first, second = Engine(1), Engine(1)
    answer(first)
    answer(second)
    assert first.calls[0][0] != second.calls[0][0]


def test_a_prompt_too_long_never_reaches_the_engine() -> None:
    """It fails its row, or is cut before the engine sees it, so that the trained context is the sampled one."""
    engine = Engine(2)
    with pytest.raises(PromptTooLong):
        answer(engine, prompt_length=5)
    assert engine.calls == []
    output = answer(engine, prompt_length=5, prompt_overflow="left")
    assert list(output.prompt_ids) == engine.calls[0][1].tolist() == PROMPT_IDS[-5:]
