"""`DataProto`: a batch of rows, as verl's trainers pass it around.

Importing this module loads no torch; it is needed only where a tensor is touched.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from zagent.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class DataProtoItem:
    """One row: ``batch`` holds its tensors, ``non_tensor_batch`` its other values, ``meta_info`` the batch's."""

    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """Columns of equal length.

    ``batch``: name -> tensor [B, …]. ``non_tensor_batch``: name -> numpy array [B, …]; lists and tuples given here
    become one-dimensional object arrays, whatever they hold. ``meta_info``: facts about the whole batch.

    Raises:
        InputError: columns of different lengths (all are named), or a value that is no column.
    """

    def __init__(
        self,
        batch: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.batch: dict[str, torch.Tensor] = dict(batch.items()) if batch is not None else {}
        self.non_tensor_batch: dict[str, np.ndarray] = {k: _column(k, v) for k, v in (non_tensor_batch or {}).items()}
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """The constructor under verl's names."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """What a data loader's collate function gives: tensors and arrays in one dict."""
        tensors = {key: value for key, value in data.items() if _is_tensor(value)}
        return cls(tensors, {key: value for key, value in data.items() if key not in tensors}, meta_info)

    def check_consistency(self) -> None:
        """Raise `InputError` unless all columns have one length; call it after changing columns in place."""
        for key, value in self.batch.items():
            if not _is_tensor(value) or value.ndim == 0:
                raise InputError(f"batch[{key!r}] must be a tensor of at least one dimension, got {_describe(value)}")
        lengths = {key: len(value) for key, value in self._columns()}
        if len(set(lengths.values())) > 1:
            raise InputError("columns differ in length: " + ", ".join(f"{k}={n}" for k, n in lengths.items()))

    def __len__(self) -> int:
        return next((len(value) for _, value in self._columns()), 0)

    def __repr__(self) -> str:
        return f"DataProto({len(self)} rows, {', '.join(key for key, _ in self._columns())})"

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(i) for i in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        """An int gives a `DataProtoItem`; a slice, list, int array or bool mask a `DataProto` (slices are views)."""
        if isinstance(key, (int, np.integer)):
            return self._item(int(key))
        if isinstance(key, slice) and (key.step is None or key.step > 0):
            tensors = {name: value[key] for name, value in self.batch.items()}
            return DataProto(tensors, {name: v[key] for name, v in self.non_tensor_batch.items()}, self.meta_info)
        return self._take(_positions(key, len(self)))

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all parts in order. All must have the same columns.

        In ``meta_info`` the parts' ``reward_extra_keys`` are united and ``failed`` is summed; any other key must have
        one value wherever it occurs (pop `timing` first).
        """
        if not data:
            raise InputError("concat needs at least one DataProto")
        for part in data[1:]:
            _same_columns(data[0], part)
        tensors: dict[str, Any] = {}
        if data[0].batch:
            import torch

            tensors = {key: torch.cat([part.batch[key] for part in data]) for key in data[0].batch}
        arrays = {key: np.concatenate([p.non_tensor_batch[key] for p in data]) for key in data[0].non_tensor_batch}
        meta: dict[str, Any] = {}
        for part in data:
            meta = _merge_meta(meta, {key: value for key, value in part.meta_info.items() if key != "failed"})
        failed = [part.meta_info["failed"] for part in data if "failed" in part.meta_info]
        meta |= {"failed": sum(failed)} if failed else {}
        return DataProto(tensors, arrays, meta)

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` consecutive parts whose sizes differ by at most 1, the larger first; with fewer rows than
        ``chunks`` the last ones are empty (all columns, no rows), so that the count is always what was asked for."""
        if chunks < 1:
            raise InputError(f"chunks must be at least 1, got {chunks}")
        size, larger = divmod(len(self), chunks)
        edges = [i * size + min(i, larger) for i in range(chunks + 1)]
        return [self[start:end] for start, end in pairwise(edges)]

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and ``meta_info`` of ``other`` to this batch (in place, as in verl) and return it.

        What both have must be equal, except ``reward_extra_keys``, which are united. Raises `InputError` naming the
        key otherwise, with this batch unchanged.
        """
        if self._has_columns() and other._has_columns() and len(self) != len(other):
            raise InputError(f"union of {len(self)} rows with {len(other)}")
        tensors = _merge(self.batch, other.batch, "batch")
        arrays = _merge(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        meta = _merge_meta(self.meta_info, other.meta_info)
        self.batch, self.non_tensor_batch, self.meta_info = tensors, arrays, meta
        return self

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times`` times: a a b b if ``interleave``, else a b a b. Objects are shared, not copied."""
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A batch of the named columns (None = all of that kind), which are shared unless ``deepcopy``."""
        picked = [
            {key: _get(where, key, name) for key in (where if keys is None else keys)}
            for where, keys, name in self._parts(batch_keys, non_tensor_batch_keys, meta_info_keys)
        ]
        return DataProto(*(copy.deepcopy(picked) if deepcopy else picked))

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Take the named columns (None = none of that kind) out of this batch and return them as one."""
        taken = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        for where, keys, _ in self._parts(batch_keys, non_tensor_batch_keys, meta_info_keys):
            for key in keys or ():
                where.pop(key, None)
        return taken

    def to(self, device: Any) -> DataProto:
        """Move the tensors to ``device`` in place; returns this batch."""
        self.batch = {key: value.to(device) for key, value in self.batch.items()}
        return self

    def _columns(self) -> Iterator[tuple[str, Any]]:
        yield from self.batch.items()
        yield from self.non_tensor_batch.items()

    def _has_columns(self) -> bool:
        return bool(self.batch or self.non_tensor_batch)

    def _parts(self, *keys: Sequence[str] | None) -> Iterator[tuple[dict[str, Any], Sequence[str] | None, str]]:
        where: tuple[dict[str, Any], ...] = (self.batch, self.non_tensor_batch, self.meta_info)
        return zip(where, keys, ("batch", "non_tensor_batch", "meta_info"), strict=True)

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        tensors = {key: value[row] for key, value in self.batch.items()}
        return DataProtoItem(tensors, {key: v[row] for key, v in self.non_tensor_batch.items()}, self.meta_info)

    def _take(self, rows: np.ndarray) -> DataProto:
        tensors: dict[str, Any] = {}
        if self.batch:
            import torch

            index = torch.from_numpy(np.ascontiguousarray(rows))  # torch has no negative strides
            tensors = {key: value[index.to(value.device)] for key, value in self.batch.items()}
        return DataProto(tensors, {key: v[rows] for key, v in self.non_tensor_batch.items()}, self.meta_info)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """A one-dimensional object array [len(values)]; numpy's own constructor would make equal-length lists 2-d."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _column(key: str, value: Any) -> np.ndarray:
    if isinstance(value, (list, tuple)):
        return object_array(value)
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        raise InputError(f"non_tensor_batch[{key!r}] must be a list or a numpy array of rows, got {_describe(value)}")
    return value


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # nobody has a tensor before somebody imported torch
    return torch is not None and isinstance(value, torch.Tensor)


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")


def _positions(key: Any, length: int) -> np.ndarray:
    if not isinstance(key, slice):
        key = np.asarray(key.cpu() if _is_tensor(key) else key)
        key = key.astype(np.int64) if key.size == 0 and key.dtype != bool else key
        if key.ndim != 1 or key.dtype.kind not in "iub":
            raise TypeError(
                f"rows are chosen by an int, slice, 1-d list or array of ints or a mask, got {_describe(key)}"
            )
    rows: np.ndarray = np.arange(length)[key]
    return rows


def _same_columns(first: DataProto, other: DataProto) -> None:
    odd = {key for key, _ in first._columns()} ^ {key for key, _ in other._columns()}
    if odd:
        raise InputError(f"only some parts have the columns {', '.join(sorted(odd))}")


def _get(where: Mapping[str, Any], key: str, name: str) -> Any:
    if key not in where:
        raise InputError(f"{name} has no {key!r}; it has {', '.join(where) or 'nothing'}")
    return where[key]


def _merge(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> dict[str, Any]:
    for key in ours.keys() & theirs.keys():
        if not _equal(ours[key], theirs[key]):
            raise InputError(f"{name}[{key!r}] differs between the two batches")
    return {**ours, **theirs}


def _merge_meta(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    united = {}
    if "reward_extra_keys" in ours and "reward_extra_keys" in theirs:
        united["reward_extra_keys"] = sorted({*ours["reward_extra_keys"], *theirs["reward_extra_keys"]})
    return _merge({**ours, **united}, {**theirs, **united}, "meta_info")


def _equal(a: Any, b: Any) -> bool:
    """Deep equality over tensors, arrays and containers; NaN equals NaN."""
    if a is b:
        return True
    if _is_tensor(a) and _is_tensor(b):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and bool(((a == b.to(a.device)) | (a.isnan() & b.to(a.device).isnan())).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and all(map(_equal, a.ravel().tolist(), b.ravel().tolist()))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_equal, a, b))
    return _plain_equal(a, b)


def _plain_equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    same = a == b
    return same if isinstance(same, bool) else bool(np.all(same))
