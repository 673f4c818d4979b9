"""A loop's output is refused in its own row where it would cost the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from zagent.errors import EncodeError, LoopError, PromptTooLong
from zagent.types import RESERVED_COLUMNS, AgentLoopOutput
from zagent.worker.checks import check_encodes, check_output, refused_output

#: An image that is one token.
GRID = {"image_grid_thw": [[1, 2, 2]]}


def output(**changes: Any) -> AgentLoopOutput:
    return AgentLoopOutput(**{"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 1], **changes})


def changed(name: str, value: Any) -> AgentLoopOutput:
    made = output()
    setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "returned a NoneType, not an AgentLoopOutput"),
        (changed("response_ids", [2]), "response_mask has 2 entries, response_ids has 1"),
        (changed("response_logprobs", 0.5), "response_logprobs must hold only numbers in one dimension"),
        (output(routed_experts=np.zeros((3, 2), np.int16)), "routed_experts must be an array"),
        (output(extra_fields={"rollout_versions": 3}), "rollout_versions must be a list or array of ints"),
        (output(extra_fields={"rollout_versions": ["a", "b"]}), "rollout_versions must be a list or array of ints"),
        (output(extra_fields={"rollout_versions": [0]}), "rollout_versions has 1 entries, response_ids has 2"),
        (output(extra_fields={"reward_extra_info": 3}), "reward_extra_info must be a dict, got int"),
        (output(extra_fields={"reward_extra_info": {1: 2}}), "must be text, got 1"),
        (changed("extra_fields", {None: 2}), "must be text, got None"),
        (output(extra_fields={"image_spans": [[0, 1]]}), "image_spans of 1 images, image_grid_thw of 0"),
        (output(extra_fields={"multi_modal_inputs": GRID}), "image_spans of 0 images, image_grid_thw of 1"),
        (
            output(extra_fields={"image_spans": [[1, 4]], "multi_modal_inputs": GRID}),
            "an image at tokens 1 to 4, after 0 of 3",
        ),
        (changed("reward_score", "much"), "a score must be a number, got 'much'"),
        (output(reward_score=float("nan")), "a score must be a finite float32, got nan"),
    ],
)
def test_what_collate_could_not_use(made: Any, message: str) -> None:
    """`LoopError` with the loop's name and the part."""
    with pytest.raises(LoopError, match=f"agent loop 'mine'.*{message}"):
        check_output(made, "mine", 10)


@pytest.mark.parametrize("name", RESERVED_COLUMNS)
def test_the_outcomes_own_columns_are_reserved(name: str) -> None:
    """A loop's value would vanish behind them."""
    for fields in ({name: 1}, {"reward_extra_info": {name: 1}}):
        output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], extra_fields=fields)
        with pytest.raises(LoopError, match=name):
            check_output(output, "mine", 10)


def test_a_prompt_beyond_the_limit() -> None:
    """Both lengths are told."""
    with pytest.raises(PromptTooLong, match=r"prompt of 11 tokens, beyond rollout.prompt_length=10"):
        check_output(output(prompt_ids=[1] * 11), "mine", 10)


def test_a_complete_output_passes() -> None:
    """As it is."""
    made = output(
        routed_experts=np.zeros((3, 2, 2), np.int16),
        extra_fields={"rollout_versions": np.zeros(2, np.int64), "reward_extra_info": {"a": 1}},
    )
    assert check_output(made, "mine", 10) is made
    assert check_output(output(extra_fields={"reward_extra_info": None}), "mine", 10)
    assert check_output(changed("reward_score", np.float32(0.5)), "mine", 10).reward_score == 0.5


def test_pydantics_report_becomes_one_line() -> None:
    """No links, no input dumps."""
    with pytest.raises(ValidationError) as caught:
        output(response_mask=[1])
    assert str(refused_output(caught.value, "mine")) == (
        "agent loop 'mine': response_mask has 1 entries, response_ids has 2"
    )
    with pytest.raises(ValidationError) as caught:
        output(num_turns="many")
    assert str(refused_output(caught.value, "mine")).startswith("agent loop 'mine': num_turns: Input should be")


@pytest.mark.parametrize(
    ("packed", "where"),
    [({"extra_fields": {"a": 1, "b": {2}}}, r"extra_fields\['b'\]"), ({"extra_fields": {}, "x": {2}}, "x")],
)
def test_what_cannot_travel_is_named(packed: dict[str, Any], where: str) -> None:
    """The field, and the type in it."""
    with pytest.raises(EncodeError, match=f"agent loop 'mine': {where}: a value of type builtins.set"):
        check_encodes(packed, "mine")


def test_an_image_where_the_response_is_cut_off_is_refused() -> None:
    """Its row alone fails; collate would refuse the batch."""
    made = output(extra_fields={"image_spans": [[2, 3]], "multi_modal_inputs": GRID})
    assert check_output(made, "mine", 10, 2) is made
    with pytest.raises(LoopError, match="agent loop 'mine': an image at tokens 2 to 3, after 0 of 2"):
        check_output(made, "mine", 10, 1)
