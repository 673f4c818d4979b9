"""The user's synchronous functions in threads: results, errors, limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from support.virtual_clock import run
from zagent.errors import CallCancelled, DeadlineExceeded
from zagent.loops.threads import Threads, started

WHO: ContextVar[str] = ContextVar("who", default="nobody")


def test_a_result_is_given() -> None:
    """From a daemon thread of the name that was asked for, which knows the caller's context variables."""

    async def main() -> Any:
        WHO.set("row 3")
        return await started(lambda: (WHO.get(), threading.current_thread().name), "tool x")

    assert asyncio.run(main()) == (("row 3", "tool x"), None)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), StopIteration(1)], ids=repr)
def test_an_error_is_given_as_a_value(error: BaseException) -> None:
    """Whatever it is; the event loop lives."""

    def fail() -> None:
        raise error

    async def main() -> Any:
        return await started(fail)

    assert asyncio.run(main()) == (None, error)


def test_a_late_answer_disturbs_nobody() -> None:
    """The loop has ended when the thread returns."""
    gate, threads = threading.Event(), []

    def late() -> None:
        threads.append(threading.current_thread())
        gate.wait()

    async def main() -> None:
        started(late)

    asyncio.run(main())
    gate.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's function gives the virtual seconds that its thread takes, and then its result."""

    def later(function: Callable[[], float]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_later(function(), lambda: future.done() or future.set_result((loop.time(), None)))
        return future

    monkeypatch.setattr("zagent.loops.threads.started", later)


async def times(threads: Threads, *seconds: float, limit: float = 100.0) -> list[Any]:
    """When each of several calls ended; None = not in time."""
    calls = (threads.run(lambda n=one: n, limit) for one in seconds)  # type: ignore[misc]
    found = await asyncio.gather(*calls, return_exceptions=True)
    return [None if isinstance(one, DeadlineExceeded) else one for one in found]


@pytest.mark.usefixtures("virtual")
def test_calls_wait_for_a_place_and_their_time_has_not_begun() -> None:
    """Two at once; the last begins at 9 and has its 5 seconds."""
    assert run(times(Threads(at_once=2, computes_s=50), 4, 5, 5, 4, 4, limit=5)) == [4, 5, 9, 9, 13]


@pytest.mark.usefixtures("virtual")
def test_a_call_that_takes_long_makes_room() -> None:
    """After `computes_s`; it still ends at its own time."""
    assert run(times(Threads(at_once=1, computes_s=2), 60, 1, 1)) == [60, 3, 4]


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("computes_s", [2, 50])
def test_the_limit_holds_before_and_after_a_call_has_made_room(computes_s: float) -> None:
    """Others are not touched."""
    assert run(times(Threads(computes_s=computes_s), 10.5, 9.5, 1e9, limit=10)) == [None, 9.5, None]


def test_a_limit_is_told() -> None:
    """`DeadlineExceeded`, of a thread that blocks for real."""
    gate = threading.Event()
    try:
        with pytest.raises(DeadlineExceeded, match=r"the call took longer than 0\.05 s"):
            asyncio.run(Threads().run(gate.wait, 0.05))
    finally:
        gate.set()


def test_a_cancellation_of_the_functions_own_is_an_error() -> None:
    """`CallCancelled`: nobody has cancelled the caller."""

    def fail() -> None:
        raise asyncio.CancelledError

    with pytest.raises(CallCancelled, match="though nobody cancelled it"):
        asyncio.run(Threads().run(fail, 5))
