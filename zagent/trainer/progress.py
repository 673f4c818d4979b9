"""What a person sees of a batch job: a bar or plain lines while it runs, a table at its end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from zagent.types import Outcome

#: Seconds between plain lines; the bar is redrawn every second, so that a stall shows.
PLAIN_INTERVAL_S = 5.0
#: Different messages shown of one class of error.
TEXTS_SHOWN = 5
BAR_INTERVAL_S = 1.0


@dataclass(slots=True)
class Failures:
    """Rows that failed with one class of error: the first one's uid, and the first lines of the messages, each once."""

    uid: Any
    count: int = 0
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        line = text.splitlines()[0] if text else ""
        if line not in self.texts and len(self.texts) < TEXTS_SHOWN:
            self.texts.append(line)


@dataclass(slots=True)
class Tally:
    """Counts over the outcomes so far.

    ``tokens`` are sampled ones (mask 1). ``prompt_tokens`` and ``cached_tokens`` sum over engine calls, from rows
    whose `extra_fields` say `cached_tokens` (and, with several calls, `prompt_tokens`; else the prompt's length).
    """

    total: int
    statuses: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: By error class.
    errors: dict[str, Failures] = field(default_factory=dict)

    @property
    def done(self) -> int:
        return self.statuses.total()

    @property
    def failed(self) -> int:
        """Outcomes that are not `ok`."""
        return self.done - self.statuses["ok"]

    @property
    def cached_share(self) -> float | None:
        """Share of prompt tokens that engines had in their cache; None = nobody said."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def add(self, outcome: Outcome) -> None:
        self.statuses[outcome.status] += 1
        if outcome.error is not None:
            failures = self.errors.setdefault(type(outcome.error).__name__, Failures(outcome.uid))
            failures.add(str(outcome.error))
        output = outcome.output
        if output is None:
            return
        self.tokens += int(np.sum(output.response_mask))
        extra = output.extra_fields
        if extra.get("cached_tokens") is not None:
            self.cached_tokens += int(extra["cached_tokens"])
            self.prompt_tokens += int(extra.get("prompt_tokens") or len(output.prompt_ids))


class Progress:
    """Shows a `Tally` on ``stream``: tqdm's bar on a terminal, else a line every few seconds. A thread of its own
    keeps it moving while no outcome comes; the context manager starts and ends it."""

    def __init__(
        self,
        total: int,
        stream: TextIO,
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float | None = None,
    ) -> None:
        self.tally = Tally(total)
        self._stream, self._clock, self._began = stream, clock, clock()
        self._end: float | None = None
        self._bar = tqdm(total=total, file=stream, unit="row", dynamic_ncols=True) if stream.isatty() else None
        self._interval_s = interval_s or (BAR_INTERVAL_S if self._bar is not None else PLAIN_INTERVAL_S)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)

    @property
    def elapsed_s(self) -> float:
        """Since construction, until the context manager was left."""
        return (self._clock() if self._end is None else self._end) - self._began

    @property
    def tokens_per_s(self) -> float:
        return self.tally.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        with self._lock:
            self.tally.add(outcome)
            if self._bar is not None:
                self._bar.set_postfix_str(self._rates(), refresh=False)
                self._bar.update()

    def show(self) -> None:
        """Redraw the bar, or print a line."""
        with self._lock:
            if self._bar is not None:
                self._bar.set_postfix_str(self._rates(), refresh=True)
            else:
                print(self.line(), file=self._stream, flush=True)

    def line(self) -> str:
        """The plain line: done/total, tokens/s, failures, time left."""
        tally = self.tally
        left = "?" if not tally.done else f"{self.elapsed_s / tally.done * (tally.total - tally.done):.0f}s"
        return f"{tally.done}/{tally.total} rows, {self._rates()}, {self.elapsed_s:.0f}s elapsed, {left} left"

    def _rates(self) -> str:
        return f"{self.tokens_per_s:.0f} tokens/s, {self.tally.failed} failed"

    def _tick(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.show()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(timeout=5.0)
        self._end = self._clock()
        self.show()
        if self._bar is not None:
            self._bar.close()


def table(progress: Progress, engines: Mapping[str, Mapping[str, Any]]) -> str:
    """The closing table. ``engines``: name -> what `status()` says of it (state, total), and `engine_stats()` where it
    still answers (response_tokens, prompt_tokens, cached_tokens)."""
    tally = progress.tally
    share = tally.cached_share
    counts = ", ".join(f"{count} {status}" for status, count in sorted(tally.statuses.items()))
    missing = f", {tally.total - tally.done} not run" if tally.done < tally.total else ""
    facts = [
        ("rows", f"{tally.total} ({counts or 'none done'}{missing})"),
        ("response tokens", f"{tally.tokens}"),
        ("time", f"{progress.elapsed_s:.1f} s"),
        ("tokens/s", f"{progress.tokens_per_s:.1f}"),
        ("cached share", "unknown" if share is None else f"{share:.1%} of prompt tokens"),
    ]
    for kind, failures in sorted(tally.errors.items()):
        first, *others = failures.texts
        facts.append(("failed", f"{failures.count} × {kind}, first uid {failures.uid}: {first}"))
        facts.extend(("", f"    also: {text}") for text in others)
    lines = [f"{name:<16}{value}" for name, value in facts]
    return "\n".join([*lines, *_engine_lines(engines)])


def _engine_lines(engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not engines:
        return []
    width = max(len("engine"), *(len(name) for name in engines)) + 2
    head = f"{'engine':<{width}}{'state':<10}{'calls':>8}{'tokens':>10}{'cached':>8}"
    return [head, *(f"{name:<{width}}{_engine_line(engine)}" for name, engine in sorted(engines.items()))]


def _engine_line(engine: Mapping[str, Any]) -> str:
    prompt = engine.get("prompt_tokens")
    cached = f"{engine['cached_tokens'] / prompt:.0%}" if prompt else "-"
    state, calls = engine.get("state", "?"), engine.get("total", "?")
    return f"{state:<10}{calls:>8}{engine.get('response_tokens', '-'):>10}{cached:>8}"
