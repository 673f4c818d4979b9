"""Between verl's `DataProto` and ours: the same columns, other classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto as VerlDataProto

from zagent.data_proto import DataProto, object_array
from zagent.errors import InputError

#: Of a batch's `meta_info`, what zagent takes.
_META = ("validate", "global_steps")
#: A column that verl's trainers read in any case: one dict per row.
_MULTI_MODAL = "multi_modal_inputs"


def from_verl(prompts: Any) -> DataProto:
    """The rows of verl's ``prompts``; its tensors are the trainer's.

    Raises:
        InputError: it is none of verl's `DataProto`s (verl's V1 trainer has others).
    """
    if not isinstance(prompts, VerlDataProto):
        raise InputError(
            f"generate_sequences takes verl's DataProto, got {type(prompts).__name__}: verl's V1 trainer and its "
            "TransferQueue need another manager (trainer.use_v1=False)"
        )
    meta = {key: prompts.meta_info[key] for key in _META if key in prompts.meta_info}
    return DataProto(non_tensor_batch=prompts.non_tensor_batch, meta_info=meta)


def to_verl(out: DataProto) -> Any:
    """verl's `DataProto` of a result; tensors and arrays are shared."""
    columns = dict(out.non_tensor_batch)
    inputs = columns.get(_MULTI_MODAL, [None] * len(out))
    columns[_MULTI_MODAL] = object_array([{} if one is None else one for one in inputs])
    return VerlDataProto.from_dict(tensors=out.batch, non_tensors=columns, meta_info=dict(out.meta_info))


def with_scores(out: DataProto, results: Sequence[Mapping[str, Any]]) -> DataProto:
    """``out`` with what verl's reward loop said of each row (`reward_score`, `reward_extra_info`): `rm_scores` [B, R]
    float32 at each row's last response token, a column for each extra key (absent = None)."""
    real = out.batch["attention_mask"][:, out.batch["prompts"].shape[1] :]
    last = real.sum(dim=1) - 1
    scores = torch.zeros(real.shape, dtype=torch.float32)
    for row, result in enumerate(results):
        if last[row] >= 0:
            scores[row, last[row]] = result["reward_score"]
    infos = [result.get("reward_extra_info") or {} for result in results]
    keys = sorted({key for info in infos for key in info})
    columns = {key: _column([info.get(key) for info in infos]) for key in keys}
    return DataProto(
        {**out.batch, "rm_scores": scores},
        {**out.non_tensor_batch, **columns},
        {**out.meta_info, "reward_extra_keys": keys},
    )


def _column(values: list[Any]) -> np.ndarray:
    """Numbers as numbers, as verl's metrics want them."""
    plain = all(isinstance(value, (bool, int, float, np.number)) for value in values)
    return np.array(values) if plain else object_array(values)
