"""The server manager that one sample's loop gets: seeds by turn, a token limit, sessions ended, answers counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from zagent.client.calls import Calls
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.loops.seeds import seed_for
from zagent.types import Ids, TokenOutput
from zagent.worker.sampled import Sampled
from zagent.worker.trace import RowTrace, named


class SampleServerManager(AsyncLLMServerManager):
    """Generates for one trajectory.

    Args:
        calls: the worker's pending table.
        seed_key: `Row.seed_key`; engine call k of the trajectory is seeded with `seed_for(*seed_key, k)`, unless the
            loop sets `sampling_seed` itself. Simulated engines honour it; SGLang only in its deterministic mode. Rows
            that differ in the sample alone have the same prompt: their calls form a group.
        response_length: `max_new_tokens` of calls that do not say it; engines would go on to the context's end.
        trace: told of each call.
        partial_rollout: as in `AsyncLLMServerManager`.
    """

    def __init__(
        self,
        calls: Calls,
        seed_key: Sequence[Any],
        response_length: int,
        trace: RowTrace | None = None,
        *,
        partial_rollout: bool = True,
    ) -> None:
        super().__init__(calls, group=prompt_group(*seed_key[1:4]), partial_rollout=partial_rollout)
        self._trace = trace
        self._response_length = response_length
        self._seed: Callable[[int], int] = partial(seed_for, *seed_key)
        self._turn = 0
        self._sessions: set[str] = set()
        self.sampled = Sampled()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Ids,
        sampling_params: dict[str, Any],
        image_data: Sequence[bytes] | None = None,
        video_data: Sequence[bytes] | None = None,
    ) -> TokenOutput:
        turn = self._turn
        self._turn += 1
        self._sessions.add(request_id)
        limit = sampling_params.get("max_tokens", self._response_length)
        params = {"sampling_seed": self._seed(turn), "max_new_tokens": limit, **without_max_tokens(sampling_params)}
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            output = await super().generate(request_id, prompt_ids, params, image_data, video_data)
        except Exception as error:
            if self._trace is not None:
                self._trace("generate", call=turn, request=request_id, seconds=clock() - started, error=named(error))
            raise
        seconds = clock() - started
        self.sampled.add(len(output.extra_fields.get("prompt_token_ids", prompt_ids)), output, seconds)
        if self._trace is not None:
            await self._trace.generated(turn, request_id, prompt_ids, output, seconds)
        return output

    async def end_sessions(self) -> None:
        """The trajectory is over."""
        for session in self._sessions:
            await self.end_session(session)


def prompt_group(step: int, validate: bool, uid: Any) -> str:
    """What the calls of all samples of one prompt, and no others, have in common."""
    return blake2b(json.dumps([step, validate, uid]).encode(), digest_size=8).hexdigest()  # headers stay short


def without_max_tokens(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """A copy without `max_tokens`, OpenAI's name for what SGLang calls `max_new_tokens`."""
    return {key: value for key, value in sampling_params.items() if key != "max_tokens"}
