"""What the demonstration asks, and how it judges."""

from __future__ import annotations

from typing import Any

import pytest

from support.outcomes import failed, ok
from zagent.demo.questions import answer_and_result, batch_of, judge
from zagent.tiny.arithmetic import questions
from zagent.types import Outcome

ASKED = questions(3, 4)


def ended(index: int, *said: tuple[str, Any]) -> Outcome:
    """A finished row whose conversation is ``said``: (role, text)."""
    return ok(index, extra_fields={"messages": [{"role": role, "content": str(text)} for role, text in said]})


def test_rows_carry_their_question_and_truth() -> None:
    """And, in the wrong round, how far off their calculator is."""
    batch = batch_of(ASKED, "right")
    assert [row[0]["content"] for row in batch.non_tensor_batch["raw_prompt"]] == [one.text for one in ASKED]
    assert [row["ground_truth"] for row in batch.non_tensor_batch["reward_model"]] == [str(one.answer) for one in ASKED]
    assert list(batch.non_tensor_batch["uid"]) == ["right-0", "right-1", "right-2", "right-3"]
    assert "tools_kwargs" not in batch.non_tensor_batch
    wrong = batch_of(ASKED, "wrong", [1, 2, 3, 4]).non_tensor_batch["tools_kwargs"]
    assert [row["calculator"]["off_by"] for row in wrong] == [1, 2, 3, 4]


def test_verdicts_tell_right_from_told() -> None:
    """Right without a call does not count, nor does a failed row; a wrong result that is repeated counts as told."""
    truth = [question.answer for question in ASKED]
    outcomes = [
        ended(0, ("user", "?"), ("assistant", ""), ("tool", truth[0]), ("assistant", f"The answer is {truth[0]}.")),
        ended(1, ("user", "?"), ("assistant", f"The answer is {truth[1]}.")),
        ended(2, ("user", "?"), ("tool", truth[2] + 9), ("assistant", f"The answer is {truth[2] + 9}.")),
        failed(3),
    ]
    verdict = judge(ASKED, outcomes[::-1])
    assert (verdict.rows, verdict.ok, verdict.right, verdict.told) == (4, 3, 1, 2)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([], (None, None)),
        ([("tool", "7")], (None, 7)),
        ([("tool", "Error: nothing"), ("assistant", "The answer is 3.")], (3, None)),
        ([("tool", "1"), ("tool", "2"), ("assistant", "no number")], (None, 2)),
    ],
)
def test_conversations_that_did_not_go_well_have_no_number(said: list[tuple[str, Any]], found: Any) -> None:
    """None, not an error: they count as wrong."""
    assert answer_and_result(ended(0, *said)) == found
