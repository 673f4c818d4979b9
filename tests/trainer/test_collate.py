"""Outcomes become padded tensors, compared with a reference that is nothing but loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.outcomes import failed, ok
from zagent.data_proto import DataProto
from zagent.errors import InputError
from zagent.trainer.collate import collate
from zagent.types import AgentLoopOutput, Outcome

P, R, PAD = 4, 5, 99


def pad(*outcomes: Outcome, **kwargs: Any) -> DataProto:
    return collate(outcomes, **{"prompt_length": P, "response_length": R, "pad_token_id": PAD} | kwargs)


def row(batch: DataProto, key: str, i: int = 0) -> list[Any]:
    return batch.batch[key][i].tolist()


# --- the reference ---------------------------------------------------------------------------------------------------


def reference_row(outcome: Outcome) -> dict[str, list[float]]:
    """One row, token by token, in the words of the contract."""
    out = outcome.output
    prompt = [] if out is None else list(out.prompt_ids)
    response = [] if out is None else list(out.response_ids)[:R]
    found: dict[str, list[float]] = {key: [] for key in ("responses", "response_mask", "logp", "versions", "scores")}
    prompts = [PAD] * (P - len(prompt)) + prompt
    attention = [0] * (P - len(prompt)) + [1] * len(prompt)
    for t in range(R):
        real = t < len(response)
        sampled = out is not None and real and out.response_mask[t] == 1
        found["responses"].append(response[t] if real else PAD)
        found["response_mask"].append(1 if sampled else 0)
        attention.append(1 if real else 0)
        has_logp = sampled and out is not None and out.response_logprobs is not None
        found["logp"].append(out.response_logprobs[t] if has_logp and out is not None else 0.0)
        has_version = sampled and out is not None and "rollout_versions" in out.extra_fields
        found["versions"].append(out.extra_fields["rollout_versions"][t] if has_version and out is not None else -1)
        scored = out is not None and out.reward_score is not None and real and t == len(response) - 1
        found["scores"].append(out.reward_score if scored and out is not None and out.reward_score is not None else 0.0)
    positions, seen = [], 0
    for bit in attention:
        seen += bit
        positions.append(max(seen - 1, 0))
    return {
        "prompts": prompts,
        "responses": found["responses"],
        "response_mask": found["response_mask"],
        "input_ids": prompts + found["responses"],
        "attention_mask": attention,
        "position_ids": positions,
        "rollout_log_probs": found["logp"],
        "rollout_versions": found["versions"],
        "rm_scores": found["scores"],
    }


def expected_keys(outcomes: list[Outcome]) -> set[str]:
    keys = {"prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rollout_versions"}
    outputs = [outcome.output for outcome in outcomes if outcome.output is not None]
    keys |= {"rollout_log_probs"} if any(o.response_logprobs is not None for o in outputs) else set()
    return keys | ({"rm_scores"} if any(o.reward_score is not None for o in outputs) else set())


@st.composite
def random_outcome(draw: st.DrawFn, index: int) -> Outcome:
    if draw(st.integers(0, 4)) == 0:
        return failed(index)
    ids = st.integers(0, 50_000)
    prompt = draw(st.lists(ids, max_size=P))
    response = draw(st.lists(ids, max_size=R + 2))
    mask = draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response)))
    floats = st.floats(-20, 0, width=32)
    logp = draw(st.none() | st.lists(floats, min_size=len(response), max_size=len(response)))
    extra: dict[str, Any] = {}
    if draw(st.booleans()):
        versions = draw(st.lists(st.integers(0, 9), min_size=len(response), max_size=len(response)))
        extra["rollout_versions"] = np.array(versions, np.int64)
    if draw(st.booleans()):  # the hot path: arrays
        prompt, response, mask = (np.array(v, np.int32) for v in (prompt, response, mask))
        logp = None if logp is None else np.array(logp, np.float32)
    score = draw(st.none() | st.floats(-5, 5, width=32))
    return ok(index, prompt, response, mask, response_logprobs=logp, reward_score=score, extra_fields=extra)


@st.composite
def random_outcomes(draw: st.DrawFn) -> list[Outcome]:
    count = draw(st.integers(0, 5))
    return draw(st.permutations([draw(random_outcome(i)) for i in range(count)]))


@settings(max_examples=200, deadline=None)
@given(random_outcomes())
def test_tensors_equal_the_reference(outcomes: list[Outcome]) -> None:
    """Every tensor equals the loop-built one, in order of index, with the contract's dtype, shape and presence."""
    batch = pad(*outcomes)
    assert set(batch.batch) == expected_keys(outcomes)
    expected = [reference_row(outcome) for outcome in sorted(outcomes, key=lambda o: o.index)]
    widths = {"prompts": P, "input_ids": P + R, "attention_mask": P + R, "position_ids": P + R}
    for key, tensor in batch.batch.items():
        floats = key in ("rollout_log_probs", "rm_scores")
        assert tensor.dtype == (torch.float32 if floats else torch.int64)
        assert tensor.shape == (len(outcomes), widths.get(key, R))
        assert tensor.tolist() == [made[key] for made in expected]


# --- rules one by one ------------------------------------------------------------------------------------------------


def test_padding_by_hand() -> None:
    """One row written out: left and right padding, positions 0 on the left and constant on the right."""
    batch = pad(ok(prompt=[7, 8], response=[1, 2, 3]))
    assert row(batch, "input_ids") == [99, 99, 7, 8, 1, 2, 3, 99, 99]
    assert row(batch, "attention_mask") == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert row(batch, "position_ids") == [0, 0, 0, 1, 2, 3, 4, 4, 4]


def test_tool_tokens_are_attended_but_not_trained() -> None:
    """D19: attention 1, response_mask 0, log-probability 0.0 and version −1 on a token the model did not sample."""
    versions = {"rollout_versions": [5, 5, 6]}
    batch = pad(ok(response=[1, 2, 3], mask=[1, 0, 1], response_logprobs=[-1.0, -9.0, -2.0], extra_fields=versions))
    assert row(batch, "attention_mask") == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert row(batch, "response_mask") == [1, 0, 1, 0, 0]
    assert row(batch, "rollout_log_probs") == [-1.0, 0.0, -2.0, 0.0, 0.0]
    assert row(batch, "rollout_versions") == [5, -1, 6, -1, -1]


def test_log_probs_are_there_if_any_row_has_them() -> None:
    """Not only if row 0 has them."""
    batch = pad(ok(0), ok(1, response_logprobs=[-1.0, -2.0]))
    assert batch.batch["rollout_log_probs"].tolist() == [[0.0] * 5, [-1.0, -2.0, 0.0, 0.0, 0.0]]


def test_an_empty_response_is_padding_without_reward() -> None:
    """D13, D14: no masks, no score at −1, the prompt is not its own response; the score stays as a value."""
    batch = pad(ok(0, response=[], reward_score=1.0, response_logprobs=[]), ok(1, reward_score=0.5))
    assert row(batch, "responses") == [PAD] * R
    assert row(batch, "response_mask") == [0] * R
    assert row(batch, "attention_mask") == [0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert row(batch, "rm_scores") == [0.0] * R
    assert batch.non_tensor_batch["reward_score"].tolist() == [1.0, 0.5]


def test_the_score_lies_on_the_last_real_token() -> None:
    """Also where that token is a tool's, and at R where the response is cut; a row without score is zero."""
    tool = ok(0, response=[1, 2], mask=[1, 0], reward_score=2.0)
    batch = pad(tool, ok(1), ok(2, reward_score=4.0))
    assert batch.batch["rm_scores"].tolist() == [[0, 2, 0, 0, 0], [0] * 5, [0, 4, 0, 0, 0]]
    long = pad(ok(response=list(range(8)), reward_score=3.0))
    assert row(long, "rm_scores") == [0, 0, 0, 0, 3.0]


def test_a_long_response_is_cut_to_the_width() -> None:
    """Ids, mask, log-probabilities and versions beyond R are dropped together."""
    values = list(range(8))
    batch = pad(
        ok(response=values, response_logprobs=[-float(v) for v in values], extra_fields={"rollout_versions": values})
    )
    assert row(batch, "responses") == row(batch, "rollout_versions") == [0, 1, 2, 3, 4]
    assert row(batch, "rollout_log_probs") == [0, -1, -2, -3, -4]
    assert row(batch, "response_mask") == [1] * 5


def test_a_prompt_beyond_the_width_is_refused() -> None:
    """The worker dealt with overflow; what still is too long names its row."""
    with pytest.raises(InputError, match="row 3: prompt of 5 tokens exceeds 4"):
        pad(ok(3, prompt=[1, 2, 3, 4, 5]))


def test_a_failed_row_is_all_padding_and_says_why() -> None:
    """Zero masks, no reward, the error's text; the others are untouched (B6)."""
    batch = pad(failed(1), ok(0, reward_score=1.0), Outcome(2, "u2", 0, "cancelled"))
    for key, value in {
        "prompts": PAD,
        "responses": PAD,
        "response_mask": 0,
        "attention_mask": 0,
        "position_ids": 0,
    }.items():
        assert set(row(batch, key, 1)) == set(row(batch, key, 2)) == {value}
    assert batch.non_tensor_batch["error"].tolist() == [None, "LoopError: it broke", "cancelled"]
    assert batch.non_tensor_batch["reward_score"].tolist() == [1.0, None, None]
    assert batch.meta_info["failed"] == 2


def test_a_partial_row_counts_as_a_row() -> None:
    """What an aborted trajectory has is kept."""
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])
    batch = pad(Outcome(0, "u", 0, "partial", output))
    assert row(batch, "responses")[0] == 2
    assert batch.meta_info["failed"] == 0


def test_rows_are_in_input_order() -> None:
    """Whatever order they finished in."""
    batch = pad(ok(2, response=[2]), ok(0, response=[0]), ok(1, response=[1]))
    assert batch.batch["responses"][:, 0].tolist() == [0, 1, 2]


def test_no_rows_give_a_well_formed_batch() -> None:
    """F1: right widths, every standard column, complete metrics."""
    given_batch = DataProto(non_tensor_batch={"raw_prompt": [], "uid": []})
    batch = pad(batch=given_batch)
    assert batch.batch["input_ids"].shape == (0, P + R)
    assert len(batch) == 0
    assert {"raw_prompt", "uid", "error", "reward_score", "__num_turns__", "turn_scores"} <= set(batch.non_tensor_batch)
    assert batch.meta_info["failed"] == 0
    assert set(batch.meta_info["timing"]) == set(pad(ok()).meta_info["timing"])


def test_without_widths_the_longest_row_decides() -> None:
    """D26: `collate(outcomes)` pads no further than it must."""
    batch = collate([ok(0, prompt=[1], response=[1, 2, 3]), ok(1, prompt=[1, 2], response=[])])
    assert (batch.batch["prompts"].shape, batch.batch["responses"].shape) == ((2, 2), (2, 3))
    assert collate([]).batch["input_ids"].shape == (0, 0)


def test_outcomes_are_not_changed() -> None:
    """The same outcomes collate twice to the same batch, and keep their versions."""
    outcome = ok(extra_fields={"rollout_versions": [1, 2], "messages": [1]})
    assert row(pad(outcome), "rollout_versions") == row(pad(outcome), "rollout_versions")
    assert outcome.output is not None
    assert set(outcome.output.extra_fields) == {"rollout_versions", "messages"}


def test_versions_that_do_not_fit_the_response_are_refused() -> None:
    """The row and both lengths are named."""
    with pytest.raises(InputError, match="row 0: rollout_versions has 1 entries, response_ids 2"):
        pad(ok(extra_fields={"rollout_versions": [1]}))
