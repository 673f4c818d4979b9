"""A data loader beside an event loop: it may block, and whatever it raises is the trainer's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from zagent.data_proto import DataProto
from zagent.errors import InputError
from zagent.trainer.background import Pulled, as_error

STRANGE = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), OSError("disk gone")]
SIGNALS = [asyncio.CancelledError("why"), concurrent.futures.CancelledError("why")]


class Broken:
    """Two items, then the error, again and again; as an iterator, and as an asynchronous one."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.given = error, 0

    def __iter__(self) -> Broken:
        return self

    def __next__(self) -> int:
        if self.given == 2:
            raise self.error
        self.given += 1
        return self.given


class BrokenAsync(Broken):
    def __aiter__(self) -> BrokenAsync:
        return self

    async def __anext__(self) -> int:
        return next(self)

    __iter__ = None  # type: ignore[assignment]


async def all_of(pulled: Pulled[Any]) -> list[Any]:
    return [item async for item in pulled]


def test_an_ordinary_iterator_is_asked_in_one_thread_of_its_own() -> None:
    """The event loop is not held up, and a generator never changes threads."""
    threads = set()

    def source() -> Iterator[int]:
        for i in range(20):
            threads.add(threading.current_thread())
            yield i

    assert asyncio.run(all_of(Pulled(source()))) == list(range(20))
    (thread,) = threads
    assert thread is not threading.main_thread()
    assert thread.daemon


def test_an_asynchronous_one_is_awaited() -> None:
    """Where it is."""

    async def source() -> AsyncIterator[int]:
        yield 1
        yield 2

    assert asyncio.run(all_of(Pulled(source()))) == [1, 2]


def test_none_is_an_item() -> None:
    """Not the end."""
    assert asyncio.run(all_of(Pulled([None, 1, None]))) == [None, 1, None]


def test_after_the_end_is_the_end() -> None:
    """Also where the iterator would begin again."""

    async def main() -> list[list[int]]:
        pulled = Pulled([1])
        return [await all_of(pulled), await all_of(pulled)]

    assert asyncio.run(main()) == [[1], []]


@pytest.mark.parametrize("kind", [Broken, BrokenAsync])
@pytest.mark.parametrize("error", STRANGE, ids=repr)
def test_any_error_is_the_loaders_own(kind: type[Broken], error: BaseException) -> None:
    """Also those that end threads, loops and generators; again when asked again."""

    async def main() -> list[int]:
        pulled, found = Pulled(kind(error)), []
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                async for item in pulled:
                    found.append(item)  # noqa: PERF401
            assert caught.value is error
        return found

    assert asyncio.run(main()) == [1, 2]


@pytest.mark.parametrize("kind", [Broken, BrokenAsync])
@pytest.mark.parametrize("error", SIGNALS, ids=["asyncio", "futures"])
def test_a_cancel_that_is_not_ours_is_an_error(kind: type[Broken], error: BaseException) -> None:
    """It passes neither for the end nor for a cancel of the task that waits."""

    async def main() -> None:
        pulled = Pulled(kind(error))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the data loader raised CancelledError: why") as caught:
                await all_of(pulled)
            assert isinstance(caught.value.__cause__, type(error))

    asyncio.run(main())


@pytest.mark.parametrize("error", [StopIteration(1), StopAsyncIteration(2)], ids=repr)
def test_an_end_in_the_wrong_place_is_an_error(error: BaseException) -> None:
    """`iter` has none, and an ordinary iterator does not end by the asynchronous one."""

    class Unopened:
        def __iter__(self) -> Any:
            raise error

    with pytest.raises(RuntimeError, match=f"the data loader raised {type(error).__name__}"):
        asyncio.run(all_of(Pulled(Unopened())))


def test_giving_up_an_item_leaves_it_to_the_next_who_asks() -> None:
    """A cancel of ours is one; the thread's step goes on."""
    items: SimpleQueue[int] = SimpleQueue()

    async def main() -> list[int]:
        pulled = Pulled(iter(items.get, 0))
        waiting = asyncio.ensure_future(anext(pulled))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for item in (1, 2, 0):
            items.put(item)
        return await all_of(pulled)

    assert asyncio.run(main()) == [1, 2]


def test_close_ends_the_thread() -> None:
    """Between two items."""

    async def main() -> Pulled[int]:
        pulled = Pulled(iter(range(9)))
        await anext(pulled)
        return pulled

    pulled = asyncio.run(main())
    pulled.close()
    pulled.close()
    for thread in threading.enumerate():
        if thread.name == "zagent-data-loader":
            thread.join(10)
            assert not thread.is_alive()


def test_a_signal_is_nobody_elses_where_no_loop_runs() -> None:
    """Outside of tasks nothing of ours is cancelled."""
    assert isinstance(as_error(asyncio.CancelledError(), "weights"), RuntimeError)
    same = KeyError("k")
    assert as_error(same, "weights") is same


PROGRAM = """
import asyncio, queue
from zagent.trainer.background import Pulled

async def main():
    pulled = Pulled(iter(queue.SimpleQueue().get, None))
    asking = asyncio.ensure_future(anext(pulled))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.wait([asking])
    pulled.close()

asyncio.run(main())
print("at the end")
"""


def test_a_loader_that_blocks_does_not_keep_the_process_from_ending() -> None:
    """It waits for ever; the process does not wait for it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "at the end\n"), done.stderr


@pytest.mark.parametrize(
    ("items", "said"), [(5, "is an iterable of zagent.DataProto, got int"), (DataProto(), "put it into a list")]
)
def test_what_is_no_data_loader_is_refused(items: Any, said: str) -> None:
    """A number, and a single batch, whose rows would be taken for batches."""
    with pytest.raises(InputError, match=said):
        Pulled(items)
