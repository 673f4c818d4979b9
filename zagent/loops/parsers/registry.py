"""Parsers by name, and the ids of the calls they find."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from zagent.client.llm_client import AsyncLLMServerManager
from zagent.errors import ConfigError, LoopError
from zagent.loops.parsers.base import FunctionCall, ParsedTurn, ToolParser
from zagent.loops.parsers.hermes import HermesParser
from zagent.loops.parsers.pythonic import PythonicParser
from zagent.loops.parsers.sglang import SGLANG_FORMATS, SGLangParser

Function = Callable[[str, list[dict[str, Any]]], ParsedTurn | Awaitable[ParsedTurn]]
Registered = TypeVar("Registered", bound="type[ToolParser] | Function")

#: In the worker itself. SGLang's `qwen` and `qwen25` are Hermes' format by another name; its own readers end a call at
#: the first closing tag, one inside a string too.
_BUILT_IN: dict[str, type[ToolParser]] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25"), HermesParser),
    "pythonic": PythonicParser,
}
_REGISTRY: dict[str, Any] = {}


def register_parser(name: str) -> Callable[[Registered], Registered]:
    """Decorator: `multi_turn.format` may be ``name``. For a `ToolParser` class that is built without arguments, or for
    a function ``(text, schemas) -> ParsedTurn``, async or not. Wins over zagent's and SGLang's parsers of that name."""

    def decorate(parser: Registered) -> Registered:
        _REGISTRY[name] = parser
        return parser

    return decorate


def parser_names() -> list[str]:
    """All that `find_parser` knows."""
    return sorted({*_REGISTRY, *_BUILT_IN, *SGLANG_FORMATS})


def find_parser(name: str, llm: AsyncLLMServerManager) -> ToolParser:
    """A parser for one trajectory: it gives every call an id that is unique in it.

    Args:
        name: `multi_turn.format`.
        llm: reaches the engines, which read SGLang's formats.

    Raises:
        ConfigError: there is none of that name; lists the names.
    """
    return WithIds(_build(name, llm))


def _build(name: str, llm: AsyncLLMServerManager) -> ToolParser:
    found: Any = _REGISTRY.get(name) or _BUILT_IN.get(name)
    if isinstance(found, type):
        return found()  # type: ignore[no-any-return]
    if found is not None:
        return FunctionParser(name, found)
    if name in SGLANG_FORMATS:
        return SGLangParser(name, llm)
    raise ConfigError(f"rollout.multi_turn.format={name!r}: no such parser; known: {', '.join(parser_names())}")


class FunctionParser:
    """A registered function as parser."""

    def __init__(self, name: str, function: Function) -> None:
        self._name = name
        self._function = function

    async def parse(self, text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
        """See `ToolParser`."""
        found = self._function(text, schemas)
        turn = await found if inspect.isawaitable(found) else found
        if not isinstance(turn, ParsedTurn):
            raise LoopError(f"parser {self._name!r} must return a ParsedTurn, got {type(turn).__name__}")
        return turn


class WithIds:
    """Keeps the ids that a format has, and makes those that are missing or used already in the trajectory.

    Made ids are counted, not drawn: some templates write them into the prompt, which must be the same when a row runs
    again. They have nine letters and digits, which is what Mistral's templates insist on.
    """

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._used: set[str] = set()
        self._made = 0

    async def parse(self, text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
        """See `ToolParser`."""
        turn = await self._parser.parse(text, schemas)
        for call in turn.calls:
            if not isinstance(call.name, str) or not isinstance(call.arguments, str):
                raise LoopError(f"the parser gave a call whose name or arguments are no text: {call!r:.200}")
            self._name(call)
            call.name, call.arguments = _encodable(call.name), _encodable(call.arguments)
        return turn

    def _name(self, call: FunctionCall) -> None:
        while not call.id or call.id in self._used:
            call.id = f"call{self._made:05d}"
            self._made += 1
        self._used.add(call.id)


def _encodable(text: str) -> str:
    """Without lone surrogates: the conversation has to cross the wire."""
    return text.encode("utf-8", "replace").decode()
