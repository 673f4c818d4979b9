"""Figures into files: CSV for spreadsheets, JSON with everything, Markdown to read."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.suite import Figure


@dataclass(frozen=True)
class Measured:
    """What became of one benchmark. ``error``: a traceback; the figures are then those that came before it."""

    name: str
    command: str
    seconds: float
    figures: tuple[Figure, ...]
    table: str = ""
    plots: tuple[str, ...] = ()  #: names of PNG files beside the report
    error: str | None = None


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


class Table:
    """``<name>.csv`` in ``directory``, a context manager: each figure is in the file once it is recorded, so that a run
    which is ended early leaves those it had. Without figures there is no file."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.csv"
        self._path.unlink(missing_ok=True)
        self._file: TextIO | None = None
        self.figures: list[Figure] = []

    def __enter__(self) -> Table:
        return self

    def record(self, figure: Figure) -> None:
        self.figures.append(figure)
        if self._file is None:
            self._file = self._path.open("w", newline="", buffering=1)  # line by line
            csv.writer(self._file).writerow(Figure._fields)
        csv.writer(self._file).writerow(figure)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def write(directory: Path, facts: Mapping[str, Any], results: Sequence[Measured], left_out: Mapping[str, str]) -> None:
    """`report.json` and `report.md`."""
    (directory / "report.json").write_text(json.dumps(_document(facts, results, left_out), indent=1) + "\n")
    (directory / "report.md").write_text(text(facts, results, left_out))


def _document(facts: Mapping[str, Any], results: Sequence[Measured], left_out: Mapping[str, str]) -> dict[str, Any]:
    benchmarks = [
        {
            "name": result.name,
            "command": result.command,
            "seconds": round(result.seconds, 1),
            "error": result.error,
            "plots": result.plots,
            "figures": [figure._asdict() for figure in result.figures],
        }
        for result in results
    ]
    return {**facts, "left_out": left_out, "benchmarks": benchmarks}


def text(facts: Mapping[str, Any], results: Sequence[Measured], left_out: Mapping[str, str]) -> str:
    """The report in Markdown."""
    return "\n\n".join([_head(facts, left_out), *map(_section, results)]) + "\n"


def _head(facts: Mapping[str, Any], left_out: Mapping[str, str]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines = [
        f"`{facts['command']}`",
        f"{facts['date']}, commit {facts['commit'] or 'unknown'}. {facts['machine']}, {facts['memory_gb']:g} GB, "
        f"{facts['kernel']}, load {facts['load']:.1f}.",
        f"Versions: {versions}.",
    ]
    lines += [f"Left out: {peer} ({reason})." for peer, reason in left_out.items()]
    if not can_plot():
        lines.append("No plots: matplotlib is not installed: pip install -e '.[bench]'.")
    return "# Benchmarks\n\n" + "\n\n".join(lines)


def _section(result: Measured) -> str:
    parts = [f"## {result.name}"]
    if result.error is not None:
        parts += ["FAILED", f"```\n{result.error.rstrip()}\n```"]
    parts += [result.table] if result.table else []
    parts += [f"![{name}]({name})" for name in result.plots]
    parts.append(f"`{result.command}`, {result.seconds:.0f} s")
    return "\n\n".join(parts)
