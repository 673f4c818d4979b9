"""Tools of all kinds, and a parser that finds a call in any text: what simulated engines say means nothing."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import zagent

#: Arguments that each tool is called with; {} where it is not named.
ARGUMENTS = {"no_object": "[1, 2]", "half": '{"a": 1', "misfit": '{"number": "many"}'}


@zagent.register_parser("always")
def parse(text: str, schemas: list[dict[str, Any]]) -> zagent.ParsedTurn:
    """A call of the first tool of the row."""
    name = schemas[0]["function"]["name"]
    called = "nobody" if name == "stranger" else name
    return zagent.ParsedTurn(text, [zagent.FunctionCall(called, ARGUMENTS.get(name, "{}"))])


@zagent.tool
def good() -> str:
    """Works."""
    return "fine"


@zagent.tool
def raises() -> str:
    """Raises."""
    raise RuntimeError("no luck")


@zagent.tool
def exits() -> str:
    """Would end the worker."""
    sys.exit(3)


@zagent.tool
async def hangs() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


@zagent.tool
def hangs_in_a_thread() -> str:
    """Never answers, and cannot be cancelled."""
    threading.Event().wait()
    return ""


@zagent.tool
def huge() -> str:
    """Ten million characters."""
    return "x" * 10**7


@zagent.tool
def no_text() -> Any:
    """Something that is no text."""
    return object()


@zagent.tool
def no_image() -> zagent.ToolResponse:
    """A picture that is none."""
    return zagent.ToolResponse(image=[b"not an image"])


@zagent.tool
def no_object() -> str:
    """Called with a list."""
    return "never"


@zagent.tool
def half() -> str:
    """Called with half an object."""
    return "never"


@zagent.tool
def misfit(number: int) -> str:
    """Called with text for a number."""
    return "never"


@zagent.tool
def stranger() -> str:
    """Another name is called."""
    return "never"
