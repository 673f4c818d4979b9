"""The broker's clock."""

from __future__ import annotations

from itertools import pairwise

from zagent.broker.awake import STOOD_STILL_S, AwakeClock


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    """Looks close to each other add up; a gap is left out, however long, and time goes on behind it."""
    times = iter([100.0, 100.2, 100.2 + STOOD_STILL_S / 2, 104.0, 104.2, 2000.0, 2000.5])
    clock = AwakeClock(lambda: next(times))
    seen = [clock() for _ in range(6)]
    assert [round(after - before, 6) for before, after in pairwise(seen)] == [0.5, 0, 0.2, 0, 0.5]
    assert seen[0] == 100.2
