"""The tokens of one row, append-only: what is in stays as it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zagent.errors import LoopError
from zagent.types import AgentLoopOutput, Ids, TokenOutput, int_array


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that came together. ``log_probs`` is float32 [tokens]; None where nobody asked for them."""

    ids: np.ndarray
    sampled: bool
    log_probs: np.ndarray | None = None


class Trajectory:
    """Prompt, then sampled and inserted segments.

    Args:
        prompt_ids: int32 [tokens], fixed from now on.
        response_length: tokens the response may have (`rollout.response_length`).
    """

    def __init__(self, prompt_ids: Ids, response_length: int) -> None:
        self.prompt_ids = _ids(prompt_ids)
        self._limit = response_length
        self._segments: list[Segment] = []
        self._routed_experts: np.ndarray | None = None
        self.response_tokens = 0

    @property
    def room(self) -> int:
        """Tokens that the response may still take."""
        return self._limit - self.response_tokens

    @property
    def full(self) -> bool:
        """The response has its length: nothing more may be sampled or inserted."""
        return self.room <= 0

    def context(self) -> np.ndarray:
        """Everything so far, int32 [tokens]; the caller's own copy."""
        return np.concatenate([self.prompt_ids, *(segment.ids for segment in self._segments)])

    def add_sampled(self, output: TokenOutput) -> None:
        """Append an engine's answer to `context()`; its `routed_experts` cover all up to its end."""
        ids = _ids(output.token_ids)
        log_probs = None if output.log_probs is None else np.array(output.log_probs, np.float32)
        self._append(Segment(ids, True, log_probs))
        if output.routed_experts is not None:
            self._routed_experts = output.routed_experts

    def add_inserted(self, ids: Sequence[int] | np.ndarray) -> bool:
        """Append tokens that nobody sampled (mask 0, log-probability 0.0), all or, where they do not fit, none."""
        segment = Segment(_ids(ids), False)
        if len(segment.ids) > self.room:
            return False
        self._append(segment)
        return True

    def _append(self, segment: Segment) -> None:
        self._segments.append(segment)
        self.response_tokens += len(segment.ids)

    def response_ids(self) -> np.ndarray:
        """Int32 [tokens], at most the response's length."""
        return self._joined([segment.ids for segment in self._segments], np.int32)

    def response_mask(self) -> np.ndarray:
        """Int32 [tokens]: 1 on what was sampled."""
        parts = [np.full(len(segment.ids), segment.sampled, np.int32) for segment in self._segments]
        return self._joined(parts, np.int32)

    def response_logprobs(self) -> np.ndarray | None:
        """Float32 [tokens], 0.0 on what was not sampled; None where no call gave any."""
        if all(segment.log_probs is None for segment in self._segments):
            return None
        parts = [np.zeros(len(s.ids), np.float32) if s.log_probs is None else s.log_probs for s in self._segments]
        return self._joined(parts, np.float32)

    def _joined(self, parts: list[np.ndarray], dtype: type) -> np.ndarray:
        joined: np.ndarray = np.concatenate([np.empty(0, dtype), *parts])[: self._limit]
        return joined

    def output(self, **fields: Any) -> AgentLoopOutput:
        """The `AgentLoopOutput`; ``fields`` are its other arguments (`num_turns`, `metrics`, …)."""
        experts = self._routed_experts
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids(),
            response_mask=self.response_mask(),
            response_logprobs=self.response_logprobs(),
            routed_experts=None if experts is None else experts[: len(self.prompt_ids) + self._limit],
            **fields,
        )


def _ids(ids: Ids) -> np.ndarray:
    found = int_array(ids)
    if found is None:
        raise LoopError("token ids must be 32-bit integers in one dimension")
    return np.array(found)  # a copy: neither the loop's nor an engine's list is ours to keep
