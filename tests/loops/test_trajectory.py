"""Append-only tokens of one row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zagent.errors import LoopError
from zagent.loops.trajectory import Trajectory
from zagent.types import TokenOutput


def sampled(*ids: int, first: float = 0.0, **fields: object) -> TokenOutput:
    log_probs = [first - 1 - i for i in range(len(ids))]
    return TokenOutput(list(ids), log_probs, **fields)  # type: ignore[arg-type]


def test_sampled_and_inserted_tokens_keep_their_order_and_masks() -> None:
    """Mask 1 and the engine's log-probability on sampled tokens, 0 and 0.0 on inserted ones."""
    trajectory = Trajectory([1, 2], 10)
    trajectory.add_sampled(sampled(101, 102))
    assert trajectory.add_inserted([201, 202, 203])
    trajectory.add_sampled(sampled(103, first=-5))
    output = trajectory.output(num_turns=4)
    assert list(output.prompt_ids) == [1, 2]
    assert list(output.response_ids) == [101, 102, 201, 202, 203, 103]
    assert list(output.response_mask) == [1, 1, 0, 0, 0, 1]
    assert list(output.response_logprobs) == [-1, -2, 0, 0, 0, -6]
    assert list(trajectory.context()) == [1, 2, 101, 102, 201, 202, 203, 103]
    assert output.num_turns == 4


def test_what_fits_exactly_is_inserted_and_what_does_not_is_not() -> None:
    """R=4, assistant [101, 102]: a tool's [201, 202] fits, [201, 202, 203] is left out whole (pitfall D7)."""
    for tool, fits in (([201, 202], True), ([201, 202, 203], False)):
        trajectory = Trajectory([1], 4)
        trajectory.add_sampled(sampled(101, 102))
        assert trajectory.add_inserted(tool) is fits
        assert trajectory.full is fits
        assert list(trajectory.response_ids()) == [101, 102, *(tool if fits else [])]
        assert trajectory.room == (0 if fits else 2)


def test_a_response_is_cut_to_its_length_in_all_its_parts() -> None:
    """An engine that gave more than asked for does no harm."""
    trajectory = Trajectory([1], 3)
    experts = np.zeros((6, 2, 2), np.int16)
    trajectory.add_sampled(sampled(5, 6, 7, 8, routed_experts=experts))
    output = trajectory.output()
    assert list(output.response_ids) == [5, 6, 7]
    assert list(output.response_mask) == [1, 1, 1]
    assert list(output.response_logprobs) == [-1, -2, -3]
    assert output.routed_experts.shape == (4, 2, 2)


def test_nothing_is_shared_with_the_loop_or_the_engine() -> None:
    """Changing a list afterwards, ours or theirs, changes nothing that is kept (pitfall C13)."""
    prompt, answer, tool = [1, 2], np.array([3, 4], np.int32), [5]
    log_probs = np.array([-1.0, -2.0], np.float32)
    trajectory = Trajectory(prompt, 10)
    trajectory.add_sampled(TokenOutput(answer, log_probs))
    trajectory.add_inserted(tool)
    context = trajectory.context()
    prompt[0] = answer[0] = tool[0] = context[0] = 99
    log_probs[0] = 99
    assert list(trajectory.context()) == [1, 2, 3, 4, 5]
    kept = trajectory.response_logprobs()
    assert kept is not None
    assert list(kept) == [-1, -2, 0]


def test_without_log_probabilities_there_are_none() -> None:
    """None, not zeros; but one call that has them is enough for an array."""
    trajectory = Trajectory([1], 10)
    trajectory.add_sampled(TokenOutput([2]))
    trajectory.add_inserted([3])
    assert trajectory.output().response_logprobs is None
    trajectory.add_sampled(sampled(4))
    assert list(trajectory.output().response_logprobs) == [0, 0, -1]


def test_an_empty_response_is_empty_arrays() -> None:
    """Never the prompt as its own response."""
    output = Trajectory([1, 2], 5).output()
    assert len(output.response_ids) == len(output.response_mask) == 0
    assert output.response_logprobs is None


def test_the_last_calls_experts_are_the_rows() -> None:
    """Each call's rows cover everything before it, so the last call's are all; one that has none keeps them."""
    trajectory = Trajectory([1], 10)
    first, second = np.zeros((2, 1, 1), np.int16), np.ones((5, 1, 1), np.int16)
    trajectory.add_sampled(sampled(2, routed_experts=first))
    trajectory.add_inserted([3, 4])
    trajectory.add_sampled(sampled(5, routed_experts=second))
    trajectory.add_sampled(sampled(6))
    assert trajectory.output().routed_experts is not None
    assert np.array_equal(trajectory.output().routed_experts, second)


@pytest.mark.parametrize("ids", [["a"], [1.5], [[1]], [2**40]])
def test_what_is_no_id_is_refused(ids: list[object]) -> None:
    """Named at once, not at the engine."""
    with pytest.raises(LoopError, match="32-bit integers"):
        Trajectory([1], 5).add_inserted(ids)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 500), max_size=6)), max_size=12), st.integers(1, 20))
def test_context_only_ever_grows_at_its_end(parts: list[tuple[bool, list[int]]], limit: int) -> None:
    """Each context begins with the one before; ids, mask and log-probabilities have one length, at most the limit."""
    trajectory = Trajectory([7], limit)
    before = trajectory.context()
    for is_sampled, ids in parts:
        if is_sampled:
            trajectory.add_sampled(sampled(*ids[: trajectory.room]))
        else:
            trajectory.add_inserted(ids)
        now = trajectory.context()
        assert np.array_equal(now[: len(before)], before)
        before = now
    output = trajectory.output()
    assert len(output.response_ids) == trajectory.response_tokens <= limit
    assert len(output.response_mask) == len(output.response_ids)
