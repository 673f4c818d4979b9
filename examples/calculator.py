"""The task of `grpo_tiny.py`: tool, reward, rows. Workers import it, so it needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zagent
from zagent.tiny.arithmetic import Question, answer_of, evaluate


@zagent.tool
def calculator(expression: str) -> int | str:
    """Integer arithmetic."""
    return evaluate(expression)


def score(messages: list[dict[str, Any]], ground_truth: str) -> float:
    """1 if the conversation ends with the model saying the right number, else 0."""
    last = messages[-1]
    return float(last["role"] == "assistant" and answer_of(last["content"]) == int(ground_truth))


def coin(output: zagent.AgentLoopOutput) -> float:
    """For simulated engines, which invent tokens: right by chance."""
    return float(int(output.response_ids[0]) % 2)


def rows_of(asked: Sequence[Question], **meta_info: Any) -> zagent.DataProto:
    """One row per question."""
    return zagent.DataProto(
        non_tensor_batch={
            "raw_prompt": [[{"role": "user", "content": question.text}] for question in asked],
            "uid": [question.text for question in asked],
            "reward_model": [{"ground_truth": str(question.answer)} for question in asked],
        },
        meta_info=meta_info,
    )
