"""Whatever a loop hands over becomes strict JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zagent.jsonl import json_line, to_json


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32("nan"), None),
        ([float("inf"), -float("inf"), 1.5], [None, None, 1.5]),
        (np.array([[1, 2]], np.int16), [[1, 2]]),
        (np.array([{"a": np.int64(1)}], object), [{"a": 1}]),
        ({1: np.bool_(True), "t": (1,)}, {"1": True, "t": [1]}),
        (b"raw", "data:;base64,cmF3"),
        (Path("x"), "PosixPath('x')"),
    ],
)
def test_values_become_strict_json(value: Any, expected: Any) -> None:
    """numpy is converted, NaN and infinities are null, the rest is said in words."""
    converted = to_json(value)
    assert converted == expected
    assert json.loads(json.dumps(converted, allow_nan=False)) == expected


def test_a_line_is_one_line() -> None:
    """Newlines in text are escaped; other letters stay readable."""
    assert json_line({"text": "a\nb é", "x": float("nan")}) == '{"text": "a\\nb é", "x": null}\n'


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029", "\x0b", "\x1c", "\n", "\r"])
def test_a_line_is_one_line_to_every_reader(end: str) -> None:
    """A model may say what others take for the end of a line."""
    line = json_line({"text": f"a{end}b", f"k{end}": 1})
    assert line.splitlines() == [line.removesuffix("\n")]
    assert json.loads(line) == {"text": f"a{end}b", f"k{end}": 1}
