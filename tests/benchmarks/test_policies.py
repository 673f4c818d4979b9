"""The policies' cases, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import policies
from benchmarks.suite import Figure


def figures() -> list[Figure]:
    """One case of each kind, at a sixteenth of the work."""
    found: list[Figure] = []
    made = (policies.group_cases(16), policies.rebind_cases(16), policies.cap_cases(16))
    policies.run_model([next(some) for some in made], 2, found.append)
    return found


def test_every_case_has_both_sides_on_the_same_work() -> None:
    """And there are as many as points in the plots, each by its own name."""
    cases = [*policies.group_cases(), *policies.rebind_cases(), *policies.cap_cases()]
    assert len({str(case) for case in cases}) == len(cases)
    assert all(case.on != case.off for case in cases)
    assert {case.policy for case in cases} == set(policies.PLOTS)


def test_figures_come_in_pairs() -> None:
    """Makespan, cached share and calls put back, with the policy and without, by seed."""
    found = figures()
    assert len(found) == 3 * 2 * 2 * 3
    for peer in ("off", "on"):
        assert sum(f.peer == peer and f.name == "makespan_s" and f.value > 0 for f in found) == 6


def test_the_table_says_who_wins() -> None:
    """A row per case, under its policy's heading."""
    lines = policies.table(figures()).splitlines()
    for plot in policies.PLOTS.values():
        assert f"**{plot.title}**" in lines
    assert sum(line.startswith("| 4 samples, 2 engines | 512 |") for line in lines) == 1


@pytest.mark.parametrize(
    ("found", "said"), [([0.9, 0.98], "wins"), ([0.9, 1.0], "–"), ([1.02, 1.1], "loses"), ([0.98, 1.3], "–")]
)
def test_a_verdict_needs_every_seed(found: list[float], said: str) -> None:
    """By more than one per cent."""
    assert policies.verdict(found) == said


def test_each_policy_has_a_plot(tmp_path: Path) -> None:
    """PNG files, where matplotlib is installed."""
    pytest.importorskip("matplotlib")
    files = policies.plots(figures(), tmp_path)
    assert [file.name for file in files] == ["policies-group.png", "policies-rebind.png", "policies-cap.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
