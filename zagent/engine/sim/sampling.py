"""From sampling parameters to an answer's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from zagent.engine.sim.tokens import State, TokenSource
from zagent.errors import InvalidRequest

#: SGLang 0.5.23's sampling parameters, plus `logprobs`. Those that `Sampling` does not name change nothing.
KNOWN_KEYS = frozenset(
    {
        "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k",
        "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n", "beam_width", "json_schema",
        "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
        "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "watermark", "logprobs",
    }
)  # fmt: skip

#: Versions of the weights are told apart by seeds beyond all that a call can have.
SEEDS = 2**64

#: Tokens drawn between two looks for a stop.
LOOK_EVERY = 1024


class Sampling(NamedTuple):
    """The sampling parameters that matter here. ``seed`` is 0 for a greedy call."""

    seed: int
    min_new_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    log_probs: bool


class Answer(NamedTuple):
    """``token_ids`` int32 [n], ``log_probs`` float32 [n] or None."""

    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32] | None
    stop_reason: Literal["stop", "length"]

    def cut(self, end: int, start: int = 0) -> Answer:
        """Its tokens from ``start`` to ``end``."""
        log_probs = None if self.log_probs is None else self.log_probs[start:end]
        return self._replace(token_ids=self.token_ids[start:end], log_probs=log_probs)


def parse_sampling(params: Mapping[str, Any]) -> Sampling:
    """Raises `InvalidRequest` naming the key that is unknown or has an impossible value."""
    if not params.keys() <= KNOWN_KEYS:
        raise InvalidRequest(f"unknown sampling parameter {', '.join(sorted(params.keys() - KNOWN_KEYS))}")
    temperature = params.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not temperature >= 0:
        raise InvalidRequest(f"temperature must be a non-negative number, got {temperature!r}")
    if params.get("n", 1) != 1:
        raise InvalidRequest(f"n must be 1, got {params['n']!r}: one call gives one answer")
    seed = _integer(params, "sampling_seed")
    return Sampling(
        seed=seed if temperature > 0 else 0,
        min_new_tokens=_integer(params, "min_new_tokens", least=0),
        stop_token_ids=_stop_ids(params.get("stop_token_ids")),
        ignore_eos=bool(params.get("ignore_eos", False)),
        log_probs=bool(params.get("logprobs", False)),
    )


def _integer(params: Mapping[str, Any], key: str, least: int | None = None) -> int:
    value = params.get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        raise InvalidRequest(f"{key} must be an int{'' if least is None else f' >= {least}'}, got {value!r}")
    return value


def _stop_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set)) or not all(type(v) is int and v < 2**31 for v in value):
        raise InvalidRequest(f"stop_token_ids must be a list of ints, got {value!r}")
    return tuple(value)


class Sampler:
    """Draws answers from a token source; ``eos_probability`` is the chance per token of ending with the end token."""

    def __init__(self, source: TokenSource, eos_token_id: int, eos_probability: float) -> None:
        self._source = source
        self._eos = eos_token_id
        self._eos_probability = eos_probability

    def answer(self, prompt_ids: np.ndarray, sampling: Sampling, budget: int, version: int = 0) -> Answer:
        """At most ``budget`` tokens after ``prompt_ids``; a stop token is the answer's last. Weights of another
        ``version`` give other tokens."""
        state = self._source.state(prompt_ids, sampling.seed + version * SEEDS)
        eos_probability = 0.0 if sampling.ignore_eos else self._eos_probability
        if eos_probability > 0 or sampling.stop_token_ids:
            token_ids, stopped = self._until_stop(state, sampling, eos_probability, budget)
        else:
            token_ids, stopped = self._source.tokens(state, 0, budget), False
        log_probs = self._source.log_probs(state, 0, token_ids.size) if sampling.log_probs else None
        return Answer(token_ids, log_probs, "stop" if stopped else "length")

    def _until_stop(
        self, state: State, sampling: Sampling, eos_probability: float, budget: int
    ) -> tuple[npt.NDArray[np.int32], bool]:
        parts = [np.empty(0, np.int32)]
        for first in range(0, budget, LOOK_EVERY):
            last = min(first + LOOK_EVERY, budget)
            token_ids = self._source.tokens(state, first, last)
            allowed = max(sampling.min_new_tokens - 1 - first, 0)  # index of the first token that may be the last one
            ends = self._source.chances(state, first, last) < eos_probability
            token_ids[allowed:][ends[allowed:]] = self._eos
            ends |= np.isin(token_ids, sampling.stop_token_ids)
            stops = np.flatnonzero(ends[allowed:])
            if stops.size:
                parts.append(token_ids[: allowed + stops[0] + 1])
                return np.concatenate(parts), True
            parts.append(token_ids)
        return np.concatenate(parts), False
