"""Process groups that do not come about."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from zagent.config import EngineConfig
from zagent.errors import InvalidRequest
from zagent.trainer import delivery
from zagent.trainer.delivery import Broadcasts


class Group:
    """One whose other members never come."""

    address, port, world_size, backend = "127.0.0.1", 1, 2, "gloo"
    over = threading.Event()

    def __init__(self, name: str, size: int, **options: Any) -> None:
        self.name = name

    def join(self) -> None:
        self.over.wait()

    def close(self) -> None:
        """There is nothing."""


class Refusing:
    """A control whose engines take no tensors."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def epochs(self, pool: str) -> dict[str, int]:
        return {"engine-0": 1}

    async def on_each(self, pool: str, method: str, arguments: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        self.asked.append(method)
        raise InvalidRequest("no tensors")


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(delivery, "TrainerGroup", Group)
    Group.over.clear()
    yield
    Group.over.set()


def test_a_refused_group_is_waited_for_by_nobody() -> None:
    """The engines' error comes at once. The event loop ends, and no thread is left that the interpreter would wait
    for."""
    control = Refusing()

    async def main() -> None:
        config: Any = EngineConfig(kind="sim")
        broadcasts = Broadcasts(control, config, "127.0.0.1")  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="no tensors"):
                await broadcasts.prepare({"w": torch.zeros(1)}, None)

    before, began = set(threading.enumerate()), time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 5
    assert control.asked == ["join_group"] * 2
    left = set(threading.enumerate()) - before
    assert (len(left), {thread.daemon for thread in left}) == (2, {True})
