"""What stands beside the tokens: routed experts, values that are no tensors, timing."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from support.outcomes import failed, ok
from zagent.data_proto import DataProto
from zagent.errors import InputError
from zagent.trainer.collate import collate
from zagent.types import AgentLoopMetrics, Outcome

P, R = 4, 5


def pad(*outcomes: Outcome, **kwargs: Any) -> DataProto:
    return collate(outcomes, prompt_length=P, response_length=R, pad_token_id=99, **kwargs)


# --- routed experts --------------------------------------------------------------------------------------------------


def experts(tokens: int, start: int = 1) -> np.ndarray:
    return np.arange(start, start + tokens * 2, dtype=np.int16).reshape(tokens, 1, 2)


def test_routed_experts_begin_at_the_prompt() -> None:
    """Zeros before, the engine's dtype, other rows zero."""
    batch = pad(ok(0, routed_experts=experts(3)), ok(1))
    routed = batch.batch["routed_experts"]
    assert (routed.shape, routed.dtype) == ((2, P + R, 1, 2), torch.int16)
    assert routed[0, :, 0, 0].tolist() == [0, 0, 1, 3, 5, 0, 0, 0, 0]
    assert routed[1].abs().sum() == 0


def test_routed_experts_are_cut_to_prompt_plus_width() -> None:
    """D17: longer than P+R, they fill the row to its end and no further."""
    batch = pad(ok(response=list(range(8)), routed_experts=experts(10)))
    assert batch.batch["routed_experts"][0, :, 0, 0].tolist() == [0, 0, 1, 3, 5, 7, 9, 11, 13]


def test_routed_experts_end_with_the_row() -> None:
    """Rows of tokens that the loop dropped from its response do not reach the padding, nor the empty response."""
    routed = pad(ok(0, routed_experts=experts(6)), ok(1, response=(), routed_experts=experts(6))).batch[
        "routed_experts"
    ]
    assert routed[0, :, 0, 0].tolist() == [0, 0, 1, 3, 5, 7, 0, 0, 0]
    assert routed[1, :, 0, 0].tolist() == [0, 0, 1, 3, 0, 0, 0, 0, 0]


def test_routed_experts_of_mixed_rows() -> None:
    """Failed rows and rows without experts are zero; of two dtypes the one that holds both; 100 rows are no limit."""
    wide = experts(3).astype(np.int32) + 70_000
    rows = [failed(0), ok(1), *(ok(i, routed_experts=experts(3)) for i in range(2, 102)), ok(102, routed_experts=wide)]
    routed = pad(*rows).batch["routed_experts"]
    assert routed.dtype == torch.int32
    assert not routed[:2].any()
    assert all((routed[i] == routed[2]).all() for i in range(3, 102))
    assert routed[102, 2:5, 0, 0].tolist() == wide[:, 0, 0].tolist()


@pytest.mark.parametrize("shape", [(2, 3, 2), (2, 1, 3), (2, 2), (2,)])
def test_routed_experts_of_two_shapes_are_refused(shape: tuple[int, ...]) -> None:
    """Both rows, their shapes and the rule are named."""
    said = rf"row 4: routed_experts of shape {re.escape(str(shape))}, row 2's \(2, 1, 2\): must be \[tokens, layers"
    with pytest.raises(InputError, match=said):
        pad(ok(0), ok(2, routed_experts=experts(2)), ok(4, routed_experts=np.zeros(shape, np.int16)))


def test_routed_experts_have_three_dimensions() -> None:
    """Rows that agree on another form are refused all the same."""
    with pytest.raises(InputError, match=r"row 0: routed_experts of shape \(2, 2\)"):
        pad(ok(0, routed_experts=np.zeros((2, 2), np.int16)))


# --- values that are no tensors --------------------------------------------------------------------------------------


def test_standard_extra_fields_are_always_there() -> None:
    """D23: rows of different loops concatenate."""
    single, tool = pad(ok()), pad(ok(extra_fields={"turn_scores": [1.0], "tool_rewards": [0.5]}))
    assert set(single.non_tensor_batch) == set(tool.non_tensor_batch)
    assert single.non_tensor_batch["turn_scores"].tolist() == [None]
    single.meta_info.pop("timing")
    tool.meta_info.pop("timing")
    assert len(DataProto.concat([single, tool])) == 2


def test_extra_fields_and_reward_info_are_united_over_rows() -> None:
    """Every key of any row is a column; absent is None; lists stay whole; versions are a tensor."""
    batch = pad(
        ok(0, reward_score=1.0, extra_fields={"reward_extra_info": {"acc": 1}, "turn_scores": [1, 2]}),
        ok(1, extra_fields={"reward_extra_info": {"fmt": 0.5}, "plan": "b", "turn_scores": [3, 4]}),
        ok(3, extra_fields={"rollout_versions": [1, 1]}),
        failed(2),
    )
    columns = batch.non_tensor_batch
    assert columns["acc"].tolist() == [1, None, None, None]
    assert columns["fmt"].tolist() == [None, 0.5, None, None]
    assert columns["plan"].tolist() == [None, "b", None, None]
    assert columns["turn_scores"].shape == (4,)
    assert "rollout_versions" not in columns


def test_tool_rewards_and_turn_scores_are_handed_on_unchanged() -> None:
    """Lists of any lengths, equal ones too; a row without has None."""
    fields = [{"tool_rewards": [0.5, 1.0], "turn_scores": [1.0]}, {"tool_rewards": [0.0, 2.0]}, {}]
    columns = pad(*(ok(i, extra_fields=given) for i, given in enumerate(fields)), failed(3)).non_tensor_batch
    assert columns["tool_rewards"].tolist() == [[0.5, 1.0], [0.0, 2.0], None, None]
    assert columns["turn_scores"].tolist() == [[1.0], None, None, None]


def test_rows_that_could_not_be_scored() -> None:
    """`reward.on_error=none`: no score, a row of zeros, and the reason in a column (D14, D16)."""
    info = {"reward_extra_info": {"reward_error": "mine: ValueError: no"}}
    batch = pad(ok(0, reward_score=0.5, extra_fields={"reward_extra_info": {"acc": 1}}), ok(1, extra_fields=info))
    assert batch.batch["rm_scores"].tolist() == [[0.0, 0.5, 0.0, 0.0, 0.0], [0.0] * 5]
    assert batch.non_tensor_batch["reward_score"].tolist() == [0.5, None]
    assert batch.non_tensor_batch["reward_error"].tolist() == [None, "mine: ValueError: no"]
    assert batch.meta_info["reward_extra_keys"] == ["acc", "reward_error"]


def test_reward_extra_keys_only_beside_scores() -> None:
    """D16: absent where no row has a score, the sorted union where one has."""
    info = {"reward_extra_info": {"b": 1, "a": 2}}
    assert "reward_extra_keys" not in pad(ok(extra_fields=info)).meta_info
    assert pad(ok(0, reward_score=1.0), ok(1, extra_fields=info)).meta_info["reward_extra_keys"] == ["a", "b"]


def test_num_turns_are_int32() -> None:
    """A failed row has none."""
    turns = pad(ok(0, num_turns=4), failed(1)).non_tensor_batch["__num_turns__"]
    assert (turns.tolist(), turns.dtype) == ([4, 0], np.int32)


def test_the_input_non_tensors_are_handed_on() -> None:
    """Rows are matched by index, dtypes stay, also where only some rows are collated."""
    given_batch = DataProto(non_tensor_batch={"raw_prompt": [["a"], ["b"], ["c"]], "index": np.array([5, 6, 7])})
    columns = pad(ok(2), ok(0), batch=given_batch).non_tensor_batch
    assert columns["raw_prompt"].tolist() == [["a"], ["c"]]
    assert (columns["index"].tolist(), columns["index"].dtype) == ([5, 7], np.int64)


def test_the_loops_value_wins_over_the_inputs() -> None:
    """A key of extra_fields that the input has too: the loop's where it gives one, else the input's."""
    given_batch = DataProto(non_tensor_batch={"tag": ["in0", "in1"], "error": ["x", "y"]})
    columns = pad(ok(0, extra_fields={"tag": "loop"}), ok(1), batch=given_batch).non_tensor_batch
    assert columns["tag"].tolist() == ["loop", "in1"]
    assert columns["error"].tolist() == [None, None]


@pytest.mark.parametrize("outcomes", [[ok(0), ok(0)], [ok(1)], [ok(-1)]])
def test_outcomes_of_another_batch_are_refused(outcomes: list[Outcome]) -> None:
    """An index that the input does not have, or twice the same one."""
    with pytest.raises(InputError, match="not rows of a batch of 1"):
        pad(*outcomes, batch=DataProto(non_tensor_batch={"uid": ["a"]}))


def test_multi_modal_inputs_are_a_column_if_any_row_has_some() -> None:
    """Absent where none has."""
    assert "multi_modal_inputs" not in pad(ok()).non_tensor_batch
    columns = pad(ok(0), ok(1, extra_fields={"multi_modal_inputs": {"pixels": 1}})).non_tensor_batch
    assert columns["multi_modal_inputs"].tolist() == [None, {"pixels": 1}]


# --- timing ----------------------------------------------------------------------------------------------------------


def test_timing_over_all_rows() -> None:
    """Minimum, maximum and mean per activity, over failed rows too; the slowest row by the sum of three times."""
    fast = AgentLoopMetrics(generate_sequences=4.0, num_preempted=2)
    slow = AgentLoopMetrics(generate_sequences=2.0, tool_calls=2.0, compute_score=1.0)
    timing = pad(ok(0, metrics=fast), ok(1, prompt=[1], response=[1, 2, 3], metrics=slow), failed(2)).meta_info[
        "timing"
    ]
    assert timing == {
        "agent_loop/generate_sequences/min": 0.0,
        "agent_loop/generate_sequences/max": 4.0,
        "agent_loop/generate_sequences/mean": 2.0,
        "agent_loop/tool_calls/min": 0.0,
        "agent_loop/tool_calls/max": 2.0,
        "agent_loop/tool_calls/mean": pytest.approx(2 / 3),
        "agent_loop/compute_score/min": 0.0,
        "agent_loop/compute_score/max": 1.0,
        "agent_loop/compute_score/mean": pytest.approx(1 / 3),
        "agent_loop/num_preempted/min": -1,
        "agent_loop/num_preempted/max": 2,
        "agent_loop/num_preempted/mean": 0.0,
        "agent_loop/slowest/generate_sequences": 2.0,
        "agent_loop/slowest/tool_calls": 2.0,
        "agent_loop/slowest/compute_score": 1.0,
        "agent_loop/slowest/num_preempted": -1,
        "agent_loop/slowest/prompt_length": 1,
        "agent_loop/slowest/response_length": 3,
    }


def test_timing_values_are_plain_numbers() -> None:
    """They go into JSON loggers as they are."""
    assert {type(value) for value in pad(ok()).meta_info["timing"].values()} <= {int, float}


def test_each_rows_status_is_a_column() -> None:
    """An aborted row never passes for a finished one (pitfall H5)."""
    aborted = ok(1)
    rows = [ok(0), Outcome(1, "u1", 0, "partial", aborted.output), failed(2)]
    assert list(collate(rows).non_tensor_batch["status"]) == ["ok", "partial", "failed"]
