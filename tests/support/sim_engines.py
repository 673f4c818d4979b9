"""Started simulated engines and requests for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zagent.config import SimConfig
from zagent.engine.base import GenerateRequest
from zagent.engine.sim import SimEngine, build
from zagent.types import TokenOutput


async def started(index: int = 0, *, checkpoint_tokens: int = 0, **sim: Any) -> SimEngine:
    engine = build(sim=SimConfig(**sim), name=f"engine-{index}", index=index, checkpoint_tokens=checkpoint_tokens)
    await engine.start()
    return engine


def request(prompt_ids: Sequence[int] | np.ndarray, tokens: int | None = 8, **sampling_params: Any) -> GenerateRequest:
    if tokens is not None:
        sampling_params["max_new_tokens"] = tokens
    return GenerateRequest("rid", np.asarray(prompt_ids, np.int32), sampling_params)


def answer_now(engine: SimEngine, call: GenerateRequest) -> TokenOutput:
    """The answer of an engine without latency, without an event loop's help: it must not suspend."""
    coroutine = engine.generate(call)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    coroutine.close()
    raise AssertionError("the engine suspended")
