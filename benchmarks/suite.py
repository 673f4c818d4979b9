"""What a benchmark is, and the arithmetic that all of them share: medians, and ratios taken pair by pair.

A benchmark is a module with the four names of `Benchmark`. It measures its peers in turn, in pairs: the figures of one
case and one repeat were taken one after the other, so that what else the machine did falls on both.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol


class Figure(NamedTuple):
    """One measured number: a row of the CSV."""

    benchmark: str  #: "relay"
    case: str  #: "1024/128 arrays"
    peer: str  #: "zagent", "sockets", "http", "sglang-router", "ray-local", "ray-global", "static", ...
    repeat: int  #: from 0; figures of one repeat and case are a pair
    name: str  #: "calls_per_s", "p50_ms", "makespan_s", ...
    value: float
    unit: str  #: "1/s", "ms", "s", "MB", ""


@dataclass(frozen=True)
class Options:
    """How to run a benchmark."""

    quick: bool  #: a tenth: does it run, not how fast
    repeats: int | None  #: None: the benchmark's own number
    peers: tuple[str, ...]  #: those to run: of the benchmark's, and installed
    trace: Path | None  #: the user's own JSONL trace, for `rollout`
    out: Path  #: directory of CSV, JSON and PNG files; exists


Record = Callable[[Figure], None]


class Benchmark(Protocol):
    """A module, not a class."""

    NAME: str
    PEERS: tuple[str, ...]  #: the first is "zagent"

    def run(self, options: Options, record: Record) -> None:
        """Measure; hand each figure to ``record`` as soon as it is known."""

    def table(self, figures: Sequence[Figure]) -> str:
        """Markdown: medians, ratios, lowest and highest."""

    def plots(self, figures: Sequence[Figure], directory: Path) -> list[Path]:
        """PNG files of the figures, written to ``directory``."""


#: What a peer needs beside zagent's own dependencies: the module, and the package's name where it is another.
_NEEDED = {
    "http": ("aiohttp", "aiohttp"),
    "http-orjson": ("orjson", "orjson"),
    "sglang-router": ("sglang_router", "sglang-router"),
    "ray": ("ray", "ray"),
    "ray-local": ("ray", "ray"),
    "ray-global": ("ray", "ray"),
}


def missing(peer: str) -> str | None:
    """Why ``peer`` cannot run here; None if it can."""
    module, package = _NEEDED.get(peer, ("", ""))
    if not module or importlib.util.find_spec(module) is not None:
        return None
    return f"{package} is not installed: pip install -e '.[bench]'"


def values(figures: Iterable[Figure], *, case: str, peer: str, name: str) -> dict[int, float]:
    """repeat -> value. Several figures of one repeat: the last."""
    return {f.repeat: f.value for f in figures if (f.case, f.peer, f.name) == (case, peer, name)}


def median(figures: Iterable[Figure], *, case: str, peer: str, name: str) -> float:
    """Over the repeats; NaN if there is none."""
    found = values(figures, case=case, peer=peer, name=name)
    return statistics.median(found.values()) if found else float("nan")


def ratios(figures: Iterable[Figure], *, case: str, name: str, over: str = "zagent", under: str) -> list[float]:
    """``over``'s value divided by ``under``'s, of every repeat that has both, in order."""
    figures = list(figures)
    above = values(figures, case=case, peer=over, name=name)
    below = values(figures, case=case, peer=under, name=name)
    return [above[repeat] / below[repeat] for repeat in sorted(above.keys() & below.keys())]


def cases(figures: Iterable[Figure]) -> list[str]:
    """In order of their first figure."""
    return list(dict.fromkeys(figure.case for figure in figures))


def peers(figures: Iterable[Figure]) -> list[str]:
    """In order of their first figure."""
    return list(dict.fromkeys(figure.peer for figure in figures))


def spread(numbers: Sequence[float], form: str = ".2f") -> str:
    """Median, lowest and highest, such as ``0.82 (0.79–0.84)``; an en dash where there are none."""
    if not numbers:
        return "–"
    middle, low, high = (format(n, form) for n in (statistics.median(numbers), min(numbers), max(numbers)))
    return f"{middle} ({low}–{high})"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [list(head), ["---"] + ["---:"] * (len(head) - 1), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
