"""One call of one tool: created, executed and released under deadlines, whatever it does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from zagent.loops.tools.base import BaseTool, ToolContext
from zagent.loops.tools.schema import context_parameter
from zagent.loops.tools.text import Answer, as_reward, read_result
from zagent.loops.tools.threads import call

logger = logging.getLogger(__name__)

#: Seconds a tool may take to end once it is cancelled, and to release. Together with `GRACE_S` for a release that
#: ignores its end, less than a cancelled trajectory is given (`worker.runner.CANCEL_GRACE_S`).
GRACE_S = 1.0
RELEASE_TIMEOUT_S = 5.0

#: What a tool's part of a row's `tools_kwargs` may hold for its methods; each a dict.
METHOD_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")

#: Releases under way; the event loop itself holds no reference to a task.
_RELEASING: set[asyncio.Task[Any]] = set()


class TimedOut(Exception):
    """The tool took longer than `multi_turn.tool_timeout`."""


async def invoke(
    tool: BaseTool, arguments: dict[str, Any], context: ToolContext, timeout: float
) -> Answer | BaseException:
    """What the tool gave (its reward, if `execute` gives none, from `calc_reward`), or what it raised, or `TimedOut`.

    A tool that goes on past its end (blocks in a thread, ignores its cancellation) is left behind. `release` runs once
    if `create` was begun, also where the caller is cancelled.
    """
    use = _Use(tool, context)
    task = asyncio.ensure_future(_contained(use.run, arguments))
    try:
        await asyncio.wait((task,), timeout=timeout)
        in_time = task.done()
    finally:
        try:
            await _stop(task, tool.name)
        finally:
            await use.end()
    if not in_time:
        return TimedOut()
    answer, error = task.result()
    return answer if error is None else error


async def _contained(function: Callable[..., Awaitable[Any]], *args: Any) -> tuple[Any, BaseException | None]:
    try:
        return await function(*args), None
    except BaseException as error:  # SystemExit would end the event loop if it got out of a task
        return None, error


async def _stop(task: asyncio.Future[Any], name: str) -> None:
    if task.done():
        return
    task.cancel()
    await asyncio.wait((task,), timeout=GRACE_S)
    if not task.done():
        logger.warning("tool %r goes on though it was cancelled %g s ago: left behind", name, GRACE_S)


class _Use:
    """The instance behind one call."""

    def __init__(self, tool: BaseTool, context: ToolContext) -> None:
        self._tool = tool
        self._context = context
        self._instance = uuid4().hex
        self._begun = False

    async def run(self, arguments: dict[str, Any]) -> Answer:
        self._begun = True
        created = await self._call("create")
        created = created[0] if isinstance(created, tuple) and created else created
        if created is not None:  # verl's tools may make an id of their own
            self._instance = created
        response, reward, metrics = read_result(await self._call("execute", arguments))
        if reward is None:
            reward = as_reward(await self._call("calc_reward"))
        return response, reward, metrics

    async def end(self) -> None:
        """Release, as a task of its own: a second cancellation ends the waiting and not the release."""
        if not self._begun:
            return
        task = asyncio.ensure_future(self._release())
        _RELEASING.add(task)
        task.add_done_callback(_RELEASING.discard)
        await asyncio.wait((task,), timeout=RELEASE_TIMEOUT_S + GRACE_S)

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._call("release")
        except BaseException as error:
            logger.warning("release of tool %r failed: %s: %s", self._tool.name, type(error).__name__, error)

    async def _call(self, method: str, *args: Any) -> Any:
        function = getattr(self._tool, method)
        keywords = dict(self._context.kwargs.get(f"{method}_kwargs") or {})
        wanted = context_parameter(function)
        if wanted is not None:
            keywords[wanted] = self._context
        return await call(function, self._instance, *args, **keywords)
