"""A modelled engine: continuous batching as SGLang does it by default, in virtual time, without noise.

One prompt is computed at a time, before any decoding goes on; so samples of one prompt find it when their turn comes.
A decode step gives each running call one token and takes longer the more there are. Where memory is short, the call
that came last is put back and computed again. What is not modelled: chunks of prompts beside decoding, the order by
cached prefix in which SGLang may take waiting calls, and that attention grows with the context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from benchmarks.modelled.clock import Clock
from benchmarks.modelled.kv import BLOCK, KvMemory

#: Blocks that a running call's answer is given at once.
GROW = 4


class Speed(NamedTuple):
    """What an engine can do. The defaults are roughly those of a model with 8 billion parameters on one large GPU."""

    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 0.010  #: of a decode step with one call …
    call_s: float = 0.000_1  #: … and for each further one
    max_batch: int = 64  #: calls that decode at once
    kv_tokens: int = 400_000


@dataclass(slots=True, eq=False)
class Job:
    """One call. ``keys`` name the blocks of its prompt and, behind them, of its answer."""

    keys: Sequence[int]
    prompt: int  #: tokens
    answer: int  #: tokens
    done: Callable[[], None]
    made: int = 0  #: tokens of the answer
    begun: float = 0.0  #: the engine's count of steps when it began to decode, less ``made``
    held: int = 0  #: blocks, the first of ``keys``
    runs: int = field(default=0)  #: how often it began


class ModelEngine:
    """Runs jobs. ``prefilled``, ``cached`` and ``preempted`` count prompt tokens, and jobs that were put back."""

    def __init__(self, clock: Clock, speed: Speed) -> None:
        self._clock, self._speed = clock, speed
        self._memory = KvMemory(speed.kv_tokens // BLOCK)
        self._queue: deque[Job] = deque()
        self._running: dict[Job, None] = {}  # in the order they began
        self._next: list[tuple[float, int, Job, int]] = []  # steps at which a job needs a block or ends
        self._order = 0
        self._steps, self._since = 0.0, 0.0  # each running job's tokens, and when that was so
        self._prefilling = False
        self._wake = 0
        self.prefilled = self.cached = self.preempted = 0
        self.busy_s = 0.0

    def submit(self, job: Job) -> None:
        """Queue it. Raises `ValueError` where it could never run."""
        if len(job.keys) > self._memory.capacity:
            raise ValueError(f"a call of {len(job.keys)} blocks, {self._memory.capacity} at most")
        self._queue.append(job)
        if not self._prefilling:
            self._advance()
            self._go_on()

    def _pace(self) -> float:
        """Seconds a step takes now."""
        return self._speed.step_s + self._speed.call_s * (len(self._running) - 1)

    def _advance(self) -> None:
        """Bring the count of steps up to now."""
        if self._running:
            self.busy_s += self._clock.now - self._since
            self._steps += (self._clock.now - self._since) / self._pace()
        self._since = self._clock.now

    def _go_on(self) -> None:
        """Compute the next prompt if it can begin, else decode up to the next event."""
        self._wake += 1
        job = self._queue[0] if self._queue else None
        if job is not None and self._may_begin(job):
            self._queue.popleft()
            self._prefill(job)
        elif self._running:
            wait = max(0.0, (self._next[0][0] - self._steps) * self._pace())
            wake = self._wake
            self._clock.at(self._clock.now + wait, lambda: self._decoded(wake))

    def _may_begin(self, job: Job) -> bool:
        if len(self._running) >= self._speed.max_batch:
            return False
        reserve = GROW * (len(self._running) + 1) if self._running else 0  # for each to grow once
        return self._memory.fits(job.keys[: _blocks(job.prompt + job.made)], reserve)

    def _prefill(self, job: Job) -> None:
        size = job.prompt + job.made
        keys = job.keys[: _blocks(size)]
        cached = min(self._memory.known(keys), (size - 1) // BLOCK) * BLOCK
        self._memory.hold(keys)
        job.held = len(keys)
        job.runs += 1
        self.prefilled += size - cached
        self.cached += cached
        self._prefilling = True
        seconds = (size - cached) / self._speed.prefill_tokens_per_s
        self.busy_s += seconds
        self._clock.at(self._clock.now + seconds, lambda: self._begin(job))

    def _begin(self, job: Job) -> None:
        self._prefilling = False
        self._since = self._clock.now  # nobody decoded meanwhile
        self._running[job] = None
        job.begun = self._steps - job.made
        self._plan(job)
        self._go_on()

    def _plan(self, job: Job) -> None:
        """Its next event: what it was given is full, or its end."""
        at = min(job.answer, max(job.made, job.held * BLOCK - job.prompt) + GROW * BLOCK)
        self._order += 1
        heappush(self._next, (job.begun + at, self._order, job, job.runs))

    def _decoded(self, wake: int) -> None:
        if wake != self._wake:
            return
        self._advance()
        while self._next and self._next[0][0] <= self._steps + 1e-6:
            at, _, job, runs = heappop(self._next)
            if job in self._running and runs == job.runs:
                job.made = round(at - job.begun)
                self._grow(job)
        self._go_on()

    def _grow(self, job: Job) -> None:
        keys = job.keys[job.held : _blocks(job.prompt + job.made)]
        while not self._memory.fits(keys):
            last = next(reversed(self._running))
            self._put_back(last)
            if last is job:
                return
        self._memory.hold(keys)
        job.held += len(keys)
        if job.made < job.answer:
            self._plan(job)
        else:
            self._stop(job)
            self._clock.at(self._clock.now, job.done)  # not here: it may bring the next call

    def _put_back(self, job: Job) -> None:
        job.made = int(self._steps - job.begun + 1e-6)
        self._stop(job)
        self._queue.appendleft(job)
        self.preempted += 1

    def _stop(self, job: Job) -> None:
        del self._running[job]
        self._memory.release(job.keys[: job.held])


def _blocks(tokens: int) -> int:
    """Whole blocks."""
    return tokens // BLOCK
