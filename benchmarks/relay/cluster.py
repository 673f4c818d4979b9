"""A peer's servers and callers, up and idle, and one round over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.processes import Failed, Process, Processes
from benchmarks.relay.marked import Mark
from benchmarks.relay.traffic import CALLERS, SERVERS, Load, Round, Timing


@dataclass(frozen=True)
class Shape:
    """Processes of a cluster, and a directory for its sockets and files."""

    directory: str
    servers: int = SERVERS
    callers: int = CALLERS


class Callers(Protocol):
    """A cluster's callers, wherever they live."""

    def each(self, step: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """`Caller`'s ``step`` with its arguments, on as many callers as there are arguments, all at once; what they
        return. Raises `Failed`."""


class CallerProcesses:
    """Callers that are processes of ours. ``settings`` are `caller.main`'s."""

    def __init__(self, processes: Processes, number: int, settings: dict[str, Any]) -> None:
        entry = "benchmarks.relay.caller:main"
        self._processes: list[Process] = [processes.start(f"caller-{i}", entry, settings) for i in range(number)]

    def each(self, step: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        busy = self._processes[: len(arguments)]
        for process, given in zip(busy, arguments, strict=True):
            process.send((step, *given))
        return [process.receive() for process in busy]


class Peer(Protocol):
    """A module of `benchmarks.relay.peers`."""

    FORMS: tuple[bool, ...]  #: what its callers can have: lists (True), arrays (False)
    PACE: float  #: calls a second, as a share of the sockets': how many make a round of about a second

    def start(self, processes: Processes, shape: Shape) -> Callers:
        """Servers and callers, ready. Raises `Failed`."""


@dataclass(frozen=True)
class Measured:
    """One round. Latencies in ms."""

    calls_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float  #: processor time of all processes per call; less shaken by neighbours than the clock


def measured(timings: Sequence[Timing], served_s: float) -> Measured:
    """All callers' timings as one; ``served_s`` is the other processes' processor time."""
    latencies = np.concatenate([timing.latencies for timing in timings]) * 1000
    seconds = max(timing.end for timing in timings) - min(timing.start for timing in timings)
    p50, p99 = (float(q) for q in np.percentile(latencies, (50, 99)))
    cpu = served_s + sum(timing.cpu for timing in timings)
    return Measured(latencies.size / seconds, p50, p99, cpu / latencies.size * 1e6)


class Cluster:
    """One peer's."""

    def __init__(self, callers: Callers, mark: Mark) -> None:
        self._callers = callers
        self._mark = mark
        self._seed = 0

    def round(self, load: Load, calls: int) -> Measured:
        """``calls`` calls of each of the load's callers. Raises `Failed` where a token of a reply is wrong."""
        self._seed += load.callers
        seeds = range(self._seed, self._seed + load.callers)
        nothing: list[tuple[()]] = [()] * load.callers
        self._callers.each("prepare", [(Round(load.case, calls, load.in_flight, seed),) for seed in seeds])
        before = self._cpu_s()
        timings: list[Timing] = self._callers.each("run", nothing)
        after = self._cpu_s()
        wrong = sum(self._callers.each("check", nothing))
        if wrong:
            raise Failed(f"{wrong} replies with a wrong token")
        ours = {timing.pid for timing in timings}
        served = sum(after[pid] - before.get(pid, 0.0) for pid in after.keys() - ours)
        return measured(timings, served)

    def _cpu_s(self) -> dict[int, float]:
        return self._mark.cpu_s()


@contextmanager
def running(peer: Peer, shape: Shape) -> Iterator[Cluster]:
    """The peer's cluster; every process of it is gone afterwards, whatever happened.

    Raises:
        Failed: it did not start, or something of it had to be killed in the end.
    """
    mark = Mark()
    try:
        with Processes() as processes:
            with mark.on():
                callers = peer.start(processes, shape)
            yield Cluster(callers, mark)
    finally:
        left = mark.end()
    if left:
        raise Failed(f"{len(left)} processes outlived their cluster and were killed")
