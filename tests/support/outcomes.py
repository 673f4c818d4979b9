"""Outcomes as a worker would hand them over."""

from __future__ import annotations

from typing import Any

from zagent.errors import LoopError
from zagent.types import AgentLoopOutput, Outcome


def ok(index: int = 0, prompt: Any = (1, 2), response: Any = (3, 4), mask: Any = None, **output: Any) -> Outcome:
    """A finished row; ``mask`` defaults to all sampled, ``output`` are further fields of `AgentLoopOutput`."""
    mask = [1] * len(response) if mask is None else mask
    made = AgentLoopOutput(prompt_ids=prompt, response_ids=response, response_mask=mask, **output)
    return Outcome(index, f"u{index}", 0, "ok", made)


def failed(index: int = 0) -> Outcome:
    """A row whose loop raised."""
    return Outcome(index, f"u{index}", 0, "failed", None, LoopError("it broke"))
