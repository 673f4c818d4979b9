"""What is replayed: rows of known lengths, made by seed or read from a file. Pure but for the reading.

A file has one row a line, times in seconds as they were recorded:

    {"prompt_tokens": 512, "turns": [{"response_tokens": 180, "tool_s": 1.5, "tool_tokens": 9}, {"response_tokens": 7}]}

Each turn is an engine call on all tokens so far; then the tool takes its time, and what it says is appended. The last
turn calls no tool: `tool_s` and `tool_tokens` are 0 where they are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Turn(NamedTuple):
    """One answer of the model, and the tool call that it makes."""

    response_tokens: int
    tool_s: float = 0.0
    tool_tokens: int = 0


class Row(NamedTuple):
    """One trajectory."""

    prompt_tokens: int
    turns: tuple[Turn, ...]

    @property
    def response_tokens(self) -> int:
        """All that follows the prompt, sampled and inserted."""
        return sum(turn.response_tokens + turn.tool_tokens for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.response_tokens for turn in self.turns)


class Lengths(NamedTuple):
    """A log-normal distribution cut at both ends: half of the values lie below ``median``; with a sigma of 1 one in
    twenty is above five times the median."""

    median: float
    sigma: float
    least: float
    most: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(np.clip(rng.lognormal(math.log(self.median), self.sigma), self.least, self.most))


#: The default trace: a tool-using agent of a mid-sized model. Rows have 3 turns on average (geometric, 16 at most), so
#: that the longest of a thousand takes some five times the mean.
PROMPT_TOKENS = Lengths(median=500, sigma=0.6, least=32, most=1024)
RESPONSE_TOKENS = Lengths(median=150, sigma=1.0, least=8, most=1536)
TOOL_S = Lengths(median=0.7, sigma=1.0, least=0.05, most=30.0)
TOOL_TOKENS = Lengths(median=120, sigma=0.8, least=8, most=1024)
MEAN_TURNS, MOST_TURNS = 3.0, 16
#: Where a row ends whatever it was about to do.
ROW_TOKENS = 4096


def generate(seed: int, rows: int) -> list[Row]:
    """The same rows for the same seed, whatever machine."""
    rng = np.random.default_rng(seed)
    return [_row(rng) for _ in range(rows)]


def _row(rng: np.random.Generator) -> Row:
    prompt = int(PROMPT_TOKENS.draw(rng))
    count = min(int(rng.geometric(1 / MEAN_TURNS)), MOST_TURNS)
    turns: list[Turn] = []
    left = ROW_TOKENS
    for _ in range(count):
        turn = Turn(int(RESPONSE_TOKENS.draw(rng)), TOOL_S.draw(rng), int(TOOL_TOKENS.draw(rng)))
        if turn.response_tokens + turn.tool_tokens >= left:
            turns.append(Turn(min(turn.response_tokens, left)))
            break
        turns.append(turn)
        left -= turn.response_tokens + turn.tool_tokens
    turns[-1] = Turn(turns[-1].response_tokens)
    return Row(prompt, tuple(turns))


def read(path: Path) -> list[Row]:
    """The rows of a JSONL file; empty lines are passed over. Raises `ValueError`, naming the line."""
    with path.open(encoding="utf-8") as lines:
        rows = list(_rows(lines, path))
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _rows(lines: Iterator[str], path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield row_of(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error


def write(path: Path, rows: Sequence[Row]) -> None:
    """The file that `read` gives back."""
    path.write_text("".join(json.dumps(plain(row)) + "\n" for row in rows), encoding="utf-8")


def plain(row: Row) -> dict[str, Any]:
    """As in the file."""
    return {"prompt_tokens": row.prompt_tokens, "turns": [turn._asdict() for turn in row.turns]}


def row_of(value: Any) -> Row:
    """One line. Raises `ValueError` for unknown or missing keys, for no turns and for numbers that are none."""
    given = _known(value, {"prompt_tokens", "turns"})
    if not isinstance(given["turns"], list) or not given["turns"]:
        raise ValueError("turns must be a list, and not empty")
    return Row(_count(given, "prompt_tokens", least=1), tuple(_turn(turn) for turn in given["turns"]))


def _turn(value: Any) -> Turn:
    given = _known(value, {"response_tokens"}, {"tool_s", "tool_tokens"})
    seconds = given.get("tool_s", 0.0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ValueError(f"tool_s must be seconds, got {seconds!r}")
    return Turn(_count(given, "response_tokens", least=1), float(seconds), _count(given, "tool_tokens"))


def _known(value: Any, needed: set[str], more: frozenset[str] | set[str] = frozenset()) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {value!r:.60}")
    missing, unknown = needed - value.keys(), value.keys() - needed - more
    if missing or unknown:
        raise ValueError(f"missing keys {sorted(missing)}, unknown keys {sorted(unknown)}")
    return value


def _count(given: Mapping[str, Any], key: str, least: int = 0) -> int:
    value = given.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be an int of at least {least}, got {value!r}")
    return value
