"""What every member process does around its work: choose an event loop, note the stop signal, contain what users' tasks
do, end in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from zagent.client.link import Link

Result = TypeVar("Result")


def run_main(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on the loop of `loop_factory`."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Of uvloop where it is installed (SGLang brings it): its callbacks and turns take a quarter of what a call costs
    either end. None = asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made


def stop_requested() -> asyncio.Event:
    """An event that SIGTERM sets (the handler only notes; the loop acts). Call on the running loop, main thread."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, event.set)
    return event


async def stopped(stop: asyncio.Event, link: Link) -> str:
    """Wait until ``stop`` is set (gives ""), or ``link`` is closed by the other side (gives why)."""
    loop = asyncio.get_running_loop()
    ends: set[asyncio.Task[Any]] = {loop.create_task(stop.wait()), loop.create_task(link.wait_closed())}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return link.closed


def end_cut_off(name: str, reason: str) -> NoReturn:
    """The end of a member that the broker has let go of: whatever still runs here, it runs for nobody."""
    print(f"{name} ends, cut off from the broker: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def contained(error: type[Exception], whose: str) -> Callable[..., asyncio.Task[Any]]:
    """A task factory: `sys.exit()` or KeyboardInterrupt in a task is an ``error`` like others, which says ``whose`` it
    was. asyncio would end the event loop, and with it everybody's work, for what one of the user's tasks has done.
    """

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        async def run() -> Any:
            try:
                return await coroutine
            except (SystemExit, KeyboardInterrupt) as end:
                raise error(f"{whose} raised {end!r}") from end

        task = asyncio.Task(run(), loop=loop, **options)
        task.add_done_callback(lambda _: coroutine.close())  # it never began if the task was cancelled at once
        return task

    return make
