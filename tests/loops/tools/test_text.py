"""What a tool gave, as the model is to see it."""

from __future__ import annotations

import re
from datetime import date
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zagent.loops.tools import ToolResponse
from zagent.loops.tools.text import as_text, error_text, printable, read_result, truncate

Side = Literal["left", "middle", "right"]


@pytest.mark.parametrize(
    ("side", "limit", "expected"),
    [
        ("left", 4, "(truncated)...ghij"),
        ("right", 4, "abcd...(truncated)"),
        ("middle", 4, "ab...(truncated)...ij"),
        ("middle", 5, "abc...(truncated)...ij"),
        ("middle", 1, "a...(truncated)..."),
        ("left", 0, "(truncated)..."),
        ("right", 0, "...(truncated)"),
        ("middle", 0, "...(truncated)..."),
        ("middle", 10, "abcdefghij"),
        ("left", 99, "abcdefghij"),
    ],
)
def test_the_side_is_what_is_dropped(side: Side, limit: int, expected: str) -> None:
    """Pitfall D9: `left` keeps the tail, `right` the head, `middle` both ends."""
    assert truncate("abcdefghij", limit, side) == expected


@given(
    st.text(st.characters(exclude_characters="(truncated).")),
    st.integers(0, 50),
    st.sampled_from(["left", "middle", "right"]),
)
def test_at_most_the_limit_remains(text: str, limit: int, side: Side) -> None:
    """For every limit from 0: as many characters of the source as fit, in their order, from its ends."""
    kept = truncate(text, limit, side)
    head, mark, tail = re.fullmatch(r"(.*?)((?:\.\.\.)?\(truncated\)(?:\.\.\.)?)?([^(]*)", kept, re.DOTALL).groups("")  # type: ignore[union-attr]
    assert len(head) + len(tail) == min(len(text), limit)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert bool(mark) == (len(text) > limit)
    assert not (mark and ((side == "left" and head) or (side == "right" and tail)))


def test_the_limit_counts_characters() -> None:
    """Pitfall D11: 256 Chinese characters are 256."""
    assert truncate("字" * 256, 256, "middle") == "字" * 256
    assert truncate("字" * 300, 256, "right").count("字") == 256


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (3, "3"),
        (2.5, "2.5"),
        (float("nan"), "nan"),
        (True, "True"),
        (None, "None"),
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (Decimal("1.50"), "1.50"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ([np.int64(3), Decimal("1.5")], "[3, 1.5]"),
        ([], "[]"),
    ],
)
def test_plain_values_become_text(value: Any, text: str) -> None:
    """Numbers and None as Python writes them, containers as JSON."""
    assert as_text(value) == text


@pytest.mark.parametrize("value", [b"bytes", object(), {1, 2}, date(2026, 1, 1), (1,), (1, 2, 3, 4)])
def test_other_values_are_refused_by_their_type(value: Any) -> None:
    """The error names it; in a container too."""
    name = type(value).__name__
    with pytest.raises(TypeError, match=f"the tool returned {name}, which is no text"):
        read_result(value)
    if not isinstance(value, tuple):
        with pytest.raises(TypeError, match=f"the tool returned {name} in a container"):
            as_text([value])


def test_a_result_may_carry_reward_and_metrics() -> None:
    """Text or response alone, with a reward, with metrics."""
    assert read_result("x") == (ToolResponse(text="x"), None, {})
    assert read_result(("x", 1)) == (ToolResponse(text="x"), 1.0, {})
    assert read_result((ToolResponse(text="x"), None, {"a": 1})) == (ToolResponse(text="x"), None, {"a": 1})


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (("x", "1"), TypeError),
        (("x", float("nan")), ValueError),
        (("x", float("inf"), {}), ValueError),
        (("x", 1.0, [1]), TypeError),
    ],
)
def test_a_reward_is_a_finite_number_and_metrics_are_a_dict(result: Any, error: type[Exception]) -> None:
    """Anything else is the tool's fault."""
    with pytest.raises(error, match="the tool's"):
        read_result(result)


def test_media_are_bytes() -> None:
    """PIL images become PNG; what is neither is refused, and so are keys of other names."""
    from PIL import Image

    response = ToolResponse(image=[b"jpeg", Image.new("RGB", (2, 2))])  # type: ignore[list-item]
    assert response.image is not None
    assert response.image[0] == b"jpeg"
    assert response.image[1].startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="must be the bytes of a file or a PIL image, got str"):
        ToolResponse(image=["path.png"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="images"):
        ToolResponse(images=[b""])  # type: ignore[call-arg]


def test_lone_surrogates_are_replaced() -> None:
    """No tokenizer takes them; JSON arguments can bring them."""
    assert printable("a\ud800é") == "a?é"


class Mute(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "Error when executing tool 'x': ValueError: bad"),
        (SystemExit(1), "Error when executing tool 'x': SystemExit: 1"),
        (ValueError(), "Error when executing tool 'x': ValueError"),
        (Mute(), "Error when executing tool 'x': Mute: <Mute without text: RuntimeError>"),
    ],
)
def test_an_exception_is_told_by_class_and_message(error: BaseException, text: str) -> None:
    """Whatever it is."""
    assert error_text("x", error) == text
