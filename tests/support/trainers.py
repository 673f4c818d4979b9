"""A trainer in a cluster in memory: what its manager uses for weights, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.cluster_in_memory import Cluster
from support.weights import weights_directory
from zagent.client.calls import Calls
from zagent.client.llm_client import AsyncLLMServerManager
from zagent.config import EngineConfig
from zagent.engine.server import EngineServer
from zagent.trainer import delivery, weights
from zagent.trainer.control import Control
from zagent.trainer.gate import Gate
from zagent.trainer.weights import Weights, WeightUpdate

#: (Virtual) seconds that a write takes.
WRITE_S = 1.0


@pytest.fixture
def written_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread would be out of the virtual clock's sight."""

    async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(WRITE_S)
        return function(*arguments)

    for module in (delivery, weights):
        monkeypatch.setattr(module, "in_thread", inline)


@dataclass
class Trainer:
    """Its parts; ``place`` is where its directories lie."""

    calls: Calls
    control: Control
    gate: Gate
    weights: Weights
    llm: AsyncLLMServerManager
    place: Path

    async def update(
        self, mode: Any = "wait", *, version: int | None = None, source: Any = None, size: int = 4
    ) -> WeightUpdate:
        """From a directory beside ``place``, unless there is another ``source``."""
        if source is None:
            source = weights_directory(self.place.parent / f"source-{size}", size)
        return await self.weights.update(source, version, mode)

    def written(self) -> list[str]:
        """Names of the directories that are there."""
        return sorted(path.name for path in self.place.glob("*"))


async def trainer(cluster: Cluster, place: Path, reference: Path | None = None, **config: Any) -> Trainer:
    calls = await cluster.caller()
    control = Control(calls)
    gate = Gate(calls, control)
    options = EngineConfig(kind="sim", **config)
    made = Weights(
        calls, control, gate, options, directory=place / "own", reference=reference, address="127.0.0.1"
    )  # fmt: skip
    return Trainer(calls, control, gate, made, AsyncLLMServerManager(calls), place / "own")


def loading(server: EngineServer, seconds: float, error: Exception | None = None) -> list[str]:
    """New weights take the engine so long from now on, or end in an error; the directories it was told to load."""
    load, asked = server.engine.update_weights, []

    async def update_weights(directory: str, version: int, *, flush: bool) -> None:
        asked.append(directory)
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        await load(directory, version, flush=flush)

    server.engine.update_weights = update_weights  # type: ignore[method-assign]
    return asked
