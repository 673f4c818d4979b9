"""From outcomes to the padded tensors a trainer learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zagent.data_proto import DataProto, object_array
from zagent.errors import InputError
from zagent.rope import row_positions
from zagent.trainer.metrics import timing
from zagent.types import IMAGE_SPANS, STANDARD_EXTRA_FIELDS, AgentLoopMetrics, AgentLoopOutput, Outcome

#: Key of `extra_fields` that becomes a tensor: int array [response tokens], the weight version that sampled each
#: token, −1 on tokens that were not sampled.
VERSIONS = "rollout_versions"


def collate(
    outcomes: Sequence[Outcome],
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_token_id: int = 0,
    batch: DataProto | None = None,
) -> DataProto:
    """Pad ``outcomes`` into one batch, ordered by their ``index`` (stable).

    Tensors, with B = len(outcomes), P = ``prompt_length`` and R = ``response_length`` (None: the longest there is):
    `prompts` [B, P], `responses`, `response_mask`, `rollout_versions` [B, R], `input_ids`, `attention_mask`,
    `position_ids` [B, P+R] (of models that see [B, 4, P+R]: as for text, then `zagent.rope.rope_index`, 0 on padding),
    all int64; where any row has them also `rollout_log_probs`, `rm_scores` [B, R] float32 and `routed_experts`
    [B, P+R, layers, experts] of the engine's dtype. Prompts are padded on the left, responses on the right
    and cut to R. A row without a usable output (failed, cancelled) is all padding with zero masks and no reward.

    Columns beside the loops' own: `status` (`partial`: aborted, its last turn is unfinished), `error` (text or None),
    `reward_score`, `__num_turns__`. ``batch`` is the input that the outcomes' indices count; its non-tensors are handed
    on, but where a loop's `extra_fields` or `reward_extra_info` have a key of the same name, the loop's values win.

    Raises:
        InputError: a prompt longer than P, arrays of a row that do not fit its response, images that do not fit their
            tokens, rows of different `routed_experts` shape, or an index that ``batch`` does not have exactly once.
    """
    rows = sorted(outcomes, key=lambda outcome: outcome.index)
    outputs = [row.output if row.status in ("ok", "partial") else None for row in rows]
    p = _width(prompt_length, [len(o.prompt_ids) for o in outputs if o])
    r = _width(response_length, [len(o.response_ids) for o in outputs if o])
    arrays = _tokens(rows, outputs, p, r, pad_token_id)
    arrays |= _log_probs(outputs, arrays["response_mask"]) | _versions(rows, outputs, arrays["response_mask"])
    arrays |= _routed_experts(rows, outputs, p, r) | _rm_scores(outputs, r)
    arrays |= _vision_positions(rows, outputs, arrays, p)
    return DataProto(_tensors(arrays), _non_tensors(rows, outputs, batch), _meta_info(outputs, arrays))


def position_ids(attention_mask: np.ndarray) -> np.ndarray:
    """[B, S] -> [B, S]: tokens count from 0; left padding is 0, right padding keeps the last value."""
    positions: np.ndarray = np.maximum(np.cumsum(attention_mask, axis=1) - 1, 0)
    return positions


def _width(asked: int | None, lengths: Sequence[int]) -> int:
    return asked if asked is not None else max(lengths, default=0)


def _tokens(
    rows: Sequence[Outcome], outputs: Sequence[AgentLoopOutput | None], p: int, r: int, pad: int
) -> dict[str, np.ndarray]:
    prompts = np.full((len(rows), p), pad, np.int64)
    responses = np.full((len(rows), r), pad, np.int64)
    response_mask = np.zeros((len(rows), r), np.int64)
    attention_mask = np.zeros((len(rows), p + r), np.int64)
    for i, output in enumerate(outputs):
        if output is None:
            continue
        start, end = p - len(output.prompt_ids), min(len(output.response_ids), r)
        if start < 0:
            raise InputError(f"row {rows[i].index}: prompt of {len(output.prompt_ids)} tokens exceeds {p}")
        prompts[i, start:] = output.prompt_ids
        responses[i, :end] = output.response_ids[:end]
        response_mask[i, :end] = output.response_mask[:end]
        attention_mask[i, start : p + end] = 1
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention_mask,
        "position_ids": position_ids(attention_mask),
    }


def _vision_positions(
    rows: Sequence[Outcome], outputs: Sequence[AgentLoopOutput | None], arrays: Mapping[str, np.ndarray], p: int
) -> dict[str, np.ndarray]:
    if not any(output is not None and output.extra_fields.get(IMAGE_SPANS) is not None for output in outputs):
        return {}
    positions = np.zeros((len(rows), 4, arrays["attention_mask"].shape[1]), np.int64)
    positions[:, 0] = arrays["position_ids"]
    for i, output in enumerate(outputs):
        if output is None:
            continue
        start, count = p - len(output.prompt_ids), int(arrays["attention_mask"][i].sum())
        try:
            positions[i, 1:, start : start + count] = row_positions(count, output.extra_fields)
        except InputError as error:
            raise InputError(f"row {rows[i].index}: {error}") from error
    return {"position_ids": positions}


def _log_probs(outputs: Sequence[AgentLoopOutput | None], response_mask: np.ndarray) -> dict[str, np.ndarray]:
    if not any(output is not None and output.response_logprobs is not None for output in outputs):
        return {}
    log_probs = np.zeros(response_mask.shape, np.float32)
    for i, output in enumerate(outputs):
        if output is not None and output.response_logprobs is not None:
            values = output.response_logprobs[: response_mask.shape[1]]
            log_probs[i, : len(values)] = values
    return {"rollout_log_probs": np.where(response_mask == 1, log_probs, np.float32(0))}


def _versions(
    rows: Sequence[Outcome], outputs: Sequence[AgentLoopOutput | None], response_mask: np.ndarray
) -> dict[str, np.ndarray]:
    versions = np.full(response_mask.shape, -1, np.int64)
    for i, output in enumerate(outputs):
        values = None if output is None else output.extra_fields.get(VERSIONS)
        if output is None or values is None:
            continue
        if len(values) != len(output.response_ids):
            raise InputError(
                f"row {rows[i].index}: {VERSIONS} has {len(values)} entries, response_ids {len(output.response_ids)}"
            )
        values = values[: response_mask.shape[1]]
        versions[i, : len(values)] = values
    return {VERSIONS: np.where(response_mask == 1, versions, -1)}


def _routed_experts(
    rows: Sequence[Outcome], outputs: Sequence[AgentLoopOutput | None], p: int, r: int
) -> dict[str, np.ndarray]:
    given = {i: np.asarray(o.routed_experts) for i, o in enumerate(outputs) if o and o.routed_experts is not None}
    if not given:
        return {}
    (one, first), *_ = given.items()
    dtype = np.result_type(*{experts.dtype for experts in given.values()})
    routed = np.zeros((len(rows), p + r, *first.shape[1:]), dtype)
    for i, experts in given.items():
        if experts.ndim != 3 or experts.shape[1:] != first.shape[1:]:
            raise InputError(
                f"row {rows[i].index}: routed_experts of shape {experts.shape}, row {rows[one].index}'s {first.shape}: "
                "must be [tokens, layers, experts per token], the last two the same in a batch"
            )
        start = p - len(outputs[i].prompt_ids)  # type: ignore[union-attr]
        end = p + min(len(outputs[i].response_ids), r)  # type: ignore[union-attr]
        routed[i, start:end][: len(experts)] = experts[: end - start]
    return {"routed_experts": routed}


def _rm_scores(outputs: Sequence[AgentLoopOutput | None], r: int) -> dict[str, np.ndarray]:
    if not any(output is not None and output.reward_score is not None for output in outputs):
        return {}
    scores = np.zeros((len(outputs), r), np.float32)
    for i, output in enumerate(outputs):
        end = 0 if output is None else min(len(output.response_ids), r)
        if output is not None and output.reward_score is not None and end:
            scores[i, end - 1] = output.reward_score
    return {"rm_scores": scores}


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    import torch  # here, so that the command line, which pads nothing, starts without it

    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def _non_tensors(
    rows: Sequence[Outcome], outputs: Sequence[AgentLoopOutput | None], batch: DataProto | None
) -> dict[str, np.ndarray]:
    columns = _input_columns(rows, batch)
    extras = [output.extra_fields if output else {} for output in outputs]
    for given in ([_reward_extra_info(output) for output in outputs], extras):
        for key in sorted({key for row in given for key in row} - {VERSIONS}):
            columns[key] = _column(key, given, columns.get(key))
    for key in STANDARD_EXTRA_FIELDS:
        columns.setdefault(key, object_array([None] * len(rows)))
    columns["__num_turns__"] = np.array([output.num_turns if output else 0 for output in outputs], np.int32)
    columns["reward_score"] = object_array([output.reward_score if output else None for output in outputs])
    columns["status"] = object_array([row.status for row in rows])
    columns["error"] = object_array([_error(row, output) for row, output in zip(rows, outputs, strict=True)])
    return columns


def _input_columns(rows: Sequence[Outcome], batch: DataProto | None) -> dict[str, np.ndarray]:
    if batch is None:
        return {}
    index = np.array([row.index for row in rows], np.int64)
    if len(np.unique(index)) != len(index) or (len(index) and not 0 <= index[0] <= index[-1] < len(batch)):
        raise InputError(
            f"outcomes' indices {index.tolist()} are not rows of a batch of {len(batch)}, each at most once"
        )
    return {key: column[index] for key, column in batch.non_tensor_batch.items()}


def _column(key: str, given: Sequence[Mapping[str, Any]], below: np.ndarray | None) -> np.ndarray:
    """Each row's value of ``key``; a row without it has the value ``below``, or None."""
    return object_array(
        [row[key] if key in row else None if below is None else below[i] for i, row in enumerate(given)]
    )


def _reward_extra_info(output: AgentLoopOutput | None) -> Mapping[str, Any]:
    return (output.extra_fields.get("reward_extra_info") if output else None) or {}


def _error(row: Outcome, output: AgentLoopOutput | None) -> str | None:
    if output is not None:
        return None
    return f"{type(row.error).__name__}: {row.error}" if row.error is not None else row.status


def _meta_info(outputs: Sequence[AgentLoopOutput | None], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    p = arrays["prompts"].shape[1]
    real = arrays["attention_mask"]
    metrics = [output.metrics if output else AgentLoopMetrics() for output in outputs]
    meta: dict[str, Any] = {
        "timing": timing(metrics, real[:, :p].sum(axis=1).tolist(), real[:, p:].sum(axis=1).tolist()),
        "failed": sum(output is None for output in outputs),
    }
    if "rm_scores" in arrays:
        meta["reward_extra_keys"] = sorted({key for output in outputs for key in _reward_extra_info(output)})
    return meta
