"""Signs of life: turns of the event loop, and what keeps a thread that all wait for."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from support import virtual_clock
from zagent import alive


class Clock:
    """`time.monotonic`, as the test says."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Nobody has marked anything, and time stands still."""
    clock = Clock()
    monkeypatch.setattr(alive, "time", clock)
    monkeypatch.setattr(alive, "_signs", alive._Signs())
    return clock


def lag_s() -> float:
    """Of the whole process, after the first mark."""
    found = alive.longest()
    assert found is not None
    return found[0]


def test_before_the_first_mark_nothing_is_known() -> None:
    """None, also while a thread is busy: the process still starts."""
    with alive.busy("loading"):
        assert alive.longest() is None


def test_the_lag_counts_from_the_last_mark(clock: Clock) -> None:
    """Seconds, and whose they are."""
    alive.mark()
    clock.now += 5
    alive.mark()
    clock.now += 2
    assert alive.longest() == (2, "the event loop")


def test_the_longest_of_all_counts(clock: Clock) -> None:
    """The oldest of several busy threads, the loop among them, by its name; what has ended does not."""
    alive.mark()
    with alive.busy("old"):
        clock.now += 3
        with alive.busy("young"):
            clock.now += 4
            alive.mark()
            clock.now += 1
            assert alive.longest() == (8, "old")
        assert alive.longest() == (8, "old")
    assert alive.longest() == (1, "the event loop")


def test_what_failed_keeps_nobody_waiting(clock: Clock) -> None:
    """A function that raised is at an end."""
    alive.mark()
    with suppress(ValueError), alive.busy("it"):
        raise ValueError
    clock.now += 1
    assert alive.longest() == (1, "the event loop")


def test_a_watched_loop_marks_itself_while_it_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lag stays within `MARK_S`, hours later too."""

    async def main() -> list[float]:
        monkeypatch.setattr(alive.time, "monotonic", asyncio.get_running_loop().time)
        alive.watch_loop()
        lags = [lag_s()]
        for _ in range(100):
            await asyncio.sleep(100.1)
            lags.append(lag_s())
        return lags

    assert all(0 <= lag <= alive.MARK_S for lag in virtual_clock.run(main()))


def test_a_loop_that_does_not_turn_lags(clock: Clock) -> None:
    """Blocked for a minute: no mark is made meanwhile, one right after."""

    async def main() -> list[float]:
        alive.watch_loop()
        clock.now += 60  # as `time.sleep(60)` would have it
        lag = lag_s()
        await asyncio.sleep(2 * alive.MARK_S)
        return [lag, lag_s()]

    assert virtual_clock.run(main()) == [60, 0]
