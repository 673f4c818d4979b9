"""DataProto: columns of one length, as verl's trainers use them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from zagent.data_proto import DataProto
from zagent.errors import InputError


def make(rows: int = 3, **meta: object) -> DataProto:
    return DataProto(
        {"ids": torch.arange(rows * 2).reshape(rows, 2)},
        {"uid": [f"u{i}" for i in range(rows)], "score": np.arange(rows, dtype=np.float32)},
        meta,
    )


def uids(batch: DataProto) -> list[str]:
    return batch.non_tensor_batch["uid"].tolist()


def test_importing_and_using_arrays_loads_no_torch() -> None:
    """A batch without tensors never imports torch."""
    code = (
        "import sys; from zagent.data_proto import DataProto\n"
        "b = DataProto(non_tensor_batch={'raw_prompt': [[{}], [{}]]}).repeat(2)\n"
        "b = DataProto.concat([*b.chunk(3), b[[0]]]).union(DataProto(meta_info={'a': 1})).select()\n"
        "assert len(b) == 5 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_batch_may_be_none_or_empty() -> None:
    """Without any column a batch has no rows."""
    assert len(DataProto()) == len(DataProto(None, None, None)) == len(DataProto({}, {}, {})) == 0


def test_lists_of_equal_length_lists_stay_one_dimensional() -> None:
    """Lists become 1-d object arrays even where numpy would build a 2-d one."""
    column = DataProto(non_tensor_batch={"raw_prompt": [[1, 2], [3, 4]]}).non_tensor_batch["raw_prompt"]
    assert column.shape == (2,)
    assert column.dtype == object
    assert column[1] == [3, 4]


def test_a_length_mismatch_names_keys_and_lengths() -> None:
    """Columns of different lengths are refused with each key and its length."""
    with pytest.raises(InputError, match="ids=2, uid=3"):
        DataProto({"ids": torch.zeros(2, 1)}, {"uid": ["a", "b", "c"]})


@pytest.mark.parametrize("value", [3, "text", None, np.float32(1), np.array(1)])
def test_a_value_that_is_no_column_is_refused_by_name(value: object) -> None:
    """A scalar or text is no column of values."""
    with pytest.raises(InputError, match=r"non_tensor_batch\['uid'\]"):
        DataProto(non_tensor_batch={"uid": value})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [np.zeros(2), [1, 2], torch.tensor(1)])
def test_batch_holds_only_tensors_with_rows(value: object) -> None:
    """Arrays, lists and 0-d tensors do not belong into `batch`."""
    with pytest.raises(InputError, match=r"batch\['ids'\]"):
        DataProto({"ids": value})


def test_an_int_gives_an_item() -> None:
    """One row has its tensors, its values and the batch's meta_info."""
    item = make(3, step=7)[-1]
    assert item.batch["ids"].tolist() == [4, 5]
    assert item.non_tensor_batch == {"uid": "u2", "score": 2.0}
    assert item.meta_info == {"step": 7}


@pytest.mark.parametrize("row", [3, -4])
def test_a_row_beyond_the_end_is_an_index_error(row: int) -> None:
    """Indexing has Python's limits."""
    with pytest.raises(IndexError):
        make(3)[row]


def test_iteration_gives_each_item_once() -> None:
    """Iterating ends after the last row."""
    assert [item.non_tensor_batch["uid"] for item in make(3)] == ["u0", "u1", "u2"]


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        (slice(1, None), [1, 2, 3]),
        (slice(None, None, 2), [0, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        ([2, 0, 0, -1], [2, 0, 0, 3]),
        ([], []),
        (np.array([1, 3], np.int32), [1, 3]),
        (np.array([True, False, False, True]), [0, 3]),
        ([False, True, False, False], [1]),
        (torch.tensor([3, 1]), [3, 1]),
        (torch.tensor([True, True, False, False]), [0, 1]),
    ],
)
def test_slices_lists_arrays_and_masks_give_batches(key: object, rows: list[int]) -> None:
    """Every way of choosing several rows takes all columns along and keeps dtypes."""
    chosen = make(4, step=1)[key]
    assert uids(chosen) == [f"u{i}" for i in rows]
    assert chosen.batch["ids"].tolist() == [[2 * i, 2 * i + 1] for i in rows]
    assert chosen.non_tensor_batch["score"].dtype == np.float32
    assert chosen.meta_info == {"step": 1}


@pytest.mark.parametrize("key", ["uid", 1.5, [[0, 1]]])
def test_other_keys_are_a_type_error(key: object) -> None:
    """Rows are not chosen by name, fraction or table."""
    with pytest.raises(TypeError, match="rows are chosen by"):
        make(4)[key]


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 60, 61])
@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_chunks_differ_by_at_most_one_and_concat_restores(rows: int, chunks: int) -> None:
    """Any number of rows splits into exactly the chunks asked for, in order, also fewer rows than chunks (F1)."""
    batch = make(rows)
    parts = batch.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks
    assert max(sizes) - min(sizes) <= 1
    whole = DataProto.concat(parts)
    assert uids(whole) == uids(batch)
    assert torch.equal(whole.batch["ids"], batch.batch["ids"])


def test_chunk_refuses_zero() -> None:
    """There is no splitting into no parts."""
    with pytest.raises(InputError, match="at least 1"):
        make().chunk(0)


def test_concat_of_different_columns_names_them() -> None:
    """Parts must have the same columns."""
    with pytest.raises(InputError, match="extra"):
        DataProto.concat([make(1), DataProto({"ids": torch.zeros(1, 2)}, {"uid": ["x"], "score": [1], "extra": [2]})])


def test_concat_of_nothing_is_refused() -> None:
    """No parts have no columns to know."""
    with pytest.raises(InputError, match="at least one"):
        DataProto.concat([])


def test_concat_unites_reward_keys_and_sums_failures() -> None:
    """Facts that add up are added up (D16: an absent or empty list never clashes)."""
    parts = [make(1, failed=1, reward_extra_keys=["b"]), make(1), make(1, failed=2, reward_extra_keys=["a", "b"])]
    assert DataProto.concat(parts).meta_info == {"failed": 3, "reward_extra_keys": ["a", "b"]}


def test_concat_refuses_a_fact_with_two_values() -> None:
    """Other meta_info must agree; the key is named."""
    with pytest.raises(InputError, match="timing"):
        DataProto.concat([make(1, timing={"a": 1}), make(1, timing={"a": 2})])


def test_concat_keeps_lists_as_objects() -> None:
    """Object columns of equal-length lists stay 1-d."""
    part = DataProto(non_tensor_batch={"raw_prompt": [[1, 2]]})
    assert DataProto.concat([part, part]).non_tensor_batch["raw_prompt"].shape == (2,)


def test_union_adds_columns_in_place() -> None:
    """The batch gains the other's columns and meta_info and is returned, as in verl."""
    batch = make(2, step=1)
    result = batch.union(DataProto({"mask": torch.ones(2, 1)}, {"acc": [0, 1]}, {"timing": {}}))
    assert result is batch
    assert set(batch.batch) == {"ids", "mask"}
    assert set(batch.non_tensor_batch) == {"uid", "score", "acc"}
    assert batch.meta_info == {"step": 1, "timing": {}}


def test_union_accepts_equal_values() -> None:
    """What both have may be equal, NaN and nested arrays included."""
    nested = {"x": [np.array([1.0, np.nan]), {"y": (1, torch.tensor([float("nan")]))}], "z": float("nan")}
    again = {"x": [np.array([1.0, np.nan]), {"y": (1, torch.tensor([float("nan")]))}], "z": float("nan")}
    batch = DataProto({"m": torch.tensor([True])}, {"n": [nested]}, {"m": nested})
    batch.union(DataProto({"m": torch.tensor([True])}, {"n": [again]}, {"m": again}))
    assert len(batch) == 1


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (DataProto({"ids": torch.zeros(3, 2, dtype=torch.int64)}), r"^batch\['ids'\]"),
        (DataProto({"ids": torch.arange(6).reshape(3, 2).float()}), r"^batch\['ids'\]"),
        (DataProto(None, {"uid": ["u0", "u1", "x"]}), r"non_tensor_batch\['uid'\]"),
        (DataProto(None, None, {"step": 2}), r"meta_info\['step'\]"),
        (DataProto(None, {"new": [1]}), "3 rows with 1"),
    ],
)
def test_union_refuses_different_values_and_changes_nothing(other: DataProto, name: str) -> None:
    """A conflict names its key and leaves the batch as it was."""
    batch = make(3, step=1)
    with pytest.raises(InputError, match=name):
        batch.union(other)
    assert set(batch.batch) == {"ids"}
    assert batch.meta_info == {"step": 1}


def test_union_unites_reward_extra_keys() -> None:
    """D16: different lists of reward_extra_keys are no conflict."""
    batch = make(1, reward_extra_keys=[]).union(DataProto(meta_info={"reward_extra_keys": ["acc"]}))
    assert batch.meta_info == {"reward_extra_keys": ["acc"]}


@pytest.mark.parametrize(("interleave", "order"), [(True, [0, 0, 1, 1]), (False, [0, 1, 0, 1])])
def test_repeat(interleave: bool, order: list[int]) -> None:
    """Repeats stand together, or batch after batch."""
    batch = make(2).repeat(2, interleave=interleave)
    assert uids(batch) == [f"u{i}" for i in order]
    assert batch.batch["ids"][:, 0].tolist() == [2 * i for i in order]


def test_select_takes_named_columns() -> None:
    """None means all of that kind; an empty list none."""
    batch = make(2, step=1).select(non_tensor_batch_keys=["uid"], meta_info_keys=[])
    assert set(batch.batch) == {"ids"}
    assert set(batch.non_tensor_batch) == {"uid"}
    assert batch.meta_info == {}


def test_select_deepcopy_shares_nothing() -> None:
    """A deep selection can be changed without the original noticing."""
    batch = make(2)
    batch.select(deepcopy=True).batch["ids"].zero_()
    assert batch.batch["ids"].sum() > 0


def test_pop_moves_columns() -> None:
    """Popped columns are gone here and present there; what is not named stays."""
    batch = make(2, step=1)
    taken = batch.pop(batch_keys=["ids"], non_tensor_batch_keys=["uid"], meta_info_keys=["step"])
    assert set(batch.batch) | set(batch.non_tensor_batch) | set(batch.meta_info) == {"score"}
    assert set(taken.batch) | set(taken.non_tensor_batch) | set(taken.meta_info) == {"ids", "uid", "step"}


def test_pop_of_an_unknown_key_names_it_and_takes_nothing() -> None:
    """A missing key is an error before anything is taken."""
    batch = make(2)
    with pytest.raises(InputError, match="'nope'"):
        batch.pop(batch_keys=["ids"], non_tensor_batch_keys=["nope"])
    assert "ids" in batch.batch


def test_from_single_dict_sorts_tensors_from_values() -> None:
    """A data loader's dict is split by type."""
    batch = DataProto.from_single_dict({"ids": torch.zeros(2, 1), "uid": ["a", "b"]}, meta_info={"step": 1})
    assert (set(batch.batch), set(batch.non_tensor_batch), batch.meta_info) == ({"ids"}, {"uid"}, {"step": 1})


def test_from_dict_has_verls_names() -> None:
    """`tensors`, `non_tensors` and `meta_info` are taken by name."""
    batch = DataProto.from_dict(tensors={"ids": torch.zeros(2, 1)}, non_tensors={"uid": [1, 2]}, meta_info={"a": 1})
    assert len(batch) == 2


def test_to_moves_tensors() -> None:
    """The tensors follow the device; values stay."""
    batch = make(2).to("meta")
    assert batch.batch["ids"].device.type == "meta"


def test_slices_do_not_share_meta_info() -> None:
    """Writing into a part's meta_info does not reach the whole."""
    batch = make(2, step=1)
    batch[:1].meta_info["step"] = 2
    assert batch.meta_info == {"step": 1}
