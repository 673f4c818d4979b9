"""What the demonstration asks, and how its answers are judged. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zagent.data_proto import DataProto
from zagent.tiny.arithmetic import Question, answer_of
from zagent.types import Outcome


def batch_of(questions: Sequence[Question], prefix: str, off_by: Sequence[int] | None = None) -> DataProto:
    """One row per question, with uids ``prefix``-0, ``prefix``-1, …; ``off_by`` makes each row's calculator wrong."""
    columns = {
        "raw_prompt": [[{"role": "user", "content": question.text}] for question in questions],
        "uid": [f"{prefix}-{number}" for number in range(len(questions))],
        "data_source": ["arithmetic"] * len(questions),
        "reward_model": [{"ground_truth": str(question.answer)} for question in questions],
    }
    if off_by is not None:
        columns["tools_kwargs"] = [{"calculator": {"off_by": offset}} for offset in off_by]
    return DataProto(non_tensor_batch=columns)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Over all rows: how many were ``ok``, answered with the ``right`` number after a call of the tool, and answered
    with what the tool ``told`` last."""

    rows: int
    ok: int
    right: int
    told: int


def judge(questions: Sequence[Question], outcomes: Sequence[Outcome]) -> Verdict:
    """``outcomes`` in any order; their indices count ``questions``."""
    ended = [outcome for outcome in outcomes if outcome.status == "ok"]
    said = [(questions[outcome.index].answer, *answer_and_result(outcome)) for outcome in ended]
    right = sum(answer == truth and result is not None for truth, answer, result in said)
    told = sum(answer is not None and answer == result for _, answer, result in said)
    return Verdict(len(questions), len(ended), right, told)


def answer_and_result(outcome: Outcome) -> tuple[int | None, int | None]:
    """The number of the last answer, and of the last tool result."""
    messages = outcome.output.extra_fields["messages"] if outcome.output is not None else []
    results = [message["content"] for message in messages if message["role"] == "tool"]
    answer = answer_of(str(messages[-1]["content"])) if messages and messages[-1]["role"] == "assistant" else None
    return answer, _number(results[-1]) if results else None


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
