"""The trainer's code that runs beside it, its data loader above all: what it raises reaches the trainer as it is, and
holds up no event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

from zagent.data_proto import DataProto
from zagent.errors import InputError

Item = TypeVar("Item")
#: By these Python ends iterators and tasks: a foreign one would be taken for the end of the data, or for a cancel of
#: one's own.
SIGNALS = (StopIteration, StopAsyncIteration, asyncio.CancelledError, concurrent.futures.CancelledError)

WHO = "the data loader"


def as_error(error: BaseException, who: str, kind: type[Exception] = RuntimeError) -> BaseException:
    """What ``who`` raised here, so that it can be raised again: itself, also where it is no `Exception`. A signal
    becomes an error of that ``kind`` with the signal as its cause (in generators a `RuntimeError`, too: PEP 479),
    unless it is the running task that was cancelled."""
    if not isinstance(error, SIGNALS) or (isinstance(error, asyncio.CancelledError) and _is_cancelled()):
        return error
    made = kind(f"{who} raised {type(error).__name__}" + (f": {error}" if str(error) else ""))
    made.__cause__ = error
    return made


def raise_again(error: BaseException, who: str, kind: type[Exception] = RuntimeError) -> NoReturn:
    """`as_error`, raised."""
    raise as_error(error, who, kind)


def _is_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return False
    return task is not None and task.cancelling() > 0


class Pulled(AsyncIterator[Item]):
    """What a data loader gives, item by item as it is wanted. For one task at a time, on one loop.

    An ordinary iterable is asked in a thread, always the same one. It is a daemon: a loader that blocks does not keep
    the process from ending. After the end, or an error, there is the same again.
    """

    def __init__(self, items: Iterable[Item] | AsyncIterable[Item]) -> None:
        """Raises `InputError` for what gives no items, and for a single batch."""
        if isinstance(items, DataProto):
            raise InputError("one DataProto is no data loader: put it into a list")
        if not isinstance(items, (Iterable, AsyncIterable)):
            raise InputError(f"{WHO} is an iterable of zagent.DataProto, got {type(items).__name__}")
        self._items = items
        self._source: AsyncIterator[Item] | None = None
        self._end: BaseException | None = None

    def __aiter__(self) -> Pulled[Item]:
        return self

    async def __anext__(self) -> Item:
        if self._end is not None:
            raise self._end
        try:
            if self._source is None:
                self._source = aiter(self._items) if isinstance(self._items, AsyncIterable) else _InThread(self._items)
            return await anext(self._source)
        except StopAsyncIteration as end:
            self._end = end
        except BaseException as error:
            found = as_error(error, WHO)
            if isinstance(found, asyncio.CancelledError):  # nobody wants the item any more
                raise
            self._end = found
        raise self._end

    def close(self) -> None:
        """The thread ends as soon as the iterator lets it."""
        if isinstance(self._source, _InThread):
            self._source.close()


@dataclass(frozen=True, slots=True)
class _Step:
    """Of an iterator in its thread. An error is a value here: a future takes signals for its own."""

    item: Any = None
    ended: bool = False
    error: BaseException | None = None


_Steps = SimpleQueue[asyncio.Future[_Step] | None]
_END = object()


class _InThread(AsyncIterator[Item]):
    def __init__(self, items: Iterable[Item]) -> None:
        self._wanted: _Steps = SimpleQueue()
        self._step: asyncio.Future[_Step] | None = None  # that was asked for
        self.close = weakref.finalize(self, self._wanted.put, None)
        thread = threading.Thread(target=_serve, args=[items, self._wanted], name="zagent-data-loader", daemon=True)
        thread.start()

    async def __anext__(self) -> Item:
        if self._step is None:
            self._step = asyncio.get_running_loop().create_future()
            self._wanted.put(self._step)
        await asyncio.wait([self._step])  # cancelled, it leaves the step for the next who asks
        step, self._step = self._step.result(), None
        if step.error is not None:
            raise as_error(step.error, WHO)
        if step.ended:
            raise StopAsyncIteration
        item: Item = step.item
        return item


def _serve(items: Iterable[Any], wanted: _Steps) -> None:
    """The thread: a step for each future, until there is None."""
    source: Iterator[Any] | None = None
    while (future := wanted.get()) is not None:
        try:
            source = iter(items) if source is None else source
            item = next(source, _END)
            step = _Step(item, ended=item is _END)
        except BaseException as error:
            step = _Step(error=error)
        try:
            future.get_loop().call_soon_threadsafe(future.set_result, step)
        except RuntimeError:  # that loop is closed
            return
        if step.ended or step.error is not None:
            return
