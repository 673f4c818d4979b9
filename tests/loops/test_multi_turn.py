"""`MultiTurnLoop`: what loops of one's own with several turns are built from."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import zagent
from support.scripted_llm import ScriptedLLM
from zagent.config import RolloutConfig
from zagent.errors import LoopError
from zagent.loops.base import TrainerConfig
from zagent.tiny.tokenizer import build

TOKENIZER = build()
PROMPT = [{"role": "user", "content": "Count."}]


class Twice(zagent.MultiTurnLoop):
    """Asks, objects, and asks again."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> zagent.AgentLoopOutput:
        dialogue = await self.open(row["raw_prompt"])
        if row.get("hasty"):
            await self.tell(dialogue, [{"role": "user", "content": "Well?"}])
        await self.ask(dialogue, sampling_params)
        if await self.tell(dialogue, [{"role": "user", "content": "Sure?"}]):
            await self.ask(dialogue, sampling_params)
        return await self.finish(dialogue, 0.5, mine=len(dialogue.messages))


def run(*answers: str, **row: Any) -> tuple[zagent.AgentLoopOutput, ScriptedLLM]:
    llm = ScriptedLLM(TOKENIZER, *answers)
    loop = Twice(TrainerConfig(RolloutConfig()), llm, TOKENIZER)  # type: ignore[arg-type]
    return asyncio.run(loop.run({}, raw_prompt=PROMPT, **row)), llm


def test_answers_and_replies_join_tokens_and_messages() -> None:
    """Without the loop's doing; the stop token is no part of the text."""
    output, llm = run("One.", "Two.")
    said = [message["content"] for message in output.extra_fields["messages"]]
    assert said == ["Count.", "One.", "Sure?", "Two."]
    mask = np.asarray(output.response_mask) == 1
    assert list(np.asarray(output.response_ids)[mask]) == llm.sampled
    assert (output.num_turns, output.reward_score, output.extra_fields["mine"]) == (4, 0.5, 4)


def test_a_reply_before_the_first_answer_is_refused() -> None:
    """There is nothing that it could go on from."""
    with pytest.raises(LoopError, match="before the first ask"):
        run("One.", hasty=True)
