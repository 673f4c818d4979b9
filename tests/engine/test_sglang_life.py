"""When SGLang counts as dead: on virtual time, with processes of our own in place of its."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.virtual_clock import run
from zagent.engine import sglang_life
from zagent.engine.base import Death
from zagent.engine.sglang_life import Life


async def answers() -> None:
    """A scheduler that is well."""
    await asyncio.sleep(0.1)


async def never() -> None:
    """A scheduler that hangs."""
    await asyncio.get_running_loop().create_future()


def complaints() -> list[dict[str, Any]]:
    """What asyncio would only log on the running loop, from now on."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: found.append(context))
    return found


def watch(
    ask: Callable[[], Awaitable[None]], *, hung_after_s: float = 120.0, seconds: float = 1000.0
) -> tuple[float, Death | None]:
    """Virtual seconds until the end of SGLang, and what it was; None after ``seconds`` without one."""

    async def main() -> tuple[float, Death | None]:
        life = Life([os.getpid()], hung_after_s)
        life.start(ask)
        try:
            await asyncio.wait([life.died], timeout=seconds)
            return asyncio.get_running_loop().time(), life.died.result() if life.died.done() else None
        finally:
            life.stop()
            life.stop()
            await asyncio.sleep(0)

    return run(main())


def test_a_scheduler_that_answers_lives() -> None:
    """However long, and it is asked every ten seconds, not more often."""
    asked = []

    async def ask() -> None:
        asked.append(1)
        await answers()

    assert watch(ask) == (1000, None)
    assert len(asked) == pytest.approx(100, abs=1)


@pytest.mark.parametrize(("limit", "at"), [(120.0, 120), (115.0, 120), (8.0, 8)])
def test_a_scheduler_that_hangs_is_dead_after_a_while(limit: float, at: float) -> None:
    """By itself: a call may have done it."""
    seconds, death = watch(never, hung_after_s=limit)
    assert seconds == pytest.approx(at)
    assert death == (f"SGLang's scheduler has not answered for {at} s", True)


def test_zero_never_asks() -> None:
    """`engine.hung_after_s=0` switches it off."""
    assert watch(never, hung_after_s=0.0) == (1000, None)


def test_one_answer_in_time_starts_the_count_anew() -> None:
    """A step of 100 s now and then is no death, and a question is never put twice at once."""
    began, ended = [], []

    async def slow() -> None:
        began.append(len(ended))
        await asyncio.sleep(100)
        ended.append(1)

    assert watch(slow) == (1000, None)
    assert began == list(range(len(began)))
    assert len(began) >= 9


def test_an_answer_that_is_an_error_is_an_answer() -> None:
    """It came from a living scheduler."""

    async def fails() -> None:
        raise RuntimeError("no")

    assert watch(fails) == (1000, None)


def test_a_stopped_process_is_dead_after_a_while_and_no_call_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: the detokenizer is not asked anything."""
    monkeypatch.setattr(sglang_life, "is_stopped", lambda pid: pid == os.getpid())
    seconds, death = watch(answers)
    assert (seconds, death) == (120, (f"process {os.getpid()} of SGLang has been stopped for 120 s", False))


def test_a_process_that_goes_on_in_time_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, SIGCONT."""
    looks = iter(range(10**6))
    monkeypatch.setattr(sglang_life, "is_stopped", lambda pid: next(looks) % 10 != 0)
    assert watch(answers) == (1000, None)


def test_a_cry_for_help_is_the_end() -> None:
    """SIGQUIT, by which SGLang's processes say that they failed: by themselves."""

    async def ask() -> None:
        os.kill(os.getpid(), signal.SIGQUIT)

    assert watch(ask)[1] == ("a process of SGLang reported a failure", True)


@pytest.mark.parametrize("cancelled", [True, False])
def test_the_end_of_the_receiver_is_the_end(cancelled: bool) -> None:
    """With its exception; unless it was we who cancelled it."""

    async def main() -> Death | None:
        life = Life([], 0)
        life.start(answers)
        found = complaints()
        receiver = asyncio.get_running_loop().create_future()
        life.receives(receiver)
        receiver.cancel() if cancelled else receiver.set_exception(OSError("gone"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not found
        return life.died.result() if life.died.done() else None

    assert run(main()) == (None if cancelled else ("SGLang's receive loop ended: OSError('gone')", True))


def test_the_first_reason_stays() -> None:
    """What dies with it is no news."""

    async def main() -> Death:
        life = Life([], 0)
        life.start(answers)
        life.end(Death("first", False))
        life.end(Death("second", True))
        return life.died.result()

    assert run(main()) == ("first", False)


def test_what_is_kept_runs_to_its_end_and_complains_to_nobody() -> None:
    """A kept task outlives who waits for it; its exception is no "never retrieved"."""

    async def main() -> list[int]:
        life, done = Life([], 0), []
        life.start(answers)
        found = complaints()

        async def work() -> None:
            await asyncio.sleep(1)
            done.append(1)
            raise ValueError

        life.keep(asyncio.create_task(work()))
        await asyncio.sleep(2)
        gc.collect()
        assert not found
        return done

    assert run(main()) == [1]
