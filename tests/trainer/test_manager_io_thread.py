"""One thread with a loop: synchronous calls from anywhere, and nobody waits for ever when it closes."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from zagent.errors import ConnectionLost
from zagent.trainer import io_thread
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


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_an_error_that_leaves_the_loop_comes_back_and_the_loop_goes_on(io: IoThread, error: BaseException) -> None:
    """asyncio lets these through: whoever waits gets his, and nobody else notices."""
    begun = threading.Event()

    async def broken() -> None:
        raise error

    async def other() -> str:
        begun.set()
        await asyncio.sleep(0.01)
        return "done"

    others = io.submit(other())
    assert begun.wait(10)
    for _ in range(2):
        with pytest.raises(type(error)):
            io.run(broken())
    assert others.result(10) == "done"
    assert io.run(thread_name()) == "test-io"


def test_whatever_ends_the_loop_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """Its pending work fails, by an error that says what happened, and so does later work."""
    io, started = IoThread("test-io"), threading.Event()

    async def work() -> None:
        started.set()
        await asyncio.get_running_loop().create_future()

    def broken(*arguments: object) -> None:
        raise OSError("bad file descriptor")

    waiting = io.submit(work())
    assert started.wait(10)
    io.loop._run_once = broken  # type: ignore[attr-defined]
    io.loop.call_soon_threadsafe(lambda: None)  # so that it comes round
    with pytest.raises(ConnectionLost, match="has lost its event loop: OSError: bad file descriptor"):
        waiting.result(10)
    with pytest.raises(ConnectionLost, match="has lost its event loop"):
        io.run(thread_name())
    io.close()
    assert "the event loop of test-io has ended" in caplog.text


def test_work_that_will_not_end_does_not_outlive_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It swallows every cancel: whoever waits for it is told that nothing will come."""
    monkeypatch.setattr(io_thread, "SETTLE_S", 0.01)
    io, started, ended = IoThread("test-io"), threading.Event(), []

    async def work() -> None:
        started.set()
        while not ended:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    waiting = io.submit(work())
    assert started.wait(10)
    io.close()
    ended.append(True)
    with pytest.raises(ConnectionLost, match="is closed"):
        waiting.result(10)


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


@pytest.mark.parametrize(("error", "told"), [(ConnectionLost("gone"), False), (KeyError("k"), True)], ids=repr)
def test_a_connection_lost_after_an_interrupt_is_no_news(
    error: Exception, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Work that was cancelled tidies up while the manager closes: nobody waits for what comes of it. Other errors are
    told all the same."""
    io, started = IoThread("test-io"), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            raise error

    future = io.submit(work())
    assert started.wait(10)
    future.cancel()
    io.close()
    del future  # which knows the task
    gc.collect()
    assert ("Task exception was never retrieved" in caplog.text) == told
