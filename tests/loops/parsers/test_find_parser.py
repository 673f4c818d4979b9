"""Parsers by name, and the ids of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import zagent
from zagent.errors import ConfigError, LoopError
from zagent.loops.parsers import FunctionCall, ParsedTurn, find_parser, parser_names, registry
from zagent.loops.parsers.sglang import SGLANG_FORMATS

ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Engines:
    """Answers `parse_tool_calls`."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def parse_tool_calls(self, format: str, text: str, schemas: list[dict[str, Any]]) -> list[Any]:
        self.asked.append((format, text, schemas))
        return ["around", [["add", '{"a": 1}', "functions.add:0", None], ["", "", "", "Error: half"]]]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has its own."""
    monkeypatch.setattr(registry, "_REGISTRY", {})
    yield


def parse(name: str, *texts: str, engines: Any = None) -> list[ParsedTurn]:
    async def main() -> list[ParsedTurn]:
        parser = find_parser(name, engines)
        return [await parser.parse(text, [{"s": 1}]) for text in texts]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "text"), [("hermes", ADD), ("qwen", ADD), ("qwen25", ADD), ("pythonic", "[add(a=1)]")]
)
def test_some_formats_are_read_in_the_worker(name: str, text: str) -> None:
    """No engine is asked."""
    call = parse(name, text)[0].calls[0]
    assert (call.name, call.arguments) == ("add", '{"a": 1}')


def test_sglangs_formats_are_read_by_an_engine() -> None:
    """With the text and the schemas; ids and errors come through."""
    engines = Engines()
    turn = parse("kimi_k2", "text", engines=engines)[0]
    assert engines.asked == [("kimi_k2", "text", [{"s": 1}])]
    assert turn == ParsedTurn(
        "around",
        [FunctionCall("add", '{"a": 1}', "functions.add:0"), FunctionCall("", "", "call00000", "Error: half")],
    )


def test_made_ids_are_unique_in_a_trajectory_and_the_same_when_it_runs_again() -> None:
    """Nine letters and digits, as Mistral's templates want them; the same call in two turns has two ids."""
    first, second = (parse("hermes", ADD + ADD, ADD) for _ in range(2))
    ids = [call.id for turn in first for call in turn.calls]
    assert len(set(ids)) == 3
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert ids == [call.id for turn in second for call in turn.calls]


def test_ids_that_come_twice_are_replaced() -> None:
    """Pitfall E6: results are paired by them."""

    @zagent.register_parser("mine")
    def mine(text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
        return ParsedTurn("", [FunctionCall("a", id="x"), FunctionCall("b", id="x"), FunctionCall("c", id="call00000")])

    turns = parse("mine", "", "")
    ids = [call.id for turn in turns for call in turn.calls]
    assert ids[0] == "x"
    assert len(set(ids)) == 6


@pytest.mark.parametrize("kind", ["class", "function", "async"])
def test_a_parser_of_ones_own_is_registered_by_name(kind: str) -> None:
    """A class, a function or an async one; it wins over ours and SGLang's."""

    def plain(text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
        return ParsedTurn(text, [FunctionCall("own", str(len(schemas)))])

    async def later(text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
        return plain(text, schemas)

    class Parser:
        async def parse(self, text: str, schemas: list[dict[str, Any]]) -> ParsedTurn:
            return plain(text, schemas)

    thing: Any = {"class": Parser, "function": plain, "async": later}[kind]
    for name in ("mine", "hermes", "llama3"):
        assert zagent.register_parser(name)(thing) is thing
        assert parse(name, "text")[0] == ParsedTurn("text", [FunctionCall("own", "1", "call00000")])
    assert "mine" in parser_names()


def test_a_function_must_return_a_parsed_turn() -> None:
    """Anything else is its author's error."""
    zagent.register_parser("mine")(lambda text, schemas: [])  # type: ignore[arg-type, return-value]
    with pytest.raises(LoopError, match="parser 'mine' must return a ParsedTurn, got list"):
        parse("mine", "")


@pytest.mark.parametrize("call", [FunctionCall("add", {"a": 1}), FunctionCall(None)], ids=repr)  # type: ignore[arg-type]
def test_a_call_must_be_text(call: FunctionCall) -> None:
    """Arguments are JSON text, not what that says."""
    zagent.register_parser("mine")(lambda text, schemas: ParsedTurn(text, [call]))
    with pytest.raises(LoopError, match="the parser gave a call whose name or arguments are no text: FunctionCall"):
        parse("mine", "")


def test_lone_surrogates_become_question_marks() -> None:
    """The conversation has to cross the wire, and names and arguments are part of it."""
    zagent.register_parser("mine")(lambda text, schemas: ParsedTurn(text, [FunctionCall("a\ud800", '"\udfff"')]))
    assert parse("mine", "")[0].calls == [FunctionCall("a?", '"?"', "call00000")]


def test_an_unknown_format_lists_the_known_ones() -> None:
    """At the start of a worker."""
    with pytest.raises(
        ConfigError, match=r"rollout.multi_turn.format='nope': no such parser; known: apertus2509, .*trinity"
    ):
        find_parser("nope", Engines())  # type: ignore[arg-type]
    assert set(SGLANG_FORMATS) <= set(parser_names())
