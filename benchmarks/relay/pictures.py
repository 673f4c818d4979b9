"""The plots: every peer beside zagent, and the sweeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drawing import colour, drawing
from benchmarks.relay.plan import MODULES, SIZES, SWEEPS, SWEPT
from benchmarks.relay.traffic import Case, Load
from benchmarks.suite import Figure, median, values


def plots(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """Those for which there are figures."""
    files = [_peers(figures, directory, *size) for size in SIZES]
    files += [_sweep(figures, directory, name, loads) for name, loads in SWEEPS.items()]
    return [file for file in files if file is not None]


def _peers(figures: Sequence[Figure], directory: Path, prompt: int, response: int) -> Path | None:
    bars: list[tuple[str, str, float]] = []
    for peer in MODULES:
        for as_lists in (False, True):
            rate = median(figures, case=str(Load(Case(prompt, response, as_lists))), peer=peer, name="calls_per_s")
            if not math.isnan(rate):
                bars.append((f"{peer}, {'lists' if as_lists else 'arrays'}", colour(peer), rate))
    if not bars:
        return None
    file = directory / f"relay-{prompt}.png"
    title = f"{prompt} prompt tokens, {response} answered"
    with drawing(file, title=title, xlabel="calls per second (logarithmic)", ylabel="") as axes:
        names, colours, rates = zip(*reversed(bars), strict=True)
        axes.bar_label(axes.barh(names, rates, color=colours), fmt="{:,.0f}", padding=3, fontsize=8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter("")  # the bars say it
        axes.margins(x=0.15)
    return file


def _sweep(figures: Sequence[Figure], directory: Path, name: str, loads: Sequence[Load]) -> Path | None:
    lines = {peer: _line(figures, peer, name, loads) for peer in SWEPT}
    if any(len(line) < 2 for line in lines.values()):
        return None
    file = directory / f"relay-{name.partition(' ')[0]}.png"
    with drawing(file, title="1024 prompt tokens, 128 answered", xlabel=name, ylabel="calls per second") as axes:
        if name == "prompt tokens":
            axes.set_title("128 tokens answered")
        for peer, line in lines.items():
            places, middles, lows, highs = zip(*line, strict=True)
            axes.plot(places, middles, marker="o", color=colour(peer), label=peer)
            axes.fill_between(places, lows, highs, color=colour(peer), alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    return file


def _line(
    figures: Sequence[Figure], peer: str, name: str, loads: Sequence[Load]
) -> list[tuple[int, float, float, float]]:
    """(place, median, lowest, highest) of each load there are figures of."""
    line: list[tuple[int, float, float, float]] = []
    for load in loads:
        found = values(figures, case=str(load), peer=peer, name="calls_per_s").values()
        if found:
            middle = median(figures, case=str(load), peer=peer, name="calls_per_s")
            line.append((_place(name, load), middle, min(found), max(found)))
    return line


def _place(name: str, load: Load) -> int:
    """The load's number on the sweep's axis."""
    return {
        "calls in flight per caller": load.in_flight,
        "prompt tokens": load.case.prompt,
        "callers": load.callers,
        "servers": load.servers,
    }[name]
