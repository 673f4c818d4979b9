"""Strict JSON of whatever loops, tools and reward functions hand over."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Characters that JSON may hold as they are, and that `str.splitlines` and some editors take for the end of a line.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def json_line(value: Any) -> str:
    """``value`` as one line of JSON, with its newline. NaN and infinities are null; see `to_json`."""
    return json.dumps(to_json(value), ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS) + "\n"


def to_json(value: Any) -> Any:
    """``value`` in JSON's types: numpy converted, NaN and infinities None, bytes (images) a `data:` URL, anything else
    that JSON cannot say its repr."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return "data:;base64," + base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): to_json(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return repr(value)
