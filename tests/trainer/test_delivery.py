"""Threads for the trainer's weights, and process groups that do not come about."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from zagent.config import EngineConfig
from zagent.errors import InputError, InvalidRequest, WeightUpdateError
from zagent.trainer import delivery
from zagent.trainer.delivery import Broadcasts, in_thread


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

    def __init__(self, *engines: str) -> None:
        self.engines, self.asked = engines, list[str]()

    async def there(self, pool: str, timeout: float) -> dict[str, int]:
        return dict.fromkeys(self.engines, 1)

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
    control = Refusing("engine-0")

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


def test_no_group_is_made_without_engines() -> None:
    """They have been waited for."""
    config: Any = EngineConfig(kind="sim")
    broadcasts = Broadcasts(Refusing(), config, "127.0.0.1")  # type: ignore[arg-type]
    with pytest.raises(WeightUpdateError, match="none is there"):
        asyncio.run(broadcasts.prepare({"w": torch.zeros(1)}, None))


# ---- the trainer's code ---------------------------------------------------------------------------------------------


def raising(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("signal", [StopIteration("x"), StopAsyncIteration("x"), asyncio.CancelledError("x")], ids=repr)
def test_what_would_pass_for_an_end_or_a_cancel_is_an_error(signal: BaseException) -> None:
    """No future can hold the first; nobody has made the last."""
    with pytest.raises(RuntimeError, match=f"the weights raised {type(signal).__name__}: x") as caught:
        asyncio.run(in_thread(raising, signal))
    assert caught.value.__cause__ is signal


@pytest.mark.parametrize("error", [InputError("no"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_other_errors_come_as_they_are(error: BaseException) -> None:
    """Also those that end a process."""
    with pytest.raises(type(error)):
        asyncio.run(in_thread(raising, error))


def test_a_cancel_is_over_when_the_thread_is() -> None:
    """A source that is read on must not meet the next update's."""

    async def main() -> None:
        begun, over = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            loop.call_soon_threadsafe(begun.set)
            over.wait()

        working = asyncio.create_task(in_thread(work))
        await begun.wait()
        working.cancel()
        await asyncio.wait((working,), timeout=0.05)
        assert not working.done()
        over.set()
        with pytest.raises(asyncio.CancelledError):
            await working

    asyncio.run(main())


def test_a_thread_that_blocks_keeps_nothing_from_ending() -> None:
    """A second cancel, of the end of the loop, leaves it alone, and so does the interpreter."""
    over = threading.Event()

    async def main() -> None:
        working = asyncio.create_task(in_thread(over.wait))
        for _ in range(2):
            await asyncio.sleep(0)
            working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    before = set(threading.enumerate())
    asyncio.run(main())
    (left,) = set(threading.enumerate()) - before
    assert left.daemon
    over.set()
    left.join()
