"""Reward functions, good and bad, by dotted path."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from typing import Any

from zagent.tiny.arithmetic import answer_of

NUMBER = 3


class Scorer:
    """No function."""


def length(solution_str: str) -> int:
    return len(solution_str)


def by_truth(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    """What ``ground_truth`` says."""
    tricks: dict[str, Any] = {
        "raise": lambda: 1 / 0,
        "hang": lambda: time.sleep(3),
        "exit": lambda: sys.exit(3),
        "nan": lambda: math.nan,
        "none": lambda: None,
        "dict": lambda: {"score": 0.5, "turns": extra_info["num_turns"], "source": data_source},
    }
    return tricks[ground_truth]() if ground_truth in tricks else float(ground_truth)


async def by_truth_async(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    """The same on the event loop."""
    if ground_truth == "hang":
        await asyncio.sleep(1000)
    return by_truth(data_source, solution_str, ground_truth, extra_info)


def needs_more(solution_str: str, answer: str) -> float:
    return float(solution_str == answer)


def by_number(ground_truth: str, messages: list[dict[str, Any]]) -> float:
    """Whether the last answer is that number."""
    return float(answer_of(str(messages[-1]["content"])) == int(ground_truth))
