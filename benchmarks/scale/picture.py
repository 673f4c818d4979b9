"""The figures of `scale` as plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import drawing
from benchmarks.scale.figures import ENGINES, GROUPS, IN_FLIGHT, SESSIONS, TRAJECTORIES, limit, points
from benchmarks.scale.laws import Traffic
from benchmarks.scale.tables import GPU_SPEEDS
from benchmarks.suite import Figure


def plots(figures: Sequence[Figure], directory: Path) -> list[Path]:
    """PNG files: cost of a call, GPUs' worth of traffic, memory and processor time of trajectories."""
    files = [directory / f"scale-{name}.png" for name in ("broker", "gpus", "memory", "trajectories")]
    with drawing(files[0], title="What a call costs the broker", xlabel="number", ylabel="µs of its thread") as axes:
        for what in (ENGINES, IN_FLIGHT, SESSIONS):
            _line(axes, points(figures, what, "main_us"), what.removeprefix("broker, "))
        axes.set(xscale="log", ylim=(0, None))
        axes.legend()
    with drawing(
        files[1],
        title=f"GPUs that one broker serves ({limit(figures):,.0f} calls/s)",
        xlabel="tokens of an answer",
        ylabel="GPUs",
    ) as axes:
        lengths = [2**power for power in range(5, 14)]
        for speed in GPU_SPEEDS:
            served = [(length, Traffic(speed, length).gpus(limit(figures))) for length in lengths]
            _line(axes, served, f"GPUs of {speed:,} tokens/s")
        axes.set(xscale="log", yscale="log")
        axes.legend()
    with drawing(files[2], title="Memory, all trajectories in flight", xlabel="trajectories", ylabel="MB") as axes:
        for group in GROUPS:
            _line(axes, points(figures, TRAJECTORIES, f"{group}_mb"), group)
        axes.set(ylim=(0, None))
        axes.legend()
    with drawing(
        files[3], title="Processor time of a trajectory", xlabel="trajectories in flight", ylabel="ms"
    ) as axes:
        for group in GROUPS:
            _line(axes, points(figures, TRAJECTORIES, f"{group}_ms"), group)
        axes.set(xscale="log", ylim=(0, None))
        axes.legend()
    return files


def _line(axes: Any, found: Sequence[tuple[float, float]], label: str) -> None:
    axes.plot([x for x, _ in found], [y for _, y in found], marker="o", markersize=4, label=label)
