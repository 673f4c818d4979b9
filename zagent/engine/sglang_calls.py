"""What one call is to SGLang 0.5.23: sampling parameters in, result dictionaries and exceptions out.

Pure and without sglang, so that every odd form that SGLang sends is tested by hand-made dictionaries.
"""

from __future__ import annotations

import base64
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zagent.engine.base import EngineInfo, GenerateRequest, Progress, token_budget
from zagent.errors import EngineError, InvalidRequest, Overloaded, ZagentError
from zagent.types import TokenOutput

#: Sampling parameter -> what makes its value one that SGLang's scheduler can decode; raises TypeError or ValueError.
Converters = Mapping[str, Callable[[Any], Any]]

#: The other parameters of SGLang that a call may not use: they change the form of the answer (`n`, `beam_width`), or
#: configure extensions that are not reachable from here.
REFUSED_PARAMETERS = frozenset({"n", "beam_width", "watermark", "custom_params", "stream_interval"})


def nearest(name: str, names: Iterable[str]) -> str:
    """``, did you mean 'x'?`` for the most similar of ``names``, or nothing."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.4)
    return f", did you mean {found[0]!r}?" if found else ""


def to_sampling(
    params: Mapping[str, Any], prompt_length: int, info: EngineInfo, converters: Converters, *, keep_seed: bool
) -> tuple[dict[str, Any], bool]:
    """SGLang's sampling parameters for a call, and whether log-probabilities are asked for.

    ``max_new_tokens`` is always set, cut to what the context leaves. None means "default", as in SGLang.
    ``sampling_seed`` is dropped unless ``keep_seed``: SGLang honours it only in deterministic mode.

    Raises:
        InvalidRequest: an unknown key (with the nearest valid one), or a value that SGLang cannot take.
    """
    asked = {key: value for key, value in params.items() if value is not None}
    logprobs = asked.pop("logprobs", False)
    if not isinstance(logprobs, bool):
        raise InvalidRequest(f"logprobs must be true or false, got {logprobs!r}")
    for key in asked:
        if key not in converters:
            raise InvalidRequest(f"sampling parameter {key!r} is unknown{nearest(key, [*converters, 'logprobs'])}")
    asked["max_new_tokens"] = token_budget(asked, prompt_length, info)
    result = {key: _convert(key, value, converters[key]) for key, value in asked.items()}
    _check_ids(result, info.vocab_size)
    if not keep_seed:
        result.pop("sampling_seed", None)
    return result, logprobs


def _convert(key: str, value: Any, converter: Callable[[Any], Any]) -> Any:
    """SGLang checks types only when its scheduler decodes the call, and dies of a wrong one."""
    try:
        return converter(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling parameter {key}={value!r}: {error}") from error


def _check_ids(params: Mapping[str, Any], vocab_size: int) -> None:
    """What SGLang would only notice inside the forward pass, where it takes the whole engine down."""
    for token_id in params.get("stop_token_ids") or ():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"stop_token_ids holds {token_id}, outside the vocabulary of {vocab_size}")
    for token_id, bias in (params.get("logit_bias") or {}).items():
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token {token_id} must be finite, got {bias}")


def media(request: GenerateRequest) -> dict[str, Any]:
    """What SGLang is told of a call's images and videos."""
    if not request.images and not request.videos:
        return {}
    return {
        "image_data": list(request.images) if request.images else None,
        "video_data": list(request.videos) if request.videos else None,
        "return_prompt_token_ids": True,
    }


def to_output(reply: Mapping[str, Any], logprobs: bool, experts_shape: tuple[int, int] | None = None) -> TokenOutput:
    """SGLang's result dictionary as a `TokenOutput` with int32 ids and float32 log-probabilities.

    An aborted call keeps the tokens it had, but for the last one: SGLang has not looked whether it ends the answer,
    which must not go on after its end. One that was aborted in the queue has few of the usual keys. Where routed
    experts were asked for, ``experts_shape`` is (layers, experts per token); they are int32.

    Raises:
        EngineError: log-probabilities or routed experts that do not belong to the tokens, or a form of answer that is
            not known.
    """
    meta = reply["meta_info"]
    stop_reason = _stop_reason(meta)
    sampled = ids = np.asarray(reply.get("output_ids") or (), dtype=np.int32)
    triples = meta.get("output_token_logprobs") or ()
    if stop_reason == "abort":
        ids = ids[:-1]
        if logprobs:  # tokens that were cut off before their log-probabilities came are sampled again, too
            triples = triples[: len(ids)]
            ids = ids[: len(triples)]
    return TokenOutput(
        token_ids=ids,
        log_probs=_log_probs(triples, ids) if logprobs else None,
        stop_reason=stop_reason,
        routed_experts=_routed_experts(meta, len(sampled), len(ids), experts_shape),
        num_preempted=meta.get("num_retractions"),
        versions=_versions(meta, len(ids)),
        cached_tokens=meta.get("cached_tokens") or 0,
        extra_fields=_expanded_prompt(reply),
    )


class Pieces:
    """Tells ``progress`` what is new in the growing answers of a streamed call, at least ``step`` tokens at a time, as
    long as all are of the weights ``version``: which tokens are of other ones, is told with the whole answer alone."""

    def __init__(self, progress: Progress, step: int, logprobs: bool, version: int) -> None:
        self._progress, self._step, self._logprobs, self._version = progress, step, logprobs, version
        self._told = 0

    def look(self, reply: Mapping[str, Any]) -> None:
        """``reply`` is not the last one, and holds all tokens so far. Raises `EngineError` as `to_output` does."""
        meta, start = reply["meta_info"], self._told
        triples = meta.get("output_token_logprobs") or ()
        end = min(len(reply["output_ids"]), len(triples)) if self._logprobs else len(reply["output_ids"])
        if end - start < self._step or str(meta.get("weight_version")) != str(self._version):
            return
        ids = np.array(reply["output_ids"][start:end], np.int32)
        log_probs = _log_probs(triples[start:end], ids) if self._logprobs else None
        self._progress(TokenOutput(ids, log_probs, versions=[(self._version, 0, len(ids))]))
        self._told = end


def is_last(reply: Mapping[str, Any]) -> bool:
    """Whether the call has ended with this answer."""
    return reply["meta_info"].get("finish_reason") is not None


def _expanded_prompt(reply: Mapping[str, Any]) -> dict[str, Any]:
    """`prompt_token_ids`, int32 [tokens], where they were asked for (calls with images)."""
    ids = reply.get("prompt_token_ids")
    return {} if ids is None else {"prompt_token_ids": np.asarray(ids, np.int32)}


def _stop_reason(meta: Mapping[str, Any]) -> Any:
    """Raises what SGLang raises, unless the call is streamed: an abort with a status is a refusal."""
    finish = meta.get("finish_reason") or {}
    if status := finish.get("status_code"):
        text = str(finish.get("message"))
        raise _refusal(status, text) or EngineError(text)
    reason = finish.get("type")
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"SGLang ended the call for an unknown reason: {meta.get('finish_reason')!r}")
    return reason


def _log_probs(triples: Sequence[Any], ids: np.ndarray) -> np.ndarray:
    """Values of SGLang's triples (log-probability, token id, text), which must be those of ``ids`` one by one."""
    if not len(ids):  # SGLang may send a log-probability for a token that it did not sample
        return np.empty(0, np.float32)
    if len(triples) != len(ids):
        raise EngineError(f"SGLang returned {len(triples)} log-probabilities for {len(ids)} tokens")
    if any(triple[1] != token_id for triple, token_id in zip(triples, ids.tolist(), strict=True)):
        raise EngineError("SGLang returned log-probabilities of other tokens than those it sampled")
    return np.fromiter((triple[0] for triple in triples), np.float32, len(triples))


def _routed_experts(
    meta: Mapping[str, Any], sampled: int, kept: int, shape: tuple[int, int] | None
) -> np.ndarray | None:
    """SGLang's base64 of int32 [prompt tokens + ``sampled`` - 1, *``shape``], less the rows of tokens that were not
    ``kept``. Only an abort may lack it."""
    if shape is None or not kept:
        return None
    encoded = meta.get("routed_experts")
    if encoded is None and meta["finish_reason"]["type"] == "abort":
        return None
    values = np.frombuffer(base64.b64decode(encoded or ""), np.int32)
    rows = meta["prompt_tokens"] + sampled - 1
    if values.size != rows * math.prod(shape):
        raise EngineError(f"SGLang returned {values.size} routed experts, not {rows} tokens of {shape}")
    return values.reshape(rows, *shape)[: rows - sampled + kept]


def _versions(meta: Mapping[str, Any], count: int) -> list[tuple[int, int, int]]:
    """Spans (weight version, start, end) that cover all ``count`` tokens without a gap."""
    if not count:
        return []
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    try:
        parts = [(int(span["version"]), int(span["start"]), min(int(span["end"]), count)) for span in spans]
    except (TypeError, ValueError) as error:
        raise EngineError(f"SGLang reports weight versions that are not zagent's: {spans!r}") from error
    parts = [part for part in parts if part[1] < count]
    edges = [0, *(end for _, _, end in parts)]
    if [start for _, start, _ in parts] != edges[:-1] or edges[-1] != count:
        raise EngineError(f"SGLang's weight versions do not cover {count} tokens: {spans!r}")
    return parts


def to_error(error: Exception) -> ZagentError:
    """SGLang's exception as one of ours.

    ValueError, TypeError and a malformed stop_regex are the caller's; `fastapi.HTTPException` carries a status.
    """
    if isinstance(error, ZagentError):
        return error
    status, text = getattr(error, "status_code", None), str(getattr(error, "detail", None) or error)
    if isinstance(error, (ValueError, TypeError, re.error)):
        status = 400
    return _refusal(status, text) or EngineError(f"{type(error).__name__}: {text}")


def _refusal(status: int | None, text: str) -> ZagentError | None:
    if status == 503:  # its queue is full, or the call waited longer than the engine allows
        return Overloaded(text)
    return InvalidRequest(text) if status == 400 else None
