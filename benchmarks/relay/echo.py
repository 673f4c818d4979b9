"""zagent's engine process, with an engine that answers at once: what is measured is the layer, not the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.relay.traffic import VOCABULARY, answer
from zagent.client.process import run_main
from zagent.engine.base import Death, EngineInfo, GenerateRequest, Progress, token_budget
from zagent.engine.server import serve
from zagent.types import TokenOutput


class EchoEngine:
    """Fulfils `zagent.engine.base.Engine`; answers by `traffic.answer`."""

    died: asyncio.Future[Death]
    info = EngineInfo(vocab_size=VOCABULARY, context_length=1 << 20)

    async def start(self) -> None:
        self.died = asyncio.get_running_loop().create_future()

    async def generate(self, request: GenerateRequest, progress: Progress | None = None) -> TokenOutput:
        budget = token_budget(request.sampling_params, request.prompt_ids.size, self.info)
        ids, log_probs = answer(request.prompt_ids, budget)
        return TokenOutput(ids, log_probs, "length", versions=[(0, 0, len(ids))])

    async def clear_cache(self) -> None:
        """There is none."""

    def in_flight(self) -> int:
        return 0

    async def close(self) -> None:
        """Nothing to free."""


def main(settings: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Entry point, as `zagent.engine.server.main`; settings as far as `serve` reads them."""
    run_main(serve(settings, [EchoEngine() for _ in settings["members"]], ready))
