"""From a batch to its rows: what each agent loop is called with. Pure."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zagent.config import RolloutConfig
from zagent.data_proto import DataProto
from zagent.errors import InputError
from zagent.images import is_pil_image, png

#: Columns that steer zagent and are not handed to `run`.
STEERING = ("agent_name", "__do_sample__")


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory to run. Everything in it is this row's own copy, as plain Python values and numpy arrays.

    ``index`` is the position in the batch, ``sample`` the number among the rows of one uid. ``kwargs`` go to `run`.
    ``trajectory`` is `{step, sample_index, rollout_n, validate}`. ``seed_key`` is (rollout seed, global steps,
    validate, uid or index, sample); call k of the trajectory is seeded with `seed_for(*row.seed_key, k)`.
    """

    index: int
    uid: Any
    sample: int
    agent_name: str
    kwargs: dict[str, Any]
    sampling_params: dict[str, Any]
    trajectory: dict[str, Any]
    seed_key: tuple[int, int, bool, str, int]


def rows_of(batch: DataProto, rollout: RolloutConfig) -> list[Row]:
    """The rows of ``batch`` in order.

    Raises:
        InputError: not a `DataProto`, or columns of different lengths; no column `raw_prompt`, or a row's is not a list
            of chat messages; an agent_name that is no text; an index that is no single value; a value that cannot be
            copied; `validate` or `global_steps` of another type; a column
            `sampling_params`, which `run` gets from the configuration.
    """
    _check_columns(batch)
    if "sampling_params" in batch.non_tensor_batch:
        raise InputError("non_tensor_batch['sampling_params'] is reserved: sampling comes from the configuration")
    if "raw_prompt" not in batch.non_tensor_batch:
        known = ", ".join(batch.non_tensor_batch) or "none"
        raise InputError(f"the batch has no non_tensor_batch['raw_prompt'] (columns: {known})")
    step = _int("global_steps", batch.meta_info.get("global_steps", -1))
    validate = _flag("validate", batch.meta_info.get("validate", False))
    index = _column(batch, "index") or list(range(len(batch)))
    for value in index:
        if isinstance(value, (list, dict, np.ndarray)):
            raise InputError(f"non_tensor_batch['index'] must hold one number or text per row, got {_shorten(value)}")
    uids = _column(batch, "uid") or [None] * len(batch)
    keys = [str(i if uid is None else uid) for uid, i in zip(uids, index, strict=True)]
    samples = _samples(batch, keys)
    trajectories = _trajectories(step, index, validate)
    columns = {key: value for key, value in batch.non_tensor_batch.items() if key not in STEERING}
    return [
        Row(
            index=i,
            uid=uids[i],
            sample=samples[i],
            agent_name=_agent_name(batch, i, rollout.agent),
            kwargs=_kwargs(columns, i),
            sampling_params=_sampling_params(rollout, validate, greedy=_is_greedy(batch, i)),
            trajectory=trajectories[i],
            seed_key=(rollout.seed, step, validate, keys[i], samples[i]),
        )
        for i in range(len(batch))
    ]


def _check_columns(batch: Any) -> None:
    """Columns may have been added in place, past the constructor's checks; and other libraries have a `DataProto`."""
    columns = getattr(batch, "non_tensor_batch", None)
    if not isinstance(columns, Mapping):
        raise InputError(f"a batch is a zagent.DataProto, got {type(batch).__name__}")
    lengths = {key: len(column) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError("columns differ in length: " + ", ".join(f"{key}={n}" for key, n in lengths.items()))
    odd = [key for key in columns if not isinstance(key, str)]
    if odd:
        raise InputError(f"column names must be text, got {odd[0]!r}")


async def get_trajectory_info(step: int, index: Sequence[Any] | np.ndarray, validate: bool) -> list[dict[str, Any]]:
    """`{step, sample_index, rollout_n, validate}` per entry of ``index``; rollout_n counts *consecutive* equal
    indices: [1, 1, 3, 3] -> 0, 1, 0, 1."""
    return _trajectories(step, [plain(value) for value in index], validate)


def plain(value: Any) -> Any:
    """A deep copy of ``value`` with numpy scalars as Python ones and object arrays as lists; other arrays stay. PIL
    images become PNG files, without loss: as such they can travel."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value] if value.dtype == object and value.ndim else value.copy()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(plain(v) for v in value)
    if type(value) is dict:
        return {plain(k): plain(v) for k, v in value.items()}
    return png(value) if is_pil_image(value) else copy.deepcopy(value)


def _trajectories(step: int, index: Sequence[Any], validate: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for value in index:
        again = bool(found) and found[-1]["sample_index"] == value
        count = found[-1]["rollout_n"] + 1 if again else 0
        found.append({"step": step, "sample_index": value, "rollout_n": count, "validate": validate})
    return found


def _column(batch: DataProto, key: str) -> list[Any] | None:
    column = batch.non_tensor_batch.get(key)
    return None if column is None else [plain(value) for value in column]


def _samples(batch: DataProto, keys: Sequence[str]) -> list[int]:
    """The caller's stamp where the column `sample` holds ints (any other `sample` is a column like the rest)."""
    stamped = _column(batch, "sample")
    if stamped and all(isinstance(value, int) and not isinstance(value, bool) for value in stamped):
        return stamped
    seen: Counter[str] = Counter()
    numbers = []
    for key in keys:
        numbers.append(seen[key])
        seen[key] += 1
    return numbers


def _agent_name(batch: DataProto, row: int, default: str) -> str:
    column = batch.non_tensor_batch.get("agent_name")
    name = default if column is None or column[row] is None else column[row]
    if not isinstance(name, str):
        raise InputError(f"row {row}: agent_name must be text, got {name!r}")
    return str(name)


def _kwargs(columns: dict[str, np.ndarray], row: int) -> dict[str, Any]:
    kwargs = {key: _own_copy(row, key, column[row]) for key, column in columns.items()}
    prompt = kwargs["raw_prompt"]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, dict) for message in prompt):
        raise InputError(f"row {row}: raw_prompt must be a list of chat messages, got {_shorten(prompt)}")
    return kwargs


def _own_copy(row: int, key: str, value: Any) -> Any:
    try:
        return plain(value)
    except Exception as error:  # a lock, a generator, an open file: each class says so in its own way
        raise InputError(
            f"row {row}: column {key!r} holds a {type(value).__name__}, of which each row needs a copy: {error}"
        ) from error


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_greedy(batch: DataProto, row: int) -> bool:
    column = batch.non_tensor_batch.get("__do_sample__")
    return column is not None and column[row] is not None and not bool(column[row])


def _sampling_params(rollout: RolloutConfig, validate: bool, greedy: bool) -> dict[str, Any]:
    source = rollout.val_kwargs if validate else rollout
    return {
        "temperature": 0.0 if greedy else source.temperature,
        "top_p": 1.0 if greedy else source.top_p,
        "top_k": -1 if greedy else source.top_k,
        "repetition_penalty": rollout.repetition_penalty,
        "logprobs": rollout.calculate_log_probs,
    }


def _flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, (bool, np.bool_)) and value not in (0, 1):
        raise InputError(f"meta_info[{name!r}] must be true or false, got {value!r}")
    return bool(value)


def _int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InputError(f"meta_info[{name!r}] must be an int, got {value!r}")
    return int(value)
