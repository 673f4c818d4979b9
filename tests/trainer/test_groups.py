"""Prompts, their samples, and batches of them; and what is counted about them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.fake_rollouts import prompts
from support.outcomes import failed, ok
from zagent.data_proto import DataProto
from zagent.errors import InputError
from zagent.trainer.groups import Group, joined, oldest_version, prompts_of, rows_to_run
from zagent.trainer.stream_stats import Meter, lengths, of_batch
from zagent.types import Outcome


def group(number: int, *outcomes: Outcome, **columns: Any) -> Group:
    rows = DataProto(non_tensor_batch={key: [value] * len(outcomes) for key, value in columns.items()})
    return Group(number, rows, outcomes)


def versioned(*versions: int, index: int = 0) -> Outcome:
    """−1: a token that was not sampled."""
    sampled = [version for version in versions if version >= 0]
    extra = {"rollout_versions": np.array(versions, np.int32), "min_global_steps": min(sampled, default=None)}
    return ok(index, response=[7] * len(versions), mask=[int(v >= 0) for v in versions], extra_fields=extra)


def test_a_batch_of_prompts_is_taken_apart() -> None:
    """Row by row; none of none."""
    found = list(prompts_of(prompts(3, number=[4, 5, 6])))
    assert [row.non_tensor_batch["number"].tolist() for row in found] == [[4], [5], [6]]
    assert list(prompts_of(DataProto())) == []
    with pytest.raises(InputError, match="got int"):
        list(prompts_of(3))


def test_rows_are_stamped_before_they_run() -> None:
    """uid, sample, and the version as `global_steps`."""
    rows = rows_to_run(prompts(1, hint=["h"]), 3, number=8, version=2)
    assert rows.non_tensor_batch["uid"].tolist() == ["8"] * 3
    assert rows.non_tensor_batch["sample"].tolist() == [0, 1, 2]
    assert rows.non_tensor_batch["hint"].tolist() == ["h"] * 3
    assert rows.meta_info == {"global_steps": 2}


def test_joined_groups_are_one_batch() -> None:
    """Numbered through; a column that a group lacks is None there."""
    outcomes, batch = joined([group(3, ok(0), ok(1), a="x"), group(1, ok(0), b="y")])
    assert [outcome.index for outcome in outcomes] == [0, 1, 2]
    assert {key: column.tolist() for key, column in batch.non_tensor_batch.items()} == {
        "a": ["x", "x", None],
        "b": [None, None, "y"],
    }


def test_the_oldest_token_of_a_group() -> None:
    """Over all rows; rows without sampled tokens say nothing."""
    assert oldest_version([versioned(3, 4), versioned(-1, 2), failed(2)]) == 2
    assert oldest_version([failed(0), versioned(-1)]) is None


def test_the_age_of_a_batch() -> None:
    """Of a row its oldest token, on average its sampled tokens; partial: rows that lived through an update."""
    found = of_batch([group(0, versioned(5, 4, -1, 4), versioned(5, 5)), group(1, failed(0))], lambda v: 5 - v)
    assert found == {
        "trajectory_staleness/mean": pytest.approx((2 / 3 + 0) / 2),
        "trajectory_staleness/max": 1,
        "partial/total_partial_num": 1,
        "partial/partial_ratio": 0.5,
        "partial/max_partial_span": 1,
    }
    assert of_batch([], lambda v: 0)["trajectory_staleness/max"] == 0


def test_lengths_of_no_rows() -> None:
    """Their number alone: 0 is no length, and NaN no JSON."""
    assert lengths([failed(0)]) == {"rows": 0}


def test_a_meter_knows_mean_and_idle_time() -> None:
    """Of what was set, for as long as it was."""
    meter = Meter(10.0)
    assert (meter.mean(), meter.idle_share()) == (0.0, 0.0)
    meter.set(4, 12.0)
    meter.set(1, 13.0)
    meter.set(0, 15.0)
    meter.set(0, 18.0)
    assert (meter.elapsed_s, meter.mean(), meter.idle_share()) == (8.0, 6 / 8, 5 / 8)
