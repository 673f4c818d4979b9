"""Plots of one look, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: A peer has the same colour in every plot.
COLOURS = {
    "zagent": "#0b6e4f",
    "sockets": "#4f5d75",
    "http": "#e09f3e",
    "http-orjson": "#bc6c25",
    "sglang-router": "#9e2a2b",
    "ray": "#3a86ff",
    "ray-local": "#3a86ff",
    "ray-global": "#1d3f8f",
    "static": "#8338ec",
}


@contextmanager
def drawing(file: Path, *, title: str, xlabel: str, ylabel: str) -> Iterator[Any]:
    """Matplotlib's axes to draw on; written to ``file`` when the block ends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: the runner measures without matplotlib, too
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    canvas.print_png(file)


def colour(peer: str) -> str:
    """The peer's; grey for one that has none."""
    return COLOURS.get(peer, "#888888")
