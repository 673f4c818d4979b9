"""What counts as learning, and how runs of the example are told of."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learn
from benchmarks.learn import Run, comparison, complaints, smoothed, table

STEPS = [{"reward": 0.5 + i / 100, "ratio_mean": 1.0001, "waited_s": 4.0, "trained_s": 2.0} for i in range(20)]
GOOD = Run("sync", 1, 600.0, 0.67, 0.83, STEPS)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"after": 0.76}, "gained 9.0 points, not 10"),
        ({"before": 0.55}, "began with 55.0%, not between 60% and 75%"),
        ({"before": 0.76, "after": 0.9}, "began with 76.0%"),
        ({"steps": [{**STEPS[0], "ratio_mean": 1.002}]}, "mean 1.00200, not 1"),
        ({"steps": [{**STEPS[0], "ratio_mean": float("nan")}]}, "mean nan, not 1"),
    ],
)
def test_a_run_that_did_not_learn_is_complained_of(change: dict[str, Any], complaint: str) -> None:
    """By its name; a good one is not."""
    assert complaints([GOOD]) == []
    [said] = complaints([GOOD, replace(GOOD, seed=2, **change)])
    assert said.startswith("NOT as it should be: sync, seed 2 ")
    assert complaint in said


def test_the_table_has_a_line_per_run() -> None:
    """Accuracy, gain, the reward's first and last ten steps, seconds, minutes."""
    assert table([GOOD]).splitlines()[2:] == [
        "| sync, seed 1 | 67.0% | 83.0% | +16.0 | 0.55 → 0.65 | 20 | 6.0 (4.0, 2.0) | 10.0 |"
    ]


def test_modes_are_compared_with_taking_turns() -> None:
    """By the medians of a step, for seeds that have run in both."""
    steps = [{**step, "waited_s": 2.2} for step in STEPS]
    runs = [GOOD, replace(GOOD, mode="one_step_off", steps=steps), replace(GOOD, mode="fully_async", seed=9)]
    assert list(comparison(runs)) == [
        "one_step_off, seed 1: a step takes 4.2 s, in turns 6.0 s: 90% of the shorter of generation (4.0 s) and "
        "training (2.0 s) is hidden"
    ]


def test_short_runs_are_smoothed_as_a_whole() -> None:
    """Fewer values than the window give their mean."""
    assert smoothed([1.0, 2.0, 3.0]) == [2.0]
    assert smoothed([0.0] * 10 + [10.0]) == [0.0, 1.0]


def test_all_seeds_and_modes_are_run_and_the_worst_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Further arguments are the example's; exit status 1 if one run gains too little, on engines from which it can."""
    commands = []

    def pretend(command: list[str], **_: Any) -> None:
        commands.append(command)
        seed, out = int(command[command.index("--seed") + 1]), Path(command[command.index("--out") + 1])
        out.mkdir(parents=True, exist_ok=True)
        summary = {"before": 0.65, "after": 0.80 - seed / 20, "steps": STEPS}
        (out / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(subprocess, "run", pretend)
    arguments = ["--modes", "sync", "fully_async", "--out", str(tmp_path), "--seeds"]
    assert learn.main([*arguments, "0", "--steps", "3"]) == 0
    assert [command[:4] for command in commands] == [
        [sys.executable, str(learn.EXAMPLE), "--mode", mode] for mode in ("sync", "fully_async")
    ]
    assert all(command[-2:] == ["--steps", "3"] for command in commands)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert learn.main([*arguments, "1", "2"]) == 1
    assert "sync, seed 2 gained 5.0 points" in capsys.readouterr().out
    assert learn.main(["--engine", "sim", *arguments, "2"]) == 0
    assert commands[-1][-2:] == ["--engine", "sim"]
