"""The server manager that one sample's loop gets: seeds by turn, sessions ended, what was generated counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zagent.client.calls import Calls
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.loops.seeds import seed_for
from zagent.types import Ids, StopReason, TokenOutput


class SampleServerManager(AsyncLLMServerManager):
    """Generates for one trajectory.

    Args:
        calls: the worker's pending table.
        seed_key: `Row.seed_key`; engine call k of the trajectory is seeded with `seed_for(*seed_key, k)`, unless the
            loop sets `sampling_seed` itself. Simulated engines honour it; SGLang only in its deterministic mode.
    """

    def __init__(self, calls: Calls, seed_key: Sequence[Any]) -> None:
        super().__init__(calls)
        self._seed: Callable[[int], int] = partial(seed_for, *seed_key)
        self._turn = 0
        self._sessions: set[str] = set()
        #: Over all calls: prompt tokens sent, those found in the prefix cache, weight versions seen.
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.versions: set[int] = set()
        self.last_stop_reason: StopReason | None = None

    async def generate(
        self,
        request_id: str,
        prompt_ids: Ids,
        sampling_params: dict[str, Any],
        image_data: Sequence[bytes] | None = None,
        video_data: Sequence[bytes] | None = None,
    ) -> TokenOutput:
        seed = self._seed(self._turn)
        self._turn += 1
        self._sessions.add(request_id)
        params = {"sampling_seed": seed, **sampling_params}
        output = await super().generate(request_id, prompt_ids, params, image_data, video_data)
        self.prompt_tokens += len(prompt_ids)
        self.cached_tokens += output.cached_tokens
        self.versions.update(version for version, _, _ in output.versions)
        self.last_stop_reason = output.stop_reason
        return output

    async def end_sessions(self) -> None:
        """The trajectory is over."""
        for session in self._sessions:
            await self.end_session(session)
