"""A batch becomes rows, each with its own copy of everything."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from zagent.config import RolloutConfig
from zagent.data_proto import DataProto
from zagent.errors import InputError
from zagent.trainer.rows import Row, get_trajectory_info, rows_of

USER = [{"role": "user", "content": "hi"}]


def rows(
    columns: dict[str, Any] | None = None, meta: dict[str, Any] | None = None, n: int = 2, **rollout: Any
) -> list[Row]:
    given = {"raw_prompt": [USER] * n} | (columns or {})
    return rows_of(DataProto(non_tensor_batch=given, meta_info=meta), RolloutConfig(**rollout))


def test_a_batch_without_raw_prompt_is_refused_by_key() -> None:
    """The missing key is named."""
    with pytest.raises(InputError, match="raw_prompt"):
        rows_of(DataProto(non_tensor_batch={"prompt": ["hi"]}), RolloutConfig())


@pytest.mark.parametrize("value", [None, "hi", [], {"role": "user"}, ["hi"], float("nan")])
def test_a_row_without_messages_is_refused_by_number(value: Any) -> None:
    """A row whose raw_prompt is no list of messages is named."""
    with pytest.raises(InputError, match="row 1: raw_prompt"):
        rows({"raw_prompt": [USER, value]})


def test_no_rows_are_no_rows() -> None:
    """A batch of 0 rows works (F1)."""
    assert rows({"uid": []}, n=0) == []


def test_defaults() -> None:
    """Without optional columns: the configured agent, arange as index, no uid, sample 0, no step."""
    first, second = rows(agent="my_agent")
    assert (first.agent_name, first.uid, first.sample, first.kwargs) == ("my_agent", None, 0, {"raw_prompt": USER})
    assert second.index == 1
    assert second.trajectory == {"step": -1, "sample_index": 1, "rollout_n": 0, "validate": False}
    assert second.seed_key == (0, -1, False, "1", 0)


def test_agent_name_is_per_row() -> None:
    """A row's own agent wins; None means the default. It is not handed to run."""
    first, second = rows({"agent_name": ["tool_agent", None]})
    assert (first.agent_name, second.agent_name) == ("tool_agent", "single_turn_agent")
    assert "agent_name" not in first.kwargs


def test_agent_name_must_be_text() -> None:
    """A number is no agent."""
    with pytest.raises(InputError, match="row 0: agent_name"):
        rows({"agent_name": [3, 4]})


def test_every_other_column_reaches_run() -> None:
    """Unknown columns are passed as the row's value, as are uid and index."""
    (first, _) = rows({"uid": ["a", "b"], "index": [5, 6], "extra_info": [{"k": 1}, None], "image": ["x", "y"]})
    assert first.kwargs == {"raw_prompt": USER, "uid": "a", "index": 5, "extra_info": {"k": 1}, "image": "x"}


def test_a_column_named_sampling_params_is_refused() -> None:
    """It would collide with run's own argument."""
    with pytest.raises(InputError, match="sampling_params"):
        rows({"sampling_params": [{}, {}]})


def test_repeats_share_no_mutable_object() -> None:
    """The n repeats of a prompt each own a deep copy, and the caller's batch stays as it is."""
    batch = DataProto(
        non_tensor_batch={"raw_prompt": [[{"role": "user", "content": ["x"]}]], "extra": [np.zeros(2)], "seen": [{1}]}
    )
    first, second = rows_of(batch.repeat(2), RolloutConfig())
    first.kwargs["raw_prompt"][0]["content"].append("changed")
    first.kwargs["extra"][0] = 9
    first.kwargs["seen"].add(2)
    first.sampling_params["temperature"] = 9
    first.trajectory["step"] = 9
    assert second.kwargs["raw_prompt"] == [{"role": "user", "content": ["x"]}]
    assert second.kwargs["extra"].tolist() == [0, 0]
    assert second.kwargs["seen"] == {1}
    assert second.sampling_params["temperature"] == 1.0
    assert second.trajectory["step"] == -1
    assert batch.non_tensor_batch["raw_prompt"][0][0]["content"] == ["x"]


def test_numpy_scalars_become_python() -> None:
    """Numbers inside nested values, too; object arrays become lists (parquet gives such), numeric arrays stay."""
    deep = {"n": np.int64(3), "l": [np.float32(0.5)], "t": (np.bool_(True),), "o": np.array([{"x": np.str_("s")}])}
    (row,) = rows({"index": np.array([7]), "extra": [deep], "ids": np.array([[1, 2]])}, n=1)
    assert row.kwargs["extra"] == {"n": 3, "l": [0.5], "t": (True,), "o": [{"x": "s"}]}
    assert type(row.kwargs["extra"]["n"]) is type(row.trajectory["sample_index"]) is int
    assert type(row.kwargs["extra"]["o"][0]["x"]) is str
    assert isinstance(row.kwargs["ids"], np.ndarray)


def test_prompts_from_a_two_dimensional_array() -> None:
    """np.array over equal-length conversations is 2-d; each row is still a list of messages."""
    (first, _) = rows({"raw_prompt": np.array([USER, USER])})
    assert first.kwargs["raw_prompt"] == USER


def test_sampling_comes_from_the_configuration() -> None:
    """Temperature, top_p, top_k, repetition_penalty and logprobs, and nothing else."""
    (row,) = rows(
        n=1, temperature=0.7, top_p=0.9, top_k=5, repetition_penalty=1.1, calculate_log_probs=False
    )  # fmt: skip
    assert row.sampling_params == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "logprobs": False,
    }  # fmt: skip


def test_default_sampling() -> None:
    """The contract's defaults: 1.0, 1.0, -1, 1.0, with log-probabilities."""
    (row,) = rows(n=1)
    assert list(row.sampling_params.values()) == [1.0, 1.0, -1, 1.0, True]


def test_validation_uses_val_kwargs() -> None:
    """D25: validation is greedy by default, top_k included, and follows val_kwargs."""
    (row,) = rows(meta={"validate": True}, n=1, temperature=0.7, top_p=0.9, top_k=5)
    assert (row.sampling_params["temperature"], row.sampling_params["top_p"], row.sampling_params["top_k"]) == (
        0,
        1,
        -1,
    )
    (row,) = rows(meta={"validate": True}, n=1, val_kwargs={"temperature": 0.5, "top_p": 0.8, "top_k": 3})
    assert (row.sampling_params["temperature"], row.sampling_params["top_p"], row.sampling_params["top_k"]) == (
        0.5,
        0.8,
        3,
    )


def test_do_sample_false_is_greedy_for_that_row_only() -> None:
    """Per row; None and True leave the sampling alone; the column is not handed to run."""
    found = rows({"__do_sample__": [False, np.bool_(False), True, None]}, n=4, temperature=0.7, top_p=0.9, top_k=5)
    assert [row.sampling_params["temperature"] for row in found] == [0.0, 0.0, 0.7, 0.7]
    assert [row.sampling_params["top_k"] for row in found] == [-1, -1, 5, 5]
    assert [row.sampling_params["top_p"] for row in found] == [1.0, 1.0, 0.9, 0.9]
    assert "__do_sample__" not in found[0].kwargs


def test_samples_are_numbered_within_their_uid() -> None:
    """Rows of one uid are numbered in order, wherever they stand."""
    assert [row.sample for row in rows({"uid": ["a", "b", "a", "a", "b"]}, n=5)] == [0, 0, 1, 2, 1]


def test_without_uid_samples_are_numbered_within_their_index() -> None:
    """Also where equal indices do not stand together, unlike rollout_n."""
    found = rows({"index": [1, 3, 1, 1]}, n=4)
    assert [row.sample for row in found] == [0, 0, 1, 2]
    assert [row.trajectory["rollout_n"] for row in found] == [0, 0, 0, 1]


def test_a_row_without_uid_falls_back_to_its_index() -> None:
    """uid None in a column of uids."""
    found = rows({"uid": [None, "a"], "index": [4, 4]})
    assert [row.seed_key[3] for row in found] == ["4", "a"]


def test_a_stamped_sample_wins() -> None:
    """The caller's own numbers are kept and enter the seed key."""
    found = rows({"uid": ["a", "a"], "sample": np.array([5, 2])})
    assert [row.sample for row in found] == [5, 2]
    assert [row.seed_key for row in found] == [(0, -1, False, "a", 5), (0, -1, False, "a", 2)]


def test_a_sample_column_of_text_is_no_stamp() -> None:
    """A data set's own column of that name is a column like any other."""
    found = rows({"uid": ["a", "a"], "sample": ["x", "y"]})
    assert [row.sample for row in found] == [0, 1]
    assert found[0].kwargs["sample"] == "x"


def test_seed_keys_do_not_depend_on_the_place_in_the_batch() -> None:
    """With uids, the same prompt has the same seeds in any order of rows."""
    one = {row.uid: row.seed_key for row in rows({"uid": ["a", "b"]}, {"global_steps": 3, "validate": 1}, seed=9)}
    other = {row.uid: row.seed_key for row in rows({"uid": ["b", "a"]}, {"global_steps": 3, "validate": 1}, seed=9)}
    assert one == other
    assert one["a"] == (9, 3, True, "a", 0)


def test_global_steps_must_be_a_number() -> None:
    """The wrong type is named."""
    with pytest.raises(InputError, match="global_steps"):
        rows(meta={"global_steps": "three"})


@pytest.mark.parametrize("index", [[1, 1, 3, 3], np.array([1, 1, 3, 3])])
def test_trajectory_info_counts_consecutive_indices(index: Any) -> None:
    """[1, 1, 3, 3] -> rollout_n 0, 1, 0, 1; a later run of the same index begins again."""
    info = asyncio.run(get_trajectory_info(5, index, True))
    assert [entry["rollout_n"] for entry in info] == [0, 1, 0, 1]
    assert info[2] == {"step": 5, "sample_index": 3, "rollout_n": 0, "validate": True}
    again = asyncio.run(get_trajectory_info(5, [1, 3, 1], False))
    assert [entry["rollout_n"] for entry in again] == [0, 0, 0]


@pytest.mark.parametrize("batch", [{"raw_prompt": []}, None, [1]])
def test_what_is_no_batch_is_named(batch: Any) -> None:
    """By its type."""
    with pytest.raises(InputError, match=f"a batch is a zagent.DataProto, got {type(batch).__name__}"):
        rows_of(batch, RolloutConfig())


def test_columns_that_grew_apart_are_refused() -> None:
    """Also when they were put in after the batch was made."""
    batch = DataProto(non_tensor_batch={"raw_prompt": [USER] * 2})
    batch.non_tensor_batch["late"] = [1]  # type: ignore[assignment]
    with pytest.raises(InputError, match="raw_prompt=2, late=1"):
        rows_of(batch, RolloutConfig())


def test_a_column_name_that_is_no_text_is_refused() -> None:
    """It could be no argument of `run`."""
    batch = DataProto(non_tensor_batch={"raw_prompt": [USER], 3: [1]})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="column names must be text, got 3"):
        rows_of(batch, RolloutConfig())


def test_a_value_that_cannot_be_copied_is_named() -> None:
    """Row, column and type."""
    with pytest.raises(InputError, match="row 1: column 'lines' holds a generator"):
        rows({"lines": [1, (i for i in range(3))]})


def test_pil_images_travel_as_png_files() -> None:
    """Wherever they are in a row; their pixels come back."""
    image = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    prompt = [{"role": "user", "content": [{"type": "image", "image": image}]}]
    row, _ = rows({"raw_prompt": [prompt, USER], "extra": [{"images": [image]}, None]})
    for data in (row.kwargs["raw_prompt"][0]["content"][0]["image"], row.kwargs["extra"]["images"][0]):
        assert Image.open(io.BytesIO(data)).tobytes() == image.tobytes()
    assert prompt[0]["content"][0]["image"] is image  # type: ignore[index]


@pytest.mark.parametrize("value", ["false", 2, 0.5, [True]])
def test_validate_is_a_flag(value: Any) -> None:
    """Text that says false would count as true."""
    batch = DataProto(
        non_tensor_batch={"raw_prompt": [[{"role": "user", "content": "?"}]]}, meta_info={"validate": value}
    )
    with pytest.raises(InputError, match="validate"):
        rows_of(batch, RolloutConfig())


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, np.arange(3)])
def test_an_index_is_one_value(value: Any) -> None:
    """Named, not numpy's complaint about truth."""
    column = np.empty(1, object)
    column[0] = value
    batch = DataProto(non_tensor_batch={"raw_prompt": [[{"role": "user", "content": "?"}]], "index": column})
    with pytest.raises(InputError, match="index"):
        rows_of(batch, RolloutConfig())
