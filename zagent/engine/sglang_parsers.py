"""Tool calls as SGLang reads them (0.5.23), without what its readers lose: ids, undeclared names, broken calls."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from zagent.errors import ConfigError, InvalidRequest

logger = logging.getLogger(__name__)

#: [name, arguments (JSON text), id ("" = the format has none), error or None]
Call = list[Any]

#: What begins each single call, in formats that have such a mark: calls that are missing can be counted.
_MARKS = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "trinity", "mimo", "ling3", "spark25"), "<tool_call>"),
    **dict.fromkeys(("glm", "glm45", "glm47"), "<tool_call>"),
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige"), "<function="),
    **dict.fromkeys(("deepseekv3", "deepseekv31"), "<｜tool▁call▁begin｜>"),
    "iquest_q1": "<iquest_tool_call>",
    "k2_horizon": "<ifm|tool_call>",
    "kimi_k2": "<|tool_call_begin|>",
}
_KIMI_ID = re.compile(r"<\|tool_call_begin\|>\s*([^\s<|]+)\s*<\|tool_call_argument_begin\|>")
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


def parse(format: str, text: str, schemas: Sequence[dict[str, Any]], tokenizer: Any = None) -> tuple[str, list[Call]]:
    """(text around the calls, the calls), as SGLang's parser ``format`` finds them.

    Undeclared names are kept: whoever runs the calls says so to the model. Calls that SGLang gives up on come last,
    with an error and the name if it can be told.

    Args:
        text: a whole turn with its special tokens.
        schemas: the tools, in OpenAI's form; some formats take the types of arguments from them.
        tokenizer: the model's; `response_template` and `hunyuan` look at it.

    Raises:
        InvalidRequest: no such format, one that this model does not have, or schemas that SGLang cannot read.
        ConfigError: SGLang is not installed here.
    """
    given, text = text, _as_generated(format, text)
    tools = _tools(schemas)
    detector = _detector(format, tools, tokenizer)
    present = detector.has_tool_call(text)
    try:
        found = detector.detect_and_parse(text, tools)
    except Exception as error:  # brackets nested a thousand times, for one
        logger.info("SGLang's parser %r failed on a turn: %s: %s", format, type(error).__name__, error)
        return text, [_lost_call(format, text, [])]
    if not found.calls and not present:
        return given, []
    calls: list[Call] = [[item.name or "", item.parameters, "", None] for item in found.calls]
    _add_ids(format, text, calls)
    lost = _lost(format, text, calls)
    return found.normal_text, [*calls, *([_lost_call(format, text, calls)] * lost)]


def _as_generated(format: str, text: str) -> str:
    """gpt-oss' reader wants the header that the prompt ends with, and the stop token of a call."""
    if format != "gpt-oss":
        return text
    text = text if text.startswith("<|start|>") else "<|start|>assistant" + text
    head, _, body = text.rpartition("<|message|>")
    to_a_tool = "to=" in head.rpartition("<|start|>")[2]
    return f"{text}<|call|>" if to_a_tool and not _HARMONY_END.search(body) else text


@cache
def _sglang() -> tuple[Any, Callable[[Any], Any]]:
    """(FunctionCallParser, reader of a tool's schema). Takes seconds the first time, in a process without an engine."""
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        raise ConfigError(
            f"rollout.multi_turn.format: SGLang's formats need the sglang extra in the engines' environment: {error}"
        ) from error
    envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)
    return FunctionCallParser, Tool.model_validate


def _tools(schemas: Sequence[dict[str, Any]]) -> list[Any]:
    read = _sglang()[1]
    try:
        return [read(schema) for schema in schemas]
    except ValueError as error:
        raise InvalidRequest(f"tool schemas that SGLang cannot read: {error}") from error


def _detector(format: str, tools: list[Any], tokenizer: Any) -> Any:
    """A fresh one: they keep state."""
    try:
        return _sglang()[0](tools, format, tokenizer=tokenizer).detector
    except ValueError as error:
        raise InvalidRequest(f"rollout.multi_turn.format={format!r}: {error}") from error


def _add_ids(format: str, text: str, calls: list[Call]) -> None:
    """The ids in the text, where there is one for every call; SGLang drops them."""
    if format == "kimi_k2":
        ids = _KIMI_ID.findall(text)
    elif format == "mistral":
        ids = _mistral_ids(text)
    else:
        return
    if len(ids) == len(calls):
        for call, found in zip(calls, ids, strict=True):
            call[2] = found


def _mistral_ids(text: str) -> list[str]:
    """`[TOOL_CALLS] [{"name": …, "arguments": …, "id": …}]`"""
    start = text.find("[", text.find("[TOOL_CALLS]") + len("[TOOL_CALLS]"))
    try:
        array, _ = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return []
    ids = [call.get("id", "") if isinstance(call, dict) else "" for call in array]
    return [found if isinstance(found, str) else "" for found in ids]


def _lost(format: str, text: str, calls: list[Call]) -> int:
    """Calls in ``text`` that are not among ``calls``: by the marks outside the arguments, else all or none."""
    mark = _MARKS.get(format)
    if mark is None:
        return 0 if calls else 1
    inside: int = sum(call[1].count(mark) for call in calls)
    return max(text.count(mark) - inside - len(calls), 0 if calls else 1)


def _lost_call(format: str, text: str, calls: list[Call]) -> Call:
    read = {call[0] for call in calls}
    name = next((name for name in _NAME.findall(text) if name not in read), "")
    subject = f"the call of {name!r}" if name else "a tool call"
    return [name, "", "", f"Error: {subject} cannot be read: its arguments are incomplete or not valid ({format})"]
