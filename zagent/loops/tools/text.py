"""What a tool gave, as the model is to see it. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Number
from typing import Any, Literal

from zagent.errors import to_wire
from zagent.loops.tools.base import ToolResponse

Answer = tuple[ToolResponse, float | None, dict[str, Any]]


def read_result(result: Any) -> Answer:
    """(response, reward or None, metrics) of what a tool returned: one of the three, or a tuple of them in that order.

    Raises:
        TypeError: a value that is no text, or a reward or metrics of another type; names it.
        ValueError: a reward that is not finite, or a container that refers to itself.
    """
    parts = result if isinstance(result, tuple) and 1 < len(result) < 4 else (result,)
    value, reward, metrics = (*parts, None, None)[:3]
    response = value if isinstance(value, ToolResponse) else ToolResponse(text=as_text(value))
    return response, None if reward is None else as_reward(reward), as_metrics(metrics)


def as_text(value: Any) -> str:
    """Text as it is, numbers and None as Python writes them, lists and dicts as JSON. Raises `TypeError`."""
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, Number):
        return str(value)
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=_number)
    raise TypeError(f"the tool returned {type(value).__name__}, which is no text")


def _number(value: Any) -> Any:
    if isinstance(value, Number):  # numpy's
        return float(value) if not hasattr(value, "item") else value.item()  # type: ignore[arg-type]
    raise TypeError(f"the tool returned {type(value).__name__} in a container, which is no text")


def as_reward(reward: Any) -> float:
    """A finite number. Raises `TypeError` or `ValueError`."""
    if not isinstance(reward, Number):
        raise TypeError(f"the tool's reward must be a number, got {type(reward).__name__}")
    if not math.isfinite(number := float(reward)):  # type: ignore[arg-type]
        raise ValueError(f"the tool's reward must be a finite number, got {number}")
    return number


def finite(value: Any) -> float:
    """``value`` as a finite float. Raises `TypeError` or `ValueError`."""
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("an integer beyond all floats") from error
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def as_metrics(metrics: Any) -> dict[str, Any]:
    """A dict of its own. Raises `TypeError`."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"the tool's metrics must be a dict, got {type(metrics).__name__}")
    return dict(metrics)


def truncate(text: str, limit: int, side: Literal["left", "middle", "right"]) -> str:
    """``text`` with at most ``limit`` of its characters; ``side`` is what is dropped, a mark takes its place."""
    if len(text) <= limit:
        return text
    if side == "left":
        return f"(truncated)...{text[len(text) - limit :]}"
    if side == "right":
        return f"{text[:limit]}...(truncated)"
    tail = limit // 2
    return f"{text[: limit - tail]}...(truncated)...{text[len(text) - tail :]}"


def printable(text: str) -> str:
    """Without lone surrogates, which no tokenizer and no wire takes."""
    return text.encode("utf-8", "replace").decode()


def error_text(name: str, error: BaseException) -> str:
    """What the model is told of an exception: its class and its message."""
    said = to_wire(error)["message"]
    return f"Error when executing tool {name!r}: {type(error).__name__}" + (f": {said}" if said else "")
