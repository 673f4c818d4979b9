"""One thread with a loop: synchronous calls from anywhere, and nobody waits for ever when it closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from zagent.errors import ConnectionLost
from zagent.trainer.io_thread import IoThread


@pytest.fixture
def io() -> Iterator[IoThread]:
    made = IoThread("test-io")
    yield made
    made.close()


async def thread_name() -> str:
    return threading.current_thread().name


def test_work_runs_in_the_thread(io: IoThread) -> None:
    """And its result comes back."""
    assert io.run(thread_name()) == "test-io"


def test_an_error_comes_back_as_itself(io: IoThread) -> None:
    """With its class."""

    async def broken() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        io.run(broken())


def test_a_synchronous_call_works_inside_a_running_loop(io: IoThread) -> None:
    """As in a notebook."""

    async def main() -> str:
        return io.run(thread_name())

    assert asyncio.run(main()) == "test-io"


def test_cancelling_the_future_cancels_the_work(io: IoThread) -> None:
    """On the loop."""
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    future = io.submit(work())
    assert started.wait(10)
    future.cancel()
    assert ended.wait(10)


def test_closing_wakes_who_waits() -> None:
    """A thread that waits for work gets CancelledError, instead of waiting for ever."""
    io, started, ends = IoThread("test-io"), threading.Event(), []

    async def work() -> None:
        started.set()
        await asyncio.sleep(60)

    def wait() -> None:
        try:
            io.run(work())
        except CancelledError as error:
            ends.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert started.wait(10)
    io.close()
    waiter.join(10)
    assert len(ends) == 1


def test_closing_lets_what_was_woken_finish() -> None:
    """Work that ends by itself keeps its own result."""
    io = IoThread("test-io")

    async def work() -> str:
        for _ in range(20):
            await asyncio.sleep(0)
        return "done"

    future = io.submit(work())
    io.close()
    assert future.result(10) == "done"


def test_after_close_work_is_refused() -> None:
    """At once, as a lost connection; closing twice does no harm."""
    io = IoThread("test-io")
    io.close()
    io.close()
    with pytest.raises(ConnectionLost):
        io.run(thread_name())


def test_closing_ends_the_thread() -> None:
    """And the loop."""
    io = IoThread("test-io")
    io.close()
    assert io.loop.is_closed()
    assert "test-io" not in {thread.name for thread in threading.enumerate()}
