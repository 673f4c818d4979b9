"""One answer by several engines: what the lost ones had told of it, and what the next one is asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zagent.types import TokenOutput

#: Sampling parameters by which a token depends on how the answer began, or on its length, with the number that turns
#: them off (None does in any case): from a prompt that has the beginning in it, the engine would go on differently.
LOOKING_BACK = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "stop", "stop_regex")),
    **dict.fromkeys(("custom_params", "custom_logit_processor", "watermark")),
}


def may_continue(params: Mapping[str, Any]) -> bool:
    """Whether a call with these sampling parameters may go on where another engine left it."""
    asked = {key: params[key] for key in LOOKING_BACK.keys() & params.keys()}
    return all(_is_off(value, LOOKING_BACK[key]) for key, value in asked.items())


def _is_off(value: Any, off: int | None) -> bool:
    return value is None or (isinstance(value, (int, float)) and value == off)


def pack_piece(start: int, piece: TokenOutput) -> list[Any]:
    """The body of a progress message: tokens of the running attempt from ``start`` on."""
    return [start, piece.token_ids, piece.log_probs, piece.versions]


class Continuing:
    """A generate call over all its attempts.

    Args:
        prompt_length: tokens of the call's prompt.
        limit: its `max_new_tokens`; None = none.
    """

    def __init__(self, prompt_length: int, limit: int | None) -> None:
        self._prompt_length = prompt_length
        self._left = limit  #: that the running attempt may sample
        #: What the running attempt was given as part of its prompt, and what it has told since.
        self._given: TokenOutput | None = None
        self._told: list[TokenOutput] = []
        #: The running attempt's argument, if it is not the first's.
        self._renewed: list[Any] | None = None
        #: Routed experts of the first tokens, by the engines that went through them first.
        self._experts: np.ndarray | None = None

    def take(self, value: Sequence[Any]) -> None:
        """A progress message of the running attempt; not used if one before it was lost, or if it left nothing to
        sample: only an engine knows why an answer ended, its experts and its images' tokens."""
        start, ids, log_probs, versions = value
        told = sum(len(piece.token_ids) for piece in self._told)
        if start == told and not (self._left is not None and self._left <= told + len(ids)):
            self._told.append(TokenOutput(ids, log_probs, versions=versions))

    def renew(self, argument: Sequence[Any]) -> list[Any] | None:
        """The argument of the next attempt, given that of the last one: [prompt ids (int32), sampling params, images,
        videos]; None = the same."""
        if not self._told:
            return None
        told, self._told = joined(self._told), []
        self._given = told if self._given is None else joined([self._given, told])
        prompt_ids, params, *media = argument
        if self._left is not None:
            self._left -= len(told.token_ids)
            params = {**params, "max_new_tokens": self._left}
        self._renewed = [np.concatenate([prompt_ids, told.token_ids]), params, *media]
        return self._renewed

    def aborted(self, output: TokenOutput, argument: Sequence[Any]) -> Sequence[Any]:
        """The argument of a further call in the place of the one with ``argument``, which an engine has broken off with
        ``output``: it goes on from there, or begins again where it cannot (`may_continue`)."""
        goes_on = len(output.token_ids) > 0 and may_continue(argument[1])
        self._told = [output] if goes_on else []
        if goes_on and output.routed_experts is not None:
            self._experts = _onwards(self._experts, output.routed_experts)
        latest = self._renewed or argument
        return self.renew(latest) or latest

    def whole(self, rest: TokenOutput) -> TokenOutput:
        """The answer, given that of the last attempt.

        Routed experts are those by which each token went through the model first; the last engine, which went through
        all of them, fills in what lost ones have not told. Tokens of the prompt alone count as cached.
        """
        if self._given is None:
            return rest
        expanded = rest.extra_fields.get("prompt_token_ids")
        extra = {} if expanded is None else {"prompt_token_ids": expanded[: -len(self._given.token_ids)]}
        tokens = joined([self._given, rest])
        prompt_length = len(extra["prompt_token_ids"]) if extra else self._prompt_length
        return replace(
            rest,
            token_ids=tokens.token_ids,
            log_probs=tokens.log_probs,
            versions=tokens.versions,
            routed_experts=None if rest.routed_experts is None else _onwards(self._experts, rest.routed_experts),
            cached_tokens=min(rest.cached_tokens, prompt_length),
            extra_fields={**rest.extra_fields, **extra},
        )


def joined(parts: Sequence[TokenOutput]) -> TokenOutput:
    """The tokens of the ``parts`` in a row."""
    parts = [part for part in parts if len(part.token_ids)]
    log_probs = [part.log_probs for part in parts if part.log_probs is not None]
    return TokenOutput(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate(log_probs) if log_probs else None,
        versions=_spans(parts),
    )


def _onwards(first: np.ndarray | None, all_rows: np.ndarray) -> np.ndarray:
    """The rows of ``first``, and after them those of ``all_rows``."""
    return all_rows if first is None else np.concatenate([first, all_rows[len(first) :]])


def _spans(parts: Sequence[TokenOutput]) -> list[tuple[int, int, int]]:
    """Their version spans over all of them, neighbours of one version as one."""
    spans: list[tuple[int, int, int]] = []
    start = 0
    for part in parts:
        for version, first, last in part.versions:
            begin = spans.pop()[1] if spans and spans[-1][0] == version else start + first
            spans.append((version, begin, start + last))
        start += len(part.token_ids)
    return spans
