"""Hermes' format, well written and not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zagent.loops.parsers.hermes import HermesParser, read_turn

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def found(text: str) -> list[tuple[str, Any]]:
    """(name, arguments) of each call; its error instead of the arguments of one that cannot be read."""
    return [(call.name, call.error or json.loads(call.arguments)) for call in read_turn(text).calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        ("", "", []),
        (ADD, "", [("add", {"a": 1})]),
        (f"before {ADD} between {ADD}\nafter", "before  between \nafter", [("add", {"a": 1})] * 2),
        (ADD.replace("\n", ""), "", [("add", {"a": 1})]),
        (ADD.removesuffix("</tool_call>"), "", [("add", {"a": 1})]),
        (ADD.removesuffix("\n</tool_call>"), "", [("add", {"a": 1})]),
        (ADD.removesuffix("</tool_call>") + ADD, "", [("add", {"a": 1})] * 2),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', "", [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", None)]),
        ('<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>', "", [("a", {}), ("b", {})]),
        ('<tool_call>{"name": "run", "arguments": {"code": "a\nb"}}</tool_call>', "", [("run", {"code": "a\nb"})]),
        ("</tool_call> alone", "</tool_call> alone", []),
    ],
)
def test_calls_and_the_text_around_them(text: str, content: str, calls: list[Any]) -> None:
    """Any number; the last may lack its end; arguments encoded twice, missing, or as a list of calls."""
    assert read_turn(text).content == content
    assert found(text) == calls


@pytest.mark.parametrize("tag", ["</tool_call>", "<tool_call>", "</tool_call><tool_call>"])
def test_a_literal_tag_in_a_string_is_part_of_the_string(tag: str) -> None:
    """The contract's sentence; a regular expression would end the call there."""
    text = f'<tool_call>{{"name": "say", "arguments": {{"text": "a {tag} b"}}}}</tool_call> then {ADD}'
    assert found(text) == [("say", {"text": f"a {tag} b"}), ("add", {"a": 1})]
    assert read_turn(text).content == "then"


@pytest.mark.parametrize(
    ("block", "name", "told"),
    [
        ('{"name": "add", "arguments": {"a": 1', "add", "Error: the call of 'add' is not valid JSON: "),
        ('{"arguments": {', "", "Error: a tool call is not valid JSON: "),
        ("", "", "Error: a tool call is not valid JSON: "),
        ('{"name": "add"}}', "add", "Error: the call of 'add' is not valid JSON: more text after its end"),
        ("3", "", "Error: a tool call must be an object"),
        ("[]", "", "Error: a tool call must be an object"),
        ('{"name": 3, "arguments": {}}', "", "Error: a tool call must be an object"),
        ('{"name": "", "arguments": {}}', "", "Error: a tool call must be an object"),
        ('{"name": "deep", "arguments": ' + "[" * 100_000, "deep", "not valid JSON: nested too deeply"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_and_its_siblings_are_kept(block: str, name: str, told: str) -> None:
    """Pitfall E2: with its name if there is one."""
    turn = read_turn(f"{ADD}<tool_call>{block}</tool_call>x{ADD}")
    assert [call.error is None for call in turn.calls] == [True, False, True]
    assert turn.calls[1].name == name
    assert told in str(turn.calls[1].error)
    assert turn.content == "x"


def test_no_depth_of_arguments_raises() -> None:
    """What Python's reader just takes, its writer may not."""
    for depth in range(800, 1000):
        (call,) = read_turn(f'<tool_call>{{"name": "deep", "arguments": {"[" * depth}{"]" * depth}}}</tool_call>').calls
        assert call.name == "deep"
        assert call.error in {None, "Error: the call of 'deep' is not valid JSON: nested too deeply"}


def test_an_escaped_lone_surrogate_stays_one() -> None:
    """As a character it would cross no wire."""
    (call,) = read_turn(r'<tool_call>{"name": "add", "arguments": {"a": "é\ud800"}}</tool_call>').calls
    assert call.arguments.encode() == rb'{"a": "\u00e9\ud800"}'
    assert json.loads(call.arguments) == {"a": "é\ud800"}


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call>\n", "<tool_call></tool_call>"])
def test_an_answer_of_bare_tags_takes_no_time(piece: str) -> None:
    """A policy that repeats one token for ever: minutes on the event loop of all rows, if each tag looked at all."""
    calls = read_turn(piece * 200_000).calls
    assert len(calls) == 200_000
    assert {call.error for call in calls[:-1]} == {"Error: a tool call is not valid JSON: there is none"}


def test_half_a_call_at_the_end_is_an_error() -> None:
    """Unclosed, and its JSON too."""
    assert found(f'{ADD}<tool_call>{{"name": "add", "argum')[1][1].startswith("Error: the call of 'add' is not valid")


def test_half_a_call_ends_at_the_next_opening_tag() -> None:
    """So that the next one is read."""
    assert [name for name, _ in found(f'<tool_call>{{"name": "half", {ADD}')] == ["half", "add"]


PIECES = st.sampled_from([*'{}[]",:\\ \n', "<tool_call>", "</tool_call>", '"name"', '"add"', '"arguments"', "1", ADD])


@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
def test_no_text_raises(text: str) -> None:
    """Each opening tag outside strings is a call, read or told; nothing is made up."""
    turn = read_turn(text)
    assert len(turn.calls) <= text.count("<tool_call>") + text.count("[")
    assert bool(turn.calls) == ("<tool_call>" in text)
    for call in turn.calls:
        assert (call.error is None) <= bool(call.name)


PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["</tool_call>", '"}}</tool_call>'])
JSON = PLAIN | st.lists(PLAIN) | st.dictionaries(st.text(), PLAIN)


@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON)), max_size=4), st.booleans())
def test_what_is_written_is_read(calls: list[tuple[str, dict[str, Any]]], ascii_only: bool) -> None:
    """Any names and arguments, in order, whatever is in their strings."""
    blocks = [json.dumps({"name": n, "arguments": a}, ensure_ascii=ascii_only) for n, a in calls]
    text = "".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)
    assert found(text) == calls


def test_the_parser_reads_a_turn() -> None:
    """The schemas do not matter to it."""
    turn = asyncio.run(HermesParser().parse(ADD, []))
    assert [call.name for call in turn.calls] == ["add"]
