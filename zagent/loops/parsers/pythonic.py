"""Llama 4's format: ``[tool(argument="text", other=1), second()]``.

SGLang has a reader for it, whose regular expression takes exponential time (a call of 40 arguments without its closing
bracket: days) and holds the engine's process meanwhile.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from zagent.loops.parsers.base import FunctionCall, ParsedTurn, json_text

_MARKS = re.compile(r"<\|python_(?:start|end)\|>")
_START = re.compile(r"\[\s*([A-Za-z_][\w.]*)\(\s*(?:\)|\w+\s*=)")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_TOKEN = re.compile(r"'''|\"\"\"|['\"]|[()\[\]{}]|\\.", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class PythonicParser:
    """Reads the first list of calls with Python's own parser."""

    async def parse(self, text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
        """See `ToolParser`."""
        return read_turn(_MARKS.sub("", text))


def read_turn(text: str) -> ParsedTurn:
    """The calls of the first list in ``text``."""
    start = _START.search(text)
    if start is None:
        return ParsedTurn(text.strip())
    end = _end_of_list(text, start.start())
    around = f"{text[: start.start()]}{text[end:]}".strip()
    source = text[start.start() : end]
    try:
        with warnings.catch_warnings(action="ignore"):  # "\d" in a string
            tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = getattr(error, "msg", None) or type(error).__name__
        return ParsedTurn(around, [_unreadable(start[1], source, f"is not valid Python: {why}")])
    elements = tree.elts if isinstance(tree, ast.List) else [tree]
    written = _Source(source)
    return ParsedTurn(around, [_call(element, written) for element in elements])


class _Source:
    """What nodes were written as. `ast.get_source_segment` splits the whole source for each."""

    def __init__(self, source: str) -> None:
        self._bytes = source.encode()
        self._lines = [0, *(end.end() for end in re.finditer(rb"\r\n|\r|\n", self._bytes))]

    def of(self, node: ast.expr) -> str:
        assert node.end_lineno is not None and node.end_col_offset is not None  # parsed from text
        start = self._lines[node.lineno - 1] + node.col_offset
        return self._bytes[start : self._lines[node.end_lineno - 1] + node.end_col_offset].decode()


def _end_of_list(text: str, start: int) -> int:
    """Behind the bracket that closes the one at ``start``; the text's end if none does."""
    open_brackets: list[str] = []
    quote = ""
    for token in _TOKEN.finditer(text, start):
        mark = token[0]
        if quote:
            quote = "" if mark == quote else quote
        elif mark[0] in "'\"":
            quote = mark
        elif mark in _BRACKETS:
            open_brackets.append(_BRACKETS[mark])
        elif open_brackets and mark == open_brackets[-1]:
            open_brackets.pop()
            if not open_brackets:
                return token.end()
    return len(text)


def _call(node: ast.expr, source: _Source) -> FunctionCall:
    written = source.of(node)
    if not isinstance(node, ast.Call):
        return _unreadable("", written, "must be name(argument=value)")
    name = source.of(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return _unreadable(name, written, "must give every argument by its name")
    try:
        arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
        return FunctionCall(name, json_text(arguments, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        return _unreadable(name, written, f"has a value that is not JSON: {error}")


def _value(node: ast.expr) -> Any:
    """A literal, with JSON's words for those of Python."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key) if key else "": _value(one) for key, one in zip(node.keys, node.values, strict=True)
        }
    return ast.literal_eval(node)


def _unreadable(name: str, written: str, why: str) -> FunctionCall:
    subject = f"the call of {name!r}" if name else "a tool call"
    return FunctionCall(name, written, error=f"Error: {subject} {why}")
