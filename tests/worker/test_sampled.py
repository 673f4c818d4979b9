"""Versions of a response, from what the engine calls of its trajectory sampled."""

from __future__ import annotations

import numpy as np
import pytest

from zagent.types import AgentLoopOutput, TokenOutput
from zagent.worker.runner import complete
from zagent.worker.sampled import Sampled, response_versions, versions_of


def sampled(*calls: TokenOutput) -> Sampled:
    found = Sampled()
    for call in calls:
        found.add(10, call, 1.5)
    return found


def call(ids: list[int], *versions: tuple[int, int, int], **rest: object) -> TokenOutput:
    return TokenOutput(ids, versions=list(versions), **rest)  # type: ignore[arg-type]


def response(ids: list[int], mask: list[int]) -> AgentLoopOutput:
    return AgentLoopOutput(prompt_ids=[1], response_ids=ids, response_mask=mask)


def test_versions_per_token() -> None:
    """From spans; −1 where none covers a token."""
    assert versions_of(call([1, 2, 3, 4], (7, 0, 2), (8, 2, 3))).tolist() == [7, 7, 8, -1]
    assert versions_of(TokenOutput([])).dtype == np.int64


@pytest.mark.parametrize(
    ("calls", "ids", "mask", "expected"),
    [
        ([call([5, 6], (1, 0, 2))], [5, 6], [1, 1], [1, 1]),
        # two turns with a tool's tokens between them, and a change of weights within the second
        (
            [call([5, 6], (1, 0, 2)), call([7, 8], (1, 0, 1), (2, 1, 2))],
            [5, 6, 0, 7, 8],
            [1, 1, 0, 1, 1],
            [1, 1, -1, 1, 2],
        ),
        # the first of two branches was dropped
        ([call([9, 9], (1, 0, 2)), call([5, 6], (2, 0, 2))], [5, 6], [1, 1], [2, 2]),
        # cut by the loop
        ([call([5, 6, 7], (1, 0, 2), (2, 2, 3))], [5, 6], [1, 1], [1, 1]),
        # not to be followed: one version is certain, of two neither is
        ([call([5, 6], (3, 0, 2))], [8, 8], [1, 1], [3, 3]),
        ([call([5], (3, 0, 1)), call([6], (4, 0, 1))], [5, 8], [1, 1], [3, -1]),
        ([], [8], [1], [-1]),
        (
            [
                call(
                    [],
                )
            ],
            [],
            [],
            [],
        ),
    ],
)
def test_response_versions(calls: list[TokenOutput], ids: list[int], mask: list[int], expected: list[int]) -> None:
    """Each sampled token has the version of the call that sampled it, every other −1."""
    assert response_versions(response(ids, mask), sampled(*calls)).tolist() == expected


def test_a_loop_that_says_nothing_is_completed() -> None:
    """Versions, times, preemptions and the standard fields; what the loop said stays."""
    output = response([5], [1])
    output.extra_fields["cached_tokens"] = 77
    complete(
        output, sampled(call([5], (3, 0, 1), cached_tokens=4, num_preempted=1), call([6], (4, 0, 1), num_preempted=1))
    )
    fields = output.extra_fields
    assert fields["rollout_versions"].tolist() == [3]
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (3, 4)
    assert (fields["cached_tokens"], fields["prompt_tokens"], fields["tool_rewards"]) == (77, 20, None)
    assert (output.metrics.generate_sequences, output.metrics.num_preempted) == (3.0, 2)
