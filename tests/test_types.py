"""What loops, engines and trainers hand each other is checked where it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from zagent.types import AgentLoopMetrics, AgentLoopOutput, TokenOutput, int_array


def output(**fields: Any) -> AgentLoopOutput:
    return AgentLoopOutput(**{"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 0], **fields})


@pytest.mark.parametrize(
    "ids", [[2, 3], (2, 3), np.array([2, 3]), np.array([2, 3], np.uint8)], ids=lambda v: type(v).__name__
)
def test_lists_and_arrays_are_taken(ids: Any) -> None:
    """As they are, without conversion."""
    assert output(response_ids=ids).response_ids is ids


BAD = {
    "mask too short": {"response_mask": [1]},
    "mask too long": {"response_mask": [1, 0, 1]},
    "mask of twos": {"response_mask": [2, 0]},
    "negative mask": {"response_mask": [-1, 0]},
    "logprobs too short": {"response_logprobs": [0.0]},
    "logprobs of None": {"response_logprobs": [None, None]},
    "logprobs of text": {"response_logprobs": ["a", "b"]},
    "nested logprobs": {"response_logprobs": [[0.0], [0.0]]},
    "float ids": {"response_ids": [2.0, 3.0]},
    "text ids": {"response_ids": "ab"},
    "no ids": {"response_ids": None},
    "nested ids": {"prompt_ids": [[1]]},
    "ragged ids": {"prompt_ids": [[1], [2, 3]]},
    "huge ids": {"prompt_ids": [2**31]},
    "unknown field": {"responce_ids": [1]},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD)
def test_what_a_trainer_could_not_use_is_refused(fields: dict[str, Any]) -> None:
    """`ValidationError`, which is a `ValueError`."""
    with pytest.raises(ValidationError):
        output(**fields)


def test_unequal_lengths_are_named_with_both_numbers() -> None:
    """So that the loop's author sees which list is wrong."""
    with pytest.raises(ValidationError, match="response_mask has 3 entries, response_ids has 2"):
        output(response_mask=[1, 1, 1])


def test_an_empty_response_is_fine() -> None:
    """With empty mask and log-probabilities."""
    assert output(response_ids=[], response_mask=[], response_logprobs=[]).response_ids == []


def test_defaults_are_fresh() -> None:
    """No two outputs share their extra_fields or metrics (pitfall D23)."""
    first, second = output(), output()
    assert first.extra_fields is not second.extra_fields
    assert first.metrics is not second.metrics
    assert TokenOutput([]).extra_fields is not TokenOutput([]).extra_fields
    assert TokenOutput([]).versions is not TokenOutput([]).versions


def test_metrics_begin_at_zero_and_unknown() -> None:
    """Seconds are 0, preemptions −1 = unknown."""
    assert AgentLoopMetrics().model_dump() == {
        "generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": -1,
        "tool_calls_ok": 0, "tool_calls_failed": 0, "tool_calls_skipped": 0,
    }  # fmt: skip


@pytest.mark.parametrize("ids", [[], (), np.empty(0), np.empty(0, np.int64)], ids=repr)
def test_no_ids_are_an_empty_int32_array(ids: Any) -> None:
    """Whatever dtype numpy gives an empty list."""
    array = int_array(ids)
    assert array is not None
    assert (array.dtype, array.shape) == (np.int32, (0,))


def test_an_int32_array_is_not_copied() -> None:
    """The hot path."""
    array = np.array([1, 2], np.int32)
    assert int_array(array) is array


@pytest.mark.parametrize("ids", [[2**31 - 1, -(2**31)], np.array([5], ">i4"), np.array([5], np.uint64)], ids=repr)
def test_32_bit_ids_of_any_integer_kind_are_taken(ids: Any) -> None:
    """Exactly, as int32."""
    array = int_array(ids)
    assert array is not None
    assert array.dtype == np.int32
    assert array.tolist() == list(ids)


@pytest.mark.parametrize(
    "ids", [[2**31], [-(2**31) - 1], [2**70], [True], [1.0], ["1"], [None], 5, [[1]], [[1], [2, 3]], {}], ids=repr
)
def test_anything_else_is_none(ids: Any) -> None:
    """Bools and floats are no ids either."""
    assert int_array(ids) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_log_probabilities_are_finite(value: float) -> None:
    """One that is not would poison a whole batch's loss."""
    with pytest.raises(ValueError, match="finite"):
        AgentLoopOutput(prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 1], response_logprobs=[-1.0, value])
