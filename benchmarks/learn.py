"""Does it learn? The GRPO example in full, by several seeds and modes: what was gained, and what a step took.

    python -m benchmarks.learn [--seeds 0 1 2] [--modes sync …] [--out DIR] [arguments of examples/grpo_tiny.py …]

Exit status 1 if one of them gained less than ten points of greedy accuracy, on real engines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.drawing import drawing
from benchmarks.machine import machine

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_tiny.py"
#: Share of unseen questions that a run must gain, and where it must begin: below there is nothing to reward, above
#: little to gain.
GAIN, START = 0.10, (0.60, 0.75)
#: Of the importance ratios' mean before the first step, from 1: the engines sample from the trainer's model.
RATIO_MARGIN = 1e-3
#: Steps that a point of the plotted reward is the mean of.
WINDOW = 10


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the example. ``steps``: as its `summary.json` has them."""

    mode: str
    seed: int
    seconds: float
    before: float
    after: float
    steps: Sequence[dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.mode}, seed {self.seed}"

    @property
    def times(self) -> tuple[float, float]:
        """Seconds of a step in the middle: waiting for the batch, and training on it."""
        waited, trained = (statistics.median(step[key] for step in self.steps) for key in ("waited_s", "trained_s"))
        return waited, trained

    @property
    def gain(self) -> float:
        return self.after - self.before

    def complaints(self) -> list[str]:
        """What is not as it should be."""
        found = []
        if not START[0] <= self.before <= START[1]:
            found.append(f"began with {self.before:.1%}, not between {START[0]:.0%} and {START[1]:.0%}")
        if self.gain < GAIN:
            found.append(f"gained {100 * self.gain:.1f} points, not {100 * GAIN:.0f}")
        ratio = self.steps[0]["ratio_mean"]
        if not abs(ratio - 1) <= RATIO_MARGIN:
            found.append(f"first importance ratios have mean {ratio:.5f}, not 1")
        return found


def run(mode: str, seed: int, out: Path, arguments: Sequence[str]) -> Run:
    """Run the example; its lines go to stderr. Raises `CalledProcessError` if it fails."""
    directory = out / f"{mode}-{seed}"
    command = [sys.executable, str(EXAMPLE), "--mode", mode, "--seed", str(seed), "--out", str(directory), *arguments]
    print(f"{mode}, seed {seed}:", file=sys.stderr, flush=True)
    began = time.monotonic()
    subprocess.run(command, stdout=sys.stderr, check=True)
    summary = json.loads((directory / "summary.json").read_text())
    return Run(mode, seed, time.monotonic() - began, **summary)


def complaints(runs: Sequence[Run]) -> list[str]:
    """A line for each thing that is not as it should be."""
    return [f"NOT as it should be: {one.name} {text}" for one in runs for text in one.complaints()]


def table(runs: Sequence[Run]) -> str:
    """Markdown: a line per run."""
    lines = [
        "| run | before | after | gain | sampled reward | steps | s per step (waiting, training) | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in runs:
        rewards = smoothed([step["reward"] for step in one.steps])
        waited, trained = one.times
        lines.append(
            f"| {one.name} | {one.before:.1%} | {one.after:.1%} | {100 * one.gain:+.1f} | {rewards[0]:.2f} → "
            f"{rewards[-1]:.2f} | {len(one.steps)} | {waited + trained:.1f} ({waited:.1f}, {trained:.1f}) | "
            f"{one.seconds / 60:.1f} |"
        )
    return "\n".join(lines)


def comparison(runs: Sequence[Run]) -> Iterator[str]:
    """For each run whose seed has run in `sync`, too: how much of the shorter of generation and training was hidden."""
    in_turns = {one.seed: one for one in runs if one.mode == "sync"}
    for one in runs:
        if one.mode == "sync" or one.seed not in in_turns:
            continue
        generation, training = in_turns[one.seed].times
        before, now = generation + training, sum(one.times)
        hidden = (before - now) / min(generation, training)
        yield (
            f"{one.name}: a step takes {now:.1f} s, in turns {before:.1f} s: {hidden:.0%} of the shorter of "
            f"generation ({generation:.1f} s) and training ({training:.1f} s) is hidden"
        )


def smoothed(values: Sequence[float]) -> list[float]:
    """Means of `WINDOW` values in a row (of all, where there are fewer)."""
    width = min(WINDOW, len(values))
    return [statistics.fmean(values[start : start + width]) for start in range(len(values) - width + 1)]


def plot(runs: Sequence[Run], file: Path) -> None:
    """The mean sampled reward of each run over its steps."""
    with drawing(
        file, title="GRPO: a tiny model and its calculator", xlabel="step", ylabel=f"mean reward of {WINDOW} steps"
    ) as axes:
        for one in runs:
            axes.plot(smoothed([step["reward"] for step in one.steps]), label=one.name)
        axes.legend(frameon=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and draw; the exit status: 1 if one run did not learn as it should."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learn", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(0 1 2)")
    parser.add_argument("--modes", nargs="+", default=["sync"], help="(sync)")
    parser.add_argument(
        "--engine", default="sglang", help="(sglang) sim learns nothing: only what a step takes is told"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/learn"), help="(outputs/learn)")
    options, arguments = parser.parse_known_args(argv)
    arguments = ["--engine", options.engine, *arguments]
    runs = [run(mode, seed, options.out, arguments) for mode in options.modes for seed in options.seeds]
    wrong = complaints(runs) if options.engine == "sglang" else []
    print(table(runs), "", *wrong, *comparison(runs), sep="\n")
    print(f"\n{machine()}.")
    plot(runs, options.out / "reward.png")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
