"""Running a turn's calls: together, each under its deadline, to one result each, whatever the tools do."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zagent.config import MultiTurnConfig
from zagent.errors import InputError
from zagent.loops.parsers.base import FunctionCall
from zagent.loops.tools.base import BadArguments, ToolContext
from zagent.loops.tools.lifecycle import METHOD_KWARGS, TimedOut, invoke
from zagent.loops.tools.text import error_text, printable, truncate
from zagent.loops.tools.toolbox import Toolbox
from zagent.types import AgentLoopMetrics

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ToolResult:
    """What became of one call. ``text`` is truncated already; ``ok`` is False for errors and skipped calls."""

    call: FunctionCall
    text: str
    images: list[bytes] = field(default_factory=list)
    videos: list[bytes] = field(default_factory=list)
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    ok: bool = False
    seconds: float = 0.0

    def message(self) -> dict[str, Any]:
        """The tool message, paired with its call by id; images and videos are parts of the content, before the text."""
        parts = [{"type": "image", "image": one} for one in self.images]
        parts += [{"type": "video", "video": one} for one in self.videos]
        if self.text:
            parts.append({"type": "text", "text": self.text})
        content = parts if self.images or self.videos else self.text
        name = self.call.name or "unknown"
        return {"role": "tool", "content": content, "name": name, "tool_call_id": self.call.id}


async def run_calls(
    toolbox: Toolbox,
    calls: Sequence[FunctionCall],
    context: ToolContext,
    limits: MultiTurnConfig,
    metrics: AgentLoopMetrics,
) -> list[ToolResult]:
    """One result for each of ``calls``, in their order.

    The first `limits.max_parallel_calls` are run together; the others are answered as skipped. A tool that raises,
    takes longer than `limits.tool_timeout` or is not there, and arguments that are no JSON object, give a result that
    says so, with reward 0.0. Each tool's context has its part of the row's `tools_kwargs`. ``metrics`` are added to:
    `tool_calls` (seconds) and the counts. Cancelling cancels the running tools and still releases them.

    Raises:
        InputError: the row's `tools_kwargs` is not ``{tool: {…}}``.
    """
    kwargs = {call.name: tools_kwargs(context.row, call.name) for call in calls}
    clock = asyncio.get_running_loop().time
    started = clock()
    run, skipped = calls[: limits.max_parallel_calls], calls[limits.max_parallel_calls :]
    running = (_timed(toolbox, call, replace(context, kwargs=kwargs[call.name]), limits) for call in run)
    results = await asyncio.gather(*running)
    metrics.tool_calls += clock() - started
    metrics.tool_calls_ok += sum(result.ok for result in results)
    metrics.tool_calls_failed += sum(not result.ok for result in results)
    metrics.tool_calls_skipped += len(skipped)
    results += [ToolResult(call, _skipped(limits.max_parallel_calls)) for call in skipped]
    for result in results:
        text = printable(result.text)
        result.text = truncate(text, limits.max_tool_response_length, limits.tool_response_truncate_side)
    return results


def tools_kwargs(row: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of the tool ``name`` of a row's `tools_kwargs`. Raises `InputError`."""
    found = row.get("tools_kwargs") or {}
    own = found.get(name) or {} if isinstance(found, dict) else None
    if not isinstance(own, dict) or not all(isinstance(own.get(key) or {}, dict) for key in METHOD_KWARGS):
        raise InputError(f"tools_kwargs must be a map {{tool: {{create_kwargs: …}}}}, got {found!r:.200}")
    return own


def _skipped(limit: int) -> str:
    return f"Error: skipped: only {limit} {'call per turn is' if limit == 1 else 'calls per turn are'} run"


async def _timed(toolbox: Toolbox, call: FunctionCall, context: ToolContext, limits: MultiTurnConfig) -> ToolResult:
    clock = asyncio.get_running_loop().time
    started = clock()
    result = await _answer(toolbox, call, context, limits)
    result.seconds = clock() - started
    return result


async def _answer(toolbox: Toolbox, call: FunctionCall, context: ToolContext, limits: MultiTurnConfig) -> ToolResult:
    try:
        arguments = _checked(toolbox, call)
    except BadArguments as error:
        return ToolResult(call, str(error))
    tool = toolbox.get(call.name)
    assert tool is not None
    answer = await invoke(tool, arguments, context, limits.tool_timeout)
    if isinstance(answer, BaseException):
        return ToolResult(call, _told(call.name, answer, limits.tool_timeout))
    response, reward, metrics = answer
    return ToolResult(
        call, response.text or "", response.image or [], response.video or [], reward or 0.0, metrics, ok=True
    )  # fmt: skip


def _told(name: str, error: BaseException, timeout: float) -> str:
    if isinstance(error, TimedOut):
        return f"Error: tool {name!r} timed out after {timeout:g}s"
    if isinstance(error, BadArguments):
        return f"Error: arguments of {name!r} do not fit: {error}"
    _log_once(name, error)
    return error_text(name, error)


#: (tool, where it raised) of what has been logged: a broken tool fails thousands of times.
_LOGGED: set[tuple[str, str]] = set()


def _log_once(name: str, error: BaseException) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    place = (name, f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else repr(error))
    if place not in _LOGGED:
        _LOGGED.add(place)
        logger.warning("tool %r failed (logged once per place)", name, exc_info=error)


def _checked(toolbox: Toolbox, call: FunctionCall) -> dict[str, Any]:
    """The arguments of a call that can be run; else `BadArguments` with what the model is told."""
    if call.error is not None:
        raise BadArguments(call.error)
    if toolbox.get(call.name) is None:
        raise BadArguments(f"Error: unknown tool {call.name!r}; available: {', '.join(toolbox.names) or 'none'}")
    try:
        return read_arguments(call.arguments)
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"Error: arguments of {call.name!r} are not a JSON object: {error}") from error


def read_arguments(text: str) -> dict[str, Any]:
    """The JSON object in ``text``. Raises `ValueError` (NaN and infinities are not JSON), `RecursionError`."""
    found = json.loads(text, parse_constant=_no_constant)
    if not isinstance(found, dict):
        raise ValueError(f"got {text:.100}")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
