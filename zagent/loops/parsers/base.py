"""What a parser makes of a turn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class FunctionCall:
    """One call as the model wrote it.

    ``arguments`` is JSON text, not checked yet. ``id`` pairs the call with its result; a parser leaves it empty where
    the format has none. ``error`` says what is wrong with a call that cannot be read: it is answered with that text
    and not run (``name`` is then empty if it cannot be told).
    """

    name: str
    arguments: str = "{}"
    id: str = ""
    error: str | None = None


@dataclass(slots=True)
class ParsedTurn:
    """The calls of one turn in their order, and the text around them."""

    content: str
    calls: list[FunctionCall] = field(default_factory=list)


def json_text(value: Any, *, allow_nan: bool = True) -> str:
    """``value`` as JSON for `FunctionCall.arguments`. Lone surrogates, which models write as escapes, stay escapes: as
    characters they cross no wire. Raises as `json.dumps`."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=allow_nan)
    return text


class ToolParser(Protocol):
    """Reads one format."""

    async def parse(self, text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
        """The calls in ``text``: a whole turn with its special tokens, without the final stop token. A call that
        cannot be read is a `FunctionCall` with an error, never an exception. ``schemas`` are the tools' (OpenAI's
        form); calls of other names are kept."""
