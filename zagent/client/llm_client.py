"""`AsyncLLMServerManager`: tokens in, tokens out, on whichever engine the broker chooses. For workers and trainers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zagent.client.calls import Calls
from zagent.client.continuing import Continuing
from zagent.errors import InvalidRequest, TransientError
from zagent.types import Ids, TokenOutput, int_array

#: Calls in a row that may be broken off before their first token, as those that wait at an engine are at each update.
#: With the waits of `Retry` between them, so many take most of a minute: a row outlives updates in quick succession,
#: and an engine that breaks everything off is found out.
FRUITLESS = 30

#: The pool that `generate` calls go to.
ENGINE_POOL = "engine"


class AsyncLLMServerManager:
    """Generates on a pool of engines (verl's class of that name).

    Args:
        calls: the pending table of a link, or an async function that gives one for the running loop.
        timeout: seconds one generate may take in all; None = no limit.
        pool: the policy's engines, or those of a service.
        group: `Call.group` of all its generates.
        partial_rollout: an answer that is broken off (`stop_reason` "abort": the engines get new weights) goes on,
            and nobody notices; False: it is given as it is.
    """

    def __init__(
        self,
        calls: Calls | Callable[[], Awaitable[Calls]],
        timeout: float | None = None,
        pool: str = ENGINE_POOL,
        group: str = "",
        *,
        partial_rollout: bool = True,
    ) -> None:
        self._calls = calls
        self._timeout = timeout
        self._pool = pool
        self._group = group
        self._partial_rollout = partial_rollout

    async def _table(self) -> Calls:
        return self._calls if isinstance(self._calls, Calls) else await self._calls()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Ids,
        sampling_params: dict[str, Any],
        image_data: Sequence[bytes] | None = None,
        video_data: Sequence[bytes] | None = None,
    ) -> TokenOutput:
        """Continue ``prompt_ids``.

        If the engine is lost, another one goes on from the tokens that it has told of, if any
        (`engine.checkpoint_tokens`; none of a call whose sampling parameters look back, see `may_continue`). What is
        broken off goes on likewise, from all its tokens.

        Args:
            request_id: the session: calls with the same one go to the same engine, whose prefix cache knows them.
            prompt_ids: list of ints, or int32 array [tokens]; the answer's ids and log-probabilities come back in
                the same form.
            sampling_params: SGLang's names, plus `logprobs` (bool). Not changed.
            image_data, video_data: encoded files, as bytes or uint8 arrays. ``prompt_ids`` holds one placeholder for
                each, unexpanded; the answer's ``extra_fields["prompt_token_ids"]`` (int32 array) are the expanded ids
                that the engine used.

        Raises:
            InvalidRequest: this call cannot be run (bad ids, unknown sampling key, too long …).
            TransientError, DeadlineExceeded: no engine could answer, or all was broken off before its first token.
        """
        ids = int_array(prompt_ids)
        if ids is None:
            raise InvalidRequest("prompt_ids must be a one-dimensional list or array of 32-bit ints")
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id must be text, got {request_id!r}")
        if not isinstance(sampling_params, dict):
            raise InvalidRequest(f"sampling_params must be a dict, got {sampling_params!r:.80}")
        calls = self._calls if isinstance(self._calls, Calls) else await self._table()
        argument = [ids, sampling_params, _files("image_data", image_data), _files("video_data", video_data)]
        parts = Continuing(ids.size, sampling_params.get("max_new_tokens"))
        output = await self._generate(calls, request_id, argument, parts)
        return output if isinstance(prompt_ids, np.ndarray) else _as_lists(output)

    async def _generate(self, calls: Calls, request_id: str, argument: Sequence[Any], parts: Continuing) -> TokenOutput:
        """By one call, and further ones for what was broken off: those go ahead of fresh ones."""
        until = None if self._timeout is None else calls.now() + self._timeout
        timeout, attempt, fruitless = self._timeout, 1, 0
        while True:
            value = await calls.call(
                self._pool,
                "generate",
                argument,
                session=request_id,
                group=self._group,
                attempt=attempt,
                timeout=timeout,
                on_progress=parts.take,
                renew=parts.renew,
            )
            output = unpack_output(value)
            if output.stop_reason != "abort" or not self._partial_rollout:
                return parts.whole(output)
            fruitless = 0 if len(output.token_ids) else fruitless + 1
            if fruitless == FRUITLESS:
                raise TransientError(f"{FRUITLESS} calls in a row were broken off before their first token")
            if fruitless > 1:  # once is what an update does to whatever waits
                await calls.back_off(fruitless - 1, until)
            argument, attempt = parts.aborted(output, argument), 2
            timeout = None if until is None else max(0.0, until - calls.now())

    async def parse_tool_calls(self, format: str, text: str, schemas: list[dict[str, Any]]) -> list[Any]:
        """[text around the calls, [[name, arguments, id, error or None], …]], as SGLang's parser ``format`` reads the
        turn ``text``. Raises `InvalidRequest`, `TransientError`, `DeadlineExceeded`; `ConfigError` without SGLang."""
        calls = await self._table()
        argument = [format, text, schemas]
        return await calls.call(self._pool, "parse_tool_calls", argument, timeout=self._timeout)  # type: ignore[no-any-return]

    async def end_session(self, request_id: str) -> None:
        """The trajectory with that id is over; its engine need not be remembered."""
        (await self._table()).end_session(self._pool, request_id)


def _files(name: str, items: Sequence[bytes | np.ndarray] | None) -> list[np.ndarray] | None:
    """As uint8 arrays, which become frames of their own. Raises `InvalidRequest`."""
    return None if items is None else [_file(f"{name}[{number}]", item) for number, item in enumerate(items)]


def _file(name: str, item: bytes | np.ndarray) -> np.ndarray:
    if isinstance(item, (bytes, bytearray, memoryview)):
        return np.frombuffer(item, np.uint8)
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim == 1:
        return item
    raise InvalidRequest(f"{name} must be the bytes of an encoded file, got {type(item).__name__}")


def pack_output(output: TokenOutput) -> list[Any]:
    """A `TokenOutput` as the body of a reply (positional: it is the most frequent body there is)."""
    return [
        output.token_ids,
        output.log_probs,
        output.stop_reason,
        output.versions,
        output.cached_tokens,
        output.num_preempted,
        output.routed_experts,
        output.extra_fields,
    ]


def unpack_output(value: list[Any]) -> TokenOutput:
    """The `TokenOutput` that `pack_output` described, with (read-only) arrays."""
    ids, log_probs, stop_reason, versions, cached, preempted, experts, extra = value
    spans = [(version, start, end) for version, start, end in versions]
    return TokenOutput(ids, log_probs, stop_reason, experts, preempted, spans, cached, extra)


def _as_lists(output: TokenOutput) -> TokenOutput:
    ids, log_probs = np.asarray(output.token_ids), output.log_probs
    lists = None if log_probs is None else np.asarray(log_probs).tolist()
    return replace(output, token_ids=ids.tolist(), log_probs=lists)
