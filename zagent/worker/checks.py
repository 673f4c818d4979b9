"""What a loop gave, refused in its own row where a batch could not use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from pydantic import ValidationError

from zagent.errors import EncodeError, InputError, LoopError, PromptTooLong
from zagent.rope import row_positions
from zagent.types import IMAGE_SPANS, MULTI_MODAL_INPUTS, RESERVED_COLUMNS, AgentLoopOutput, int_array
from zagent.wire.codec import encode_body

#: Scores become float32 (`rm_scores`).
LARGEST_SCORE = float(np.finfo(np.float32).max)


def check_output(output: Any, agent: str, prompt_length: int, response_length: int | None = None) -> AgentLoopOutput:
    """``output``, if `collate` can use it.

    Raises:
        LoopError: it is no `AgentLoopOutput`, or its parts do not fit each other; names ``agent`` and the part.
        PromptTooLong: its prompt has more than ``prompt_length`` tokens.
    """
    if not isinstance(output, AgentLoopOutput):
        raise LoopError(f"agent loop {agent!r} returned a {type(output).__name__}, not an AgentLoopOutput")
    try:
        output.check()  # the loop may have changed it since it was made
        _check_extras(output)
        _check_images(output, response_length)
    except (ValueError, InputError) as error:
        raise LoopError(f"agent loop {agent!r}: {error}") from error
    if len(output.prompt_ids) > prompt_length:
        raise PromptTooLong(
            f"agent loop {agent!r} returned a prompt of {len(output.prompt_ids)} tokens, beyond "
            f"rollout.prompt_length={prompt_length}"
        )
    return output


def _check_extras(output: AgentLoopOutput) -> None:
    experts, fields = output.routed_experts, output.extra_fields
    if output.reward_score is not None:
        output.reward_score = finite_score(output.reward_score)
    if experts is not None and not (isinstance(experts, np.ndarray) and experts.ndim == 3):
        raise ValueError("routed_experts must be an array [tokens, layers, experts per token]")
    versions = fields.get("rollout_versions")
    if versions is not None and int_array(versions) is None:
        raise ValueError("rollout_versions must be a list or array of ints")
    if versions is not None and len(versions) != len(output.response_ids):
        raise ValueError(f"rollout_versions has {len(versions)} entries, response_ids has {len(output.response_ids)}")
    info = fields.get("reward_extra_info")
    if info is not None and not isinstance(info, dict):
        raise ValueError(f"reward_extra_info must be a dict, got {type(info).__name__}")
    taken = [key for key in RESERVED_COLUMNS if key in fields or key in (info or ())]
    if taken:
        raise ValueError(f"extra_fields and reward_extra_info may not have {taken[0]!r}: it is the row's own")
    odd = [key for key in (*fields, *(info or ())) if not isinstance(key, str)]
    if odd:
        raise ValueError(f"keys of extra_fields and reward_extra_info must be text, got {odd[0]!r}")


def _check_images(output: AgentLoopOutput, response_length: int | None) -> None:
    """Raise `InputError` where images do not fit their tokens, or lie where the response is cut off."""
    if all(output.extra_fields.get(key) is None for key in (IMAGE_SPANS, MULTI_MODAL_INPUTS)):
        return
    kept = len(output.response_ids) if response_length is None else min(len(output.response_ids), response_length)
    row_positions(len(output.prompt_ids) + kept, output.extra_fields)


def finite_score(value: Any) -> float:
    """``value`` as a float, if it is a number (numpy's and bools included) that a float32 can hold. Raises `ValueError`
    naming it."""
    if getattr(value, "ndim", None) == 0:  # numpy's scalars, and arrays or tensors of one
        value = value.item()
    if not isinstance(value, Real):
        raise ValueError(f"a score must be a number, got {value!r:.80} ({type(value).__name__})")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if not abs(score) <= LARGEST_SCORE:  # nor is NaN
        raise ValueError(f"a score must be a finite float32, got {score!r}")
    return score


def refused_output(error: ValidationError, agent: str) -> LoopError:
    """The loop's own `AgentLoopOutput(…)` was refused: pydantic's error in one line."""
    said = "; ".join(_one_line(one) for one in error.errors())
    return LoopError(f"agent loop {agent!r}: {said}")


def _one_line(error: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    return (f"{name}: " if name else "") + str(error["msg"]).removeprefix("Value error, ")


def check_encodes(packed: Mapping[str, Any], agent: str) -> None:
    """Raise `EncodeError` that names the field of the output which cannot cross the wire."""
    try:
        encode_body(packed)
    except EncodeError as error:
        raise EncodeError(f"agent loop {agent!r}: {_culprit(packed)}{error}") from error


def _culprit(packed: Mapping[str, Any]) -> str:
    for prefix, values in (("extra_fields", packed["extra_fields"]), ("", packed)):
        for key, value in values.items():
            try:
                encode_body(value)
            except EncodeError:
                return f"{prefix}[{key!r}]: " if prefix else f"{key}: "
    return ""
