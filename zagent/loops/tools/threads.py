"""Synchronous tools, each call in a thread of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from zagent.loops.threads import started


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of ``function``: awaited if it is a coroutine function, else run in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of ``function(*args, **kwargs)``, run in a new thread with the caller's context variables.

    There is no pool: a call that blocks for good would keep one of its threads from all other trajectories, and the
    end of the process would wait for it. So there are as many threads as blocking calls, at most
    `worker.max_in_flight` times `multi_turn.max_parallel_calls` beside those left behind. Cancelling leaves the thread
    behind; Python cannot stop it.
    """
    result, error = await started(partial(function, *args, **kwargs), f"tool {getattr(function, '__name__', 'call')}")
    if error is not None:
        raise error
    return result
