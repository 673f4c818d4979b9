"""The soak's arithmetic: what counts as growth, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.soak import Growth, Sample, growth, table

FLAT = Sample(calls=0, memory=100_000_000, descriptors=20, threads=3, tasks=4)


def samples(change: Callable[[int], dict[str, Any]]) -> list[Sample]:
    """A hundred, the i-th changed."""
    return [replace(FLAT, calls=i, **change(i)) for i in range(100)]


def test_a_flat_line_is_no_growth() -> None:
    """Nor is a peak, nor what comes and goes between neighbours."""
    assert not growth("broker", samples(lambda i: {})).too_much
    assert not growth("broker", samples(lambda i: {"memory": 10**9} if i == 98 else {})).too_much
    assert not growth("broker", samples(lambda i: {"descriptors": 20 + (i == 97)})).too_much
    assert not growth("broker", samples(lambda i: {"tasks": None})).too_much


def test_the_first_tenth_does_not_count() -> None:
    """Caches fill, tables grow, modules are imported."""
    warming = samples(lambda i: {"memory": 10**8 + min(i, 9) * 10**7, "threads": 3 + min(i, 9)})
    assert not growth("broker", warming).too_much


@pytest.mark.parametrize(
    "change",
    [
        lambda i: {"memory": 10**8 + i * 10**5},
        lambda i: {"descriptors": 20 + i // 50},
        lambda i: {"threads": 3 + i // 50},
        lambda i: {"tasks": 4 + i // 50},
    ],
)
def test_a_slow_leak_is_noticed(change: Callable[[int], dict[str, Any]]) -> None:
    """A tenth more memory; a single descriptor, thread or task more."""
    found = growth("broker", samples(change))
    assert found.too_much
    assert "TOO MUCH" in table([found])


def test_shrinking_is_no_growth() -> None:
    """Memory that is given back, threads that end."""
    assert not growth("engine-0", samples(lambda i: {"memory": 10**8 - i * 10**5, "threads": 3 - i // 50})).too_much


def test_the_table_says_what_grew() -> None:
    """Tasks only of those that can be asked."""
    found = [Growth("broker", (40.0, 41.0), 0.025, 0, -1, None), Growth("worker-0", (90.0, 90.0), 0.0, 0, 0, 2)]
    assert "| broker | 40.0 → 41.0 | +2.5% | +0 | -1 |  |" in table(found).splitlines()[2]
    assert table(found).splitlines()[3].endswith("| +0 | +0 | +2 | TOO MUCH")


@pytest.mark.parametrize(("tasks", "status"), [(4, 0), (5, 1)])
def test_the_exit_status_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tasks: int, status: int
) -> None:
    """1 where anything grows too much; every sample is in the JSON file."""
    made = samples(lambda i: {"tasks": tasks if i > 50 else 4})
    monkeypatch.setattr(soak, "soak", lambda *_: {"trainer": made})
    assert soak.main(["--json", str(tmp_path / "samples.json")]) == status
    assert "99 calls" in capsys.readouterr().out
    assert (tmp_path / "samples.json").read_text().count('"memory"') == 100
