"""The threads that all rows of a worker wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from zagent import alive
from zagent.loops.tokenizer import in_tokenizer_thread
from zagent.loops.vision import in_images_thread


@pytest.mark.parametrize(
    ("in_thread", "whose"),
    [(in_tokenizer_thread, "the tokenizer's thread"), (in_images_thread, "the images' thread")],
)
def test_their_work_is_a_lag_of_the_process(
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, and not afterwards, whether it returned or raised: a template that loops for ever blocks all rows,
    and is seen as a blocked event loop is."""
    monkeypatch.setattr(alive, "_signs", alive._Signs())

    def work() -> Any:
        alive.mark()
        return alive.longest()

    def fail() -> None:
        raise ValueError

    async def main() -> Any:
        during = await in_thread(work)
        with pytest.raises(ValueError):
            await in_thread(fail)
        return during

    during = asyncio.run(main())
    assert during[1] == whose
    alive.mark()
    assert alive.longest()[1] == "the event loop"  # type: ignore[index]
