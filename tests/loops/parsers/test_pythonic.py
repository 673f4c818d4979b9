"""Llama 4's format, well written and not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zagent.loops.parsers.pythonic import PythonicParser, read_turn


def found(text: str) -> list[tuple[str, Any]]:
    return [(call.name, call.error or json.loads(call.arguments)) for call in read_turn(text).calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        ("a list [1, 2] and f(x) and [g(1)]", "a list [1, 2] and f(x) and [g(1)]", []),
        ("[now()]", "", [("now", {})]),
        ("say [add(a=1, b=-2.5)] ok", "say  ok", [("add", {"a": 1, "b": -2.5})]),
        (
            '[a(x="]) [", y=[1, (2,)]), b.c(z={"k": None})]',
            "",
            [("a", {"x": "]) [", "y": [1, [2]]}), ("b.c", {"z": {"k": None}})],
        ),
        ("""[f(a="it's )]", b='"')] x""", "x", [("f", {"a": "it's )]", "b": '"'})]),
        ("[f(a=true, b=False, c=null)]", "", [("f", {"a": True, "b": False, "c": None})]),
        (r'[f(a="\d \" ]", b="""x"]""")]', "", [("f", {"a": r'\d " ]', "b": 'x"]'})]),
    ],
)
def test_calls_and_the_text_around_them(text: str, content: str, calls: list[Any]) -> None:
    """Literals of Python's and of JSON's; brackets and quotes in strings."""
    assert read_turn(text).content == content
    assert found(text) == calls


@pytest.mark.parametrize(
    ("text", "names", "told"),
    [
        ("[f(a=1, b=2", ["f"], "Error: the call of 'f' is not valid Python: "),
        ("[f(a=1) g(b=2)]", ["f"], "Error: the call of 'f' is not valid Python: "),
        ("[f(a=x), g(b=1)]", ["f", "g"], "Error: the call of 'f' has a value that is not JSON: "),
        ("[f(a=open('x')), g(b=1)]", ["f", "g"], "Error: the call of 'f' has a value that is not JSON: "),
        ("[f(a=1e999)]", ["f"], "Error: the call of 'f' has a value that is not JSON: "),
        ("[f(a={1}), g(b=1)]", ["f", "g"], "Error: the call of 'f' has a value that is not JSON: "),
        ("[f(a=1, **{}), g(b=1)]", ["f", "g"], "Error: the call of 'f' must give every argument by its name"),
        ("[g(b=1, *c), g(b=1)]", ["g", "g"], "Error: the call of 'g' must give every argument by its name"),
        ("[f(a=" + "[" * 5000, ["f"], "Error: the call of 'f' is not valid Python: "),
        ("[f(a='\0')]", ["f"], "Error: the call of 'f' is not valid Python: "),
    ],
)
def test_a_call_that_cannot_be_read_is_told_and_its_siblings_are_kept(text: str, names: list[str], told: str) -> None:
    """By its name; nothing is ever evaluated."""
    calls = read_turn(text).calls
    assert [call.name for call in calls] == names
    assert str(calls[0].error).startswith(told)
    assert all(call.error is None for call in calls[1:])


def test_something_else_in_the_list_is_told() -> None:
    """It is no call."""
    assert found("[f(a=1), 3]") == [("f", {"a": 1}), ("", "Error: a tool call must be name(argument=value)")]


def test_thousands_of_calls_take_no_time() -> None:
    """Each quoted from where it stands: minutes, if each split the whole list into lines."""
    calls = read_turn("[" + ",\r".join(["f(a='é', b=[\n1]),\r\n g(x)"] * 10_000) + "]").calls
    assert {(call.name, call.arguments) for call in calls} == {("f", '{"a": "é", "b": [1]}'), ("g", "g(x)")}


def test_an_escaped_lone_surrogate_stays_one() -> None:
    """As a character it would cross no wire."""
    assert read_turn(r"[f(a='\ud800')]").calls[0].arguments == r'{"a": "\ud800"}'


def test_a_long_dotted_name_is_a_name() -> None:
    """However deep Python's tree of it is."""
    name = "f" + ".a" * 900
    assert [call.name for call in read_turn(f"[{name}(a=1)]").calls] == [name]


def test_an_unclosed_call_of_many_arguments_takes_no_time() -> None:
    """SGLang's own reader would take days."""
    assert read_turn("[f(" + "a=1, " * 5000).calls[0].error is not None


@given(st.lists(st.sampled_from([*"[]()='\"\\,a1 \n{}:", "f(", "[f(a=", "'''"]), max_size=40).map("".join))
def test_no_text_raises(text: str) -> None:
    """Nor warns."""
    read_turn(text)


PLAIN = st.none() | st.booleans() | st.integers() | st.text()
NAMES = st.sampled_from(["a", "code", "x_1"])


@given(st.dictionaries(NAMES, PLAIN | st.lists(PLAIN) | st.dictionaries(st.text(), PLAIN)))
def test_what_is_written_is_read(arguments: dict[str, Any]) -> None:
    """Whatever is in the strings."""
    text = "[f(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")]"
    assert found(text) == [("f", arguments)]


def test_the_marks_of_the_tokenizer_are_no_content() -> None:
    """Llama 4 sometimes writes them around its calls."""
    turn = asyncio.run(PythonicParser().parse("<|python_start|>[f(a=1)]<|python_end|>", []))
    assert (turn.content, turn.calls[0].name) == ("", "f")
