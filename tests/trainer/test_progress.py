"""What a person sees while a job runs and at its end."""

from __future__ import annotations

import io
import threading
from typing import Any

from support.outcomes import failed, ok
from zagent.errors import InputError
from zagent.trainer.progress import Progress, Tally, table
from zagent.types import Outcome


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Signalling(io.StringIO):
    """Says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def progress(total: int = 4, stream: Any = None) -> tuple[Progress, Clock, Any]:
    clock, stream = Clock(), stream or io.StringIO()
    return Progress(total, stream, clock=clock, interval_s=1000.0), clock, stream


def test_tally_counts_what_was_sampled() -> None:
    """Tool tokens are not the engine's work."""
    tally = Tally(3)
    for outcome in (ok(response=[1, 2, 3], mask=[1, 0, 1]), failed(1), Outcome(2, "u", 0, "cancelled")):
        tally.add(outcome)
    assert (tally.done, tally.failed, tally.tokens, tally.cached_share) == (3, 2, 2, None)


def test_tally_knows_the_cached_share() -> None:
    """Over engine calls where the loop counts them, else over the row's prompt."""
    tally = Tally(2)
    tally.add(ok(prompt=[1, 2, 3, 4], extra_fields={"cached_tokens": 2}))
    tally.add(ok(prompt=[1, 2], extra_fields={"cached_tokens": 3, "prompt_tokens": 6}))
    assert tally.cached_share == 0.5


def test_plain_line() -> None:
    """done/total, tokens/s, failures and the time left."""
    shown, clock, _ = progress()
    assert shown.line() == "0/4 rows, 0 tokens/s, 0 failed, 0s elapsed, ? left"
    shown.add(ok(response=[1] * 30))
    shown.add(failed())
    clock.now += 10
    assert shown.line() == "2/4 rows, 3 tokens/s, 1 failed, 10s elapsed, 10s left"


def test_the_last_line_is_always_printed() -> None:
    """However short the job; the clock stops there."""
    shown, clock, stream = progress()
    with shown:
        clock.now += 2
    clock.now += 50
    assert stream.getvalue() == "0/4 rows, 0 tokens/s, 0 failed, 2s elapsed, ? left\n"
    assert shown.elapsed_s == 2


def test_lines_come_while_nothing_finishes() -> None:
    """A stalled job still says so, from a thread that ends with it."""
    stream = Signalling()
    shown = Progress(4, stream, clock=Clock(), interval_s=0.001)
    with shown:
        assert stream.written.wait(10)
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_a_terminal_gets_a_bar() -> None:
    """With done/total, tokens/s and failures."""
    shown, clock, stream = progress(stream=Terminal())
    with shown:
        clock.now += 1
        shown.add(ok(response=[1] * 30))
        shown.add(failed())
        shown.show()
    text = stream.getvalue()
    assert "2/4" in text
    assert "30 tokens/s, 1 failed" in text


def test_table() -> None:
    """Rows by status, tokens, tokens/s, cached share and each engine."""
    shown, clock, _ = progress(total=3)
    with shown:
        shown.add(ok(prompt=[1, 2], response=[1] * 30, extra_fields={"cached_tokens": 1}))
        shown.add(failed(1))
        clock.now += 10
    ready = {"state": "ready", "total": 1, "response_tokens": 30, "prompt_tokens": 2, "cached_tokens": 1}
    text = table(shown, {"engine-1": ready, "engine-0": {"state": "dead", "total": 0}})
    assert text.splitlines() == [
        "rows            3 (1 failed, 1 ok, 1 not run)",
        "response tokens 30",
        "time            10.0 s",
        "tokens/s        3.0",
        "cached share    50.0% of prompt tokens",
        "failed          1 × LoopError, first uid u1: it broke",
        "engine    state        calls    tokens  cached",
        "engine-0  dead             0         -       -",
        "engine-1  ready            1        30     50%",
    ]


def test_table_without_knowledge() -> None:
    """What nobody said is not made up."""
    shown, _, _ = progress(total=1)
    text = table(shown, {"engine-0": {"state": "ready", "total": 1}})
    assert "1 (none done, 1 not run)" in text
    assert "cached share    unknown" in text
    assert text.endswith("1         -       -")


def test_different_messages_of_one_class_are_shown() -> None:
    """Each once, the first five: one mistake must not hide another."""
    progress = Progress(9, io.StringIO(), clock=lambda: 0.0)
    for number, text in enumerate(["a", "b", "a", "c", "d", "e", "f"]):
        progress.tally.add(Outcome(number, f"u{number}", 0, "failed", None, InputError(f"{text} is wrong\nmore")))
    shown = table(progress, {})
    assert "7 × InputError, first uid u0: a is wrong" in shown
    assert [line.split()[1] for line in shown.splitlines() if "also:" in line] == ["b", "c", "d", "e"]
    assert "more" not in shown
