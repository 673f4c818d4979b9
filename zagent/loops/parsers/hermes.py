r"""Hermes' format, which the Qwen family writes too: ``<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>``."""

from __future__ import annotations

import json
import re
from typing import Any

from zagent.loops.parsers.base import FunctionCall, ParsedTurn, json_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"

#: Newlines inside JSON strings are taken as they are: models write code that way.
_DECODER = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


class HermesParser:
    """Finds each call's end with a JSON decoder, so that a closing tag inside a string is part of the string."""

    async def parse(self, text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
        """See `ToolParser`."""
        return read_turn(text)


def read_turn(text: str) -> ParsedTurn:
    """All calls in ``text``. The last may lack its closing tag if its JSON is complete: models stop there."""
    calls: list[FunctionCall] = []
    around, position = [], 0
    while (start := text.find(OPEN, position)) >= 0:
        around.append(text[position:start])
        found, position = _read_block(text, start + len(OPEN))
        calls.extend(found)
    around.append(text[position:])
    return ParsedTurn("".join(around).strip(), calls)


def _read_block(text: str, start: int) -> tuple[list[FunctionCall], int]:
    """The calls of the block whose content begins at ``start``, and where the text goes on."""
    begin = _skip_space(text, start)
    if text.startswith("<", begin):  # json counts the lines up to each error: slow over thousands of bare tags
        return _unreadable(text, start, "is not valid JSON: there is none")
    try:
        value, end = _DECODER.raw_decode(text, begin)
        calls = _calls(value)  # written as JSON again: what was read at the depth that Python allows may be too deep
    except (ValueError, RecursionError) as error:
        return _unreadable(text, start, f"is not valid JSON: {_reason(error)}")
    end = _skip_space(text, end)
    if text.startswith(CLOSE, end):
        return calls, end + len(CLOSE)
    if end == len(text) or text.startswith(OPEN, end):
        return calls, end
    return _unreadable(text, start, "is not valid JSON: more text after its end")


def _unreadable(text: str, start: int, why: str) -> tuple[list[FunctionCall], int]:
    """One call with an error. It ends at the next tag: nothing tells which tags are inside a string."""
    following = text.find(OPEN, start)
    end = after = following if following >= 0 else len(text)
    close = text.find(CLOSE, start, end)  # no further: an answer may be thousands of opening tags
    if close >= 0:
        end, after = close, close + len(CLOSE)
    return [unreadable_call(text[start:end], why)], after


def unreadable_call(block: str, why: str) -> FunctionCall:
    """A call that is answered with ``why``; its name if ``block`` tells one."""
    named = _NAME.search(block)
    name = named[1] if named else ""
    subject = f"the call of {name!r}" if name else "a tool call"
    return FunctionCall(name, block.strip(), error=f"Error: {subject} {why}")


def _calls(value: Any) -> list[FunctionCall]:
    """Several calls may share one block, as a list."""
    return [_call(one) for one in (value if isinstance(value, list) and value else [value])]


def _call(value: Any) -> FunctionCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return unreadable_call(json.dumps(value), 'must be an object {"name": …, "arguments": {…}}')
    return FunctionCall(name, _as_text(value.get("arguments", value.get("parameters", {}))))


def _as_text(arguments: Any) -> str:
    """As JSON text; some models encode it twice."""
    return arguments if isinstance(arguments, str) else json_text(arguments)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
