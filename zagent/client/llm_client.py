"""`AsyncLLMServerManager`: tokens in, tokens out, on whichever engine the broker chooses. For workers and trainers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from zagent.client.calls import Calls
from zagent.errors import InvalidRequest
from zagent.types import Ids, TokenOutput, int_array

#: The pool that `generate` calls go to.
ENGINE_POOL = "engine"


class AsyncLLMServerManager:
    """Generates on the engine pool (verl's class of that name).

    Args:
        calls: the pending table of a link, or an async function that gives one for the running loop.
        timeout: seconds one generate may take in all; None = no limit.
    """

    def __init__(self, calls: Calls | Callable[[], Awaitable[Calls]], timeout: float | None = None) -> None:
        self._calls = calls
        self._timeout = timeout

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

        Args:
            request_id: the session: calls with the same one go to the same engine, whose prefix cache knows them.
            prompt_ids: list of ints, or int32 array [tokens]; the answer's ids and log-probabilities come back in
                the same form.
            sampling_params: SGLang's names, plus `logprobs` (bool). Not changed.
            image_data, video_data: encoded files.

        Raises:
            InvalidRequest: this call cannot be run (bad ids, unknown sampling key, too long …).
            TransientError, DeadlineExceeded: no engine could answer.
        """
        ids = int_array(prompt_ids)
        if ids is None:
            raise InvalidRequest("prompt_ids must be a one-dimensional list or array of 32-bit ints")
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id must be text, got {request_id!r}")
        calls = await self._table()
        argument = [ids, sampling_params, _media(image_data), _media(video_data)]
        value = await calls.call(ENGINE_POOL, "generate", argument, session=request_id, timeout=self._timeout)
        return unpack_output(value, as_lists=not isinstance(prompt_ids, np.ndarray))

    async def end_session(self, request_id: str) -> None:
        """The trajectory with that id is over; its engine need not be remembered."""
        (await self._table()).end_session(ENGINE_POOL, request_id)


def _media(items: Sequence[bytes] | None) -> list[bytes] | None:
    return None if items is None else list(items)


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


def unpack_output(value: list[Any], *, as_lists: bool) -> TokenOutput:
    """The `TokenOutput` that `pack_output` described; ids and log-probabilities as lists or as (read-only) arrays."""
    ids, log_probs, stop_reason, versions, cached, preempted, experts, extra = value
    if as_lists:
        ids = ids.tolist()
        log_probs = None if log_probs is None else log_probs.tolist()
    spans = [(version, start, end) for version, start, end in versions]
    return TokenOutput(ids, log_probs, stop_reason, experts, preempted, spans, cached, extra)
