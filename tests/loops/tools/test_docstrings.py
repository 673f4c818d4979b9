"""Docstrings in the three usual styles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zagent.loops.tools.docstrings import read_docstring

GOOGLE = """Add two numbers.

    Exactly, whatever their size.

    Args:
        a: the first,
            on two lines
        b (int): the second: an int
        *rest (list[int], optional): more

    Returns:
        the sum
    """

NUMPY = """Add two numbers.

    Exactly, whatever their size.

    Parameters
    ----------
    a : int
        the first,
        on two lines
    b
        the second: an int
    *rest : list of int, optional
        more

    Returns
    -------
    total : int
        the sum
    """

REST = """Add two numbers.

    Exactly, whatever their size.

    :param a: the first,
        on two lines
    :type a: int
    :param int b: the second: an int
    :param rest: more
    :returns: the sum
    """


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, REST], ids=["google", "numpy", "rest"])
def test_description_and_parameters_are_read(docstring: str) -> None:
    """All that stands before the first section, and one line per parameter."""
    assert read_docstring(docstring) == (
        "Add two numbers.\n\nExactly, whatever their size.",
        {"a": "the first, on two lines", "b": "the second: an int", "rest": "more"},
    )


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (None, ("", {})),
        ("", ("", {})),
        ("Just this.", ("Just this.", {})),
        ("\nArgs:\n    a: x", ("", {"a": "x"})),
        ("Text.\n\nReturns:\n    a: no parameter", ("Text.", {})),
        ("Returns the sum of a and b.\n\nArgs:\n    a: x\n", ("Returns the sum of a and b.", {"a": "x"})),
        ("T.\n\nParameters\n----------\nx, y : int\n    both\n", ("T.", {"x": "both", "y": "both"})),
        ("T.\n\nArgs:\n    a:\n        below\n    b: x\n\nNote: not a parameter", ("T.", {"a": "below", "b": "x"})),
        ("Parameters\nare none here.", ("Parameters\nare none here.", {})),
    ],
)
def test_odd_docstrings(docstring: str | None, expected: tuple[str, dict[str, str]]) -> None:
    """No section, nothing but a section, sections of other things, words that look like a heading."""
    assert read_docstring(docstring) == expected


@given(st.lists(st.sampled_from([*"ab:\n -(*)", "Args:", "Parameters\n---", ":param "])).map("".join))
def test_no_docstring_raises(docstring: str) -> None:
    """Users write anything."""
    read_docstring(docstring)
