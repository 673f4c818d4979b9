"""A group: one prompt, sampled ``n`` times, trained on together. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zagent.data_proto import DataProto
from zagent.errors import InputError
from zagent.types import Outcome


@dataclass(frozen=True, slots=True)
class Group:
    """Finished: one row and one outcome per sample, in order."""

    number: int
    rows: DataProto
    outcomes: tuple[Outcome, ...]


def checked(batch: Any) -> DataProto:
    """``batch``, as a data loader gave it. Raises `InputError` for what is none; other libraries have a `DataProto`."""
    if not isinstance(getattr(batch, "non_tensor_batch", None), Mapping):
        raise InputError(f"prompts come as zagent.DataProto, got {type(batch).__name__}")
    found: DataProto = batch
    return found


def prompts_of(batch: Any) -> Iterator[DataProto]:
    """Each row of ``batch`` as a batch of its own. Raises `InputError` for what is no batch."""
    for i in range(len(checked(batch))):
        yield DataProto(non_tensor_batch={key: column[i : i + 1] for key, column in batch.non_tensor_batch.items()})


def rows_to_run(prompt: DataProto, n: int, number: int, version: int) -> DataProto:
    """The ``n`` rows of a group, stamped: `uid` (the prompt's own, or the group's number), `sample`, and the version
    that it starts with as `global_steps`."""
    rows = prompt.repeat(n)
    columns = {"uid": [str(number)] * n, **rows.non_tensor_batch, "sample": list(range(n))}
    return DataProto(non_tensor_batch=columns, meta_info={"global_steps": version})


def joined(groups: Sequence[Group]) -> tuple[list[Outcome], DataProto]:
    """The rows of all ``groups`` as one batch, and their outcomes, numbered through. A column that only some groups
    have is None in the others."""
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    keys = dict.fromkeys(key for group in groups for key in group.rows.non_tensor_batch)
    columns = {key: [value for group in groups for value in _values(group.rows, key)] for key in keys}
    numbered = [dataclasses.replace(outcome, index=i) for i, outcome in enumerate(outcomes)]
    return numbered, DataProto(non_tensor_batch=columns)


def _values(rows: DataProto, key: str) -> list[Any]:
    column = rows.non_tensor_batch.get(key)
    return [None] * len(rows) if column is None else list(column)


def oldest_version(outcomes: Sequence[Outcome]) -> int | None:
    """Of all tokens of the rows; None: none was sampled."""
    versions = [version for outcome in outcomes if (version := _field(outcome, "min_global_steps")) is not None]
    return min(versions, default=None)


def _field(outcome: Outcome, key: str) -> Any:
    return None if outcome.output is None else outcome.output.extra_fields.get(key)


def zero_variance(outcomes: Sequence[Outcome]) -> bool:
    """Whether all rows of a group have the same reward: their advantages are zero, and nothing can be learnt from
    them. A group with rows that have none is kept."""
    rewards = {None if outcome.output is None else outcome.output.reward_score for outcome in outcomes}
    return len(rewards) == 1 and None not in rewards
