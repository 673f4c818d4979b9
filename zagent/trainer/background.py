"""What a trainer's data loader gives, without holding up the event loop that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


async def pulled(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncIterator[Item]:
    """``items`` one by one, each asked for when it is wanted; those of an ordinary iterable in a thread."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    source: Iterator[Item] = iter(items)
    while (found := await asyncio.to_thread(next, source, _END)) is not _END:
        yield found  # type: ignore[misc]
