"""Faults put into zagent on purpose: a pytest plugin (`-p support.mutations`) that applies `$ZAGENT_MUTATION`.

Each is one that a rollout system had in public; `tests/test_mutations.py` sees that tests fail with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from zagent.engine import methods as engine_methods
from zagent.loops import base, multi_turn, single_turn, tokens, trajectory


def shift_the_mask_by_one() -> None:
    """Tool tokens are trained on, sampled ones are not."""
    right = trajectory.Trajectory.response_mask

    def wrong(self: Any) -> np.ndarray:
        return np.roll(right(self), 1)

    trajectory.Trajectory.response_mask = wrong  # type: ignore[method-assign]


def drop_the_inserted_newline() -> None:
    """The template's tail after the stop token is lost at each tool boundary."""
    right = tokens.ChatTemplate.continuation

    def wrong(self: Any, *args: Any, **kwargs: Any) -> list[int]:
        return right(self, *args, **kwargs)[1:]

    tokens.ChatTemplate.continuation = wrong  # type: ignore[method-assign]


def reuse_the_request_id() -> None:
    """Two calls of one trajectory are one to SGLang, which aborts by it."""
    right = engine_methods.read_request

    def wrong(argument: Any, call: Any) -> Any:
        return right(argument, call._replace(call=b"0" * 16, attempt=1))

    engine_methods.read_request = wrong


def change_the_sampling_params() -> None:
    """A turn's token limit and `logprobs` reach the next turn, and the caller."""

    def wrong(sampling_params: dict[str, Any], budget: int) -> dict[str, Any]:
        sampling_params["max_new_tokens"] = budget
        sampling_params.pop("logprobs", None)
        return sampling_params

    for module in (base, multi_turn, single_turn):
        module.with_budget = wrong  # type: ignore[attr-defined]


MUTATIONS: dict[str, Callable[[], None]] = {
    made.__name__: made
    for made in (
        shift_the_mask_by_one, drop_the_inserted_newline, reuse_the_request_id, change_the_sampling_params
    )
}  # fmt: skip

if "ZAGENT_MUTATION" in os.environ:
    MUTATIONS[os.environ["ZAGENT_MUTATION"]]()
