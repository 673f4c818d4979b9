"""Errors cross the wire and come back as themselves, with the other side's traceback."""

from __future__ import annotations

import re
import traceback
from typing import Any

import pytest

from zagent import errors
from zagent.errors import EngineError, RemoteError, RolloutError, ZagentError, from_wire, known_errors, to_wire
from zagent.wire.codec import decode_body, encode_body

#: The tree of zagent.errors itself, whatever other classes tests define.
TREE = {name: cls for name, cls in known_errors().items() if cls.__module__ == "zagent.errors"}


def raised(error: BaseException) -> BaseException:
    """``error`` with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def across(error: BaseException) -> Exception:
    return from_wire(decode_body(encode_body(to_wire(error))))


@pytest.mark.parametrize("cls", TREE.values(), ids=lambda cls: cls.__name__)
def test_every_class_of_the_tree_survives(cls: type[ZagentError]) -> None:
    """Same class, same text, and the fields that cross."""
    back = across(raised(cls("what happened")))
    assert type(back) is cls
    assert str(back) == "what happened"
    assert back.args == ("what happened",)


def test_fields_cross() -> None:
    """`RemoteError` keeps the foreign class's name, over any number of hops."""
    back = across(across(RemoteError("x", type_name="lib.Broken")))
    assert isinstance(back, RemoteError)
    assert back.type_name == "lib.Broken"


BUILTINS = [
    ValueError("v"),
    KeyError("k"),
    KeyError(5),
    OSError(2, "No such file"),
    FileNotFoundError("f"),
    TimeoutError(),
    ZeroDivisionError("z"),
]  # fmt: skip


@pytest.mark.parametrize("error", BUILTINS, ids=repr)
def test_builtin_exceptions_keep_their_class(error: Exception) -> None:
    """And their text."""
    back = across(raised(error))
    assert type(back) is type(error)
    assert str(back).strip("'") == str(error).strip("'")


def test_a_key_error_is_not_quoted_twice() -> None:
    """Its only argument crosses, not its repr."""
    assert across(KeyError("k")).args == ("k",)


def test_a_class_that_takes_more_than_a_text_becomes_remote() -> None:
    """Its name and text are kept."""
    back = across(raised(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte")))
    assert isinstance(back, RemoteError)
    assert back.type_name == "UnicodeDecodeError"
    assert "bad byte" in str(back)


@pytest.mark.parametrize(
    "error", [StopIteration("x"), StopAsyncIteration("x"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
)
def test_control_flow_becomes_remote(error: BaseException) -> None:
    """No future could raise these; a remote exit is not ours."""
    back = across(raised(error))
    assert isinstance(back, RemoteError)
    assert back.type_name == type(error).__name__


class Custom(Exception):
    """A user's own class."""

    fields = ("nothing_of_ours",)


def test_a_foreign_class_becomes_remote() -> None:
    """Named with its module; its attributes are not ours to read."""
    back = across(raised(Custom("oops")))
    assert isinstance(back, RemoteError)
    assert back.type_name == f"{Custom.__module__}.Custom"
    assert str(back) == f"{Custom.__module__}.Custom: oops"


def test_a_name_that_is_no_exception_becomes_remote() -> None:
    """A peer cannot make us call `exec` or `print`."""
    for name in ("print", "exec", "object", "int", "BaseException", "", "__import__"):
        assert isinstance(from_wire({"type": name, "message": "boo"}), RemoteError)


def test_the_remote_traceback_is_shown() -> None:
    """In the formatted local exception, as its cause, over two hops as well."""
    once = across(raised(EngineError("broke")))
    text = "".join(traceback.format_exception(once))
    assert "in raised" in text
    assert "raise error" in text
    twice = "".join(traceback.format_exception(across(raised(once))))
    assert twice.count("in raised") >= 2


def test_an_error_never_raised_has_no_cause() -> None:
    """There is no traceback to show."""
    assert across(EngineError("x")).__cause__ is None


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"), [(ValueError("lone \ud800 surrogate"), r"lone \ud800 surrogate"), (Mute(1, 2), "without text")]
)
def test_any_text_can_cross(error: Exception, text: str) -> None:
    """A lone surrogate is escaped, a failing ``__str__`` named."""
    assert text in str(across(raised(error)))


GARBAGE: list[Any] = [
    *(None, [], "text", 5, {}, {"type": 5}),
    {"type": "ValueError", "fields": [1]},
    {"type": [], "message": {}},
    {"type": "RemoteError", "fields": "type_name"},
    {"type": "RemoteError", "traceback": 5},
]


@pytest.mark.parametrize("data", GARBAGE, ids=repr)
def test_what_is_no_description_is_still_an_error(data: Any) -> None:
    """Never an exception out of `from_wire` itself."""
    assert isinstance(from_wire(data), Exception)


def test_a_rollout_error_has_all_outcomes_here() -> None:
    """They do not cross; the list is the error's own."""
    outcomes = [1, 2]
    error = RolloutError("x", outcomes)
    outcomes.append(3)
    assert error.finished == [1, 2]
    assert across(error).finished == []  # type: ignore[attr-defined]


def test_the_drawn_tree_is_the_tree() -> None:
    """The docstring draws exactly the classes there are, each under its parent."""
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([│ ]*)(?:[├└]── )?([A-Z]\w+)(?:\s{2,}|$)", line)
        if found is None or not (found[2].endswith(("Error", "Lost")) or found[2] in TREE):
            continue
        depth = 0 if "──" not in line else len(found[1]) // 4 + 1
        path[depth:] = [found[2]]
        drawn[found[2]] = path[depth - 1] if depth else ""
    assert drawn == {name: cls.__base__.__name__ if cls is not ZagentError else "" for name, cls in TREE.items()}


def test_every_class_says_what_it_means() -> None:
    """A docstring each."""
    assert all(cls.__doc__ for cls in TREE.values())
