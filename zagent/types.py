"""What loops, engines and trainers hand each other.

Token ids are lists of Python ints or int32 arrays, log-probabilities lists of floats or float32 arrays; everything
here takes both, and arrays stay arrays (the hot path never builds lists).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

Ids: TypeAlias = "Sequence[int] | np.ndarray"
Floats: TypeAlias = "Sequence[float] | np.ndarray"
StopReason = Literal["stop", "length", "abort"]
#: Kinds of memory that engines release, in the order in which SGLang must get them back: KV would take the room that
#: new weights need on their way.
MemoryTag = Literal["weights", "kv_cache"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
Status = Literal["ok", "partial", "failed", "cancelled"]

#: Keys that the worker gives every row's `extra_fields`, so that rows of different loops concatenate.
STANDARD_EXTRA_FIELDS = ("turn_scores", "tool_rewards", "min_global_steps", "max_global_steps")
#: Columns that say which row it is and what became of it: no loop's `extra_fields` may have them.
RESERVED_COLUMNS = ("status", "error", "reward_score", "__num_turns__", "uid", "index", "raw_prompt")

_INT32 = np.dtype(np.int32)

#: Keys of `extra_fields` in rows of models that see. int32 [images, 2]: where each image's tokens start and end,
#: counted over prompt and response; [0, 2] in a row without images.
IMAGE_SPANS = "image_spans"
#: The model's inputs beside token ids: `pixel_values` float32 [patches, values], `image_grid_thw` int64 [images, 3].
MULTI_MODAL_INPUTS = "multi_modal_inputs"


@dataclass(slots=True)
class TokenOutput:
    """One engine call's answer.

    ``token_ids`` contain the stop token; ``log_probs`` has the same length (or is None when not asked for).
    ``versions`` are spans ``(weight version, start, end)`` over ``token_ids``. Arrays come back where arrays (or
    nothing but arrays) were sent, lists where lists were.

    ``routed_experts`` is [tokens, layers, experts per token], int16 or int32. Row i has the experts that token i of the
    whole call went through, prompt first (images expanded), answer next, whatever was cached. The last token has not
    been through the model and has no row: there are len(prompt) + len(token_ids) - 1. Layers of SGLang are all of the
    model's; those without experts hold zeros. None where the engine records none, and where nothing was sampled.
    """

    token_ids: Ids
    log_probs: Floats | None = None
    stop_reason: StopReason = "stop"
    routed_experts: np.ndarray | None = None
    num_preempted: int | None = None
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    cached_tokens: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def cut(self, end: int) -> TokenOutput:
        """The same with the first ``end`` tokens of the answer alone."""
        gone = len(self.token_ids) - end
        return replace(
            self,
            token_ids=self.token_ids[:end],
            log_probs=None if self.log_probs is None else self.log_probs[:end],
            routed_experts=None if self.routed_experts is None or not end else self.routed_experts[: -gone or None],
            versions=[(version, start, min(stop, end)) for version, start, stop in self.versions if start < end],
        )


class AgentLoopMetrics(BaseModel):
    """Seconds spent per activity over a trajectory; ``num_preempted`` −1 = unknown. Below: tool calls by their end."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1
    tool_calls_ok: int = 0
    #: Raised, timed out, unknown tool, unusable arguments.
    tool_calls_failed: int = 0
    #: Beyond `multi_turn.max_parallel_calls`.
    tool_calls_skipped: int = 0


class AgentLoopOutput(BaseModel):
    """A finished trajectory, unpadded.

    ``response_mask`` is 1 on tokens the model sampled and 0 on tool, user or inserted tokens. Raises ``ValueError``
    (pydantic's ``ValidationError``) where ids, mask and log-probabilities of the response differ in length or an id
    is no int32.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    prompt_ids: Any
    response_ids: Any
    response_mask: Any
    response_logprobs: Any = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _complete(self) -> AgentLoopOutput:
        self.check()
        return self

    def check(self) -> None:
        """Raise ``ValueError`` as the constructor does; for an output that was changed since."""
        for name in ("prompt_ids", "response_ids", "response_mask"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple, np.ndarray)):
                raise ValueError(f"{name} must be a list or array of ints, got {type(value).__name__}")
            if int_array(value) is None:
                raise ValueError(f"{name} must hold only 32-bit integers in one dimension")
        if self.response_logprobs is not None:
            if not _is_float_vector(self.response_logprobs):
                raise ValueError("response_logprobs must hold only numbers in one dimension")
            if not np.isfinite(np.asarray(self.response_logprobs, np.float64)).all():
                raise ValueError("response_logprobs must be finite")
        length = len(self.response_ids)
        for name in ("response_mask", "response_logprobs"):
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(f"{name} has {len(value)} entries, response_ids has {length}")
        mask = np.asarray(self.response_mask)
        if mask.size and (mask.min() < 0 or mask.max() > 1):
            raise ValueError("response_mask must hold only 0 and 1")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one input row; every row ends in exactly one.

    ``index`` is the row's position in the batch, ``sample`` its number among the rows of the same ``uid``,
    ``attempt`` how often the row was started (1 = never lost). ``output`` is set for ``ok`` and ``partial``,
    ``error`` for ``failed`` and ``cancelled``.
    """

    index: int
    uid: Any
    sample: int
    status: Status
    output: AgentLoopOutput | None = None
    error: Exception | None = None
    attempt: int = 1


def _is_float_vector(values: Any) -> bool:
    try:
        array = np.asarray(values)
    except ValueError:  # a ragged list
        return False
    return array.ndim == 1 and (array.size == 0 or array.dtype.kind in "fiu")


def int_array(ids: Ids) -> np.ndarray | None:
    """``ids`` as a one-dimensional int32 array, or None where they are no such thing (bools and floats are not ids)."""
    if type(ids) is list and ids and type(ids[0]) is int:
        return _packed(ids)
    try:
        found = np.asarray(ids)
    except ValueError:  # a ragged list
        return None
    if found.dtype is _INT32 and found.ndim == 1:
        return found
    if found.size == 0 and found.ndim == 1:
        return np.empty(0, np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu" or found.max() > 2**31 - 1 or found.min() < -(2**31):
        return None
    return found.astype(np.int32)


def _packed(ids: list[int]) -> np.ndarray | None:
    """`int_array` of the usual list; half the time of numpy's conversion, which looks at every element twice."""
    try:
        return np.frombuffer(array("i", ids), np.int32)
    except (TypeError, OverflowError):
        return None
