"""What the engines did, from the calls that they have finished. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.rollout.agent import Done
from benchmarks.rollout.bounds import Engines


class Span(NamedTuple):
    """A call in its slot, in s since the batch began. The end is when its caller had the answer."""

    engine: str
    start: float
    end: float


class Timeline(NamedTuple):
    """What was done, and when the batch was over."""

    spans: list[Span]
    makespan_s: float


def spans(
    calls: Iterable[Done], members: Mapping[str, Sequence[str]], engines: Engines, began: float
) -> list[Span]:  # fmt: skip
    """``members`` has the engines of each session's calls, in order; ``engines`` are as fast as those that ran. The
    start is reckoned from the end: what the caller sees of it would be the engine's queue, too."""
    number: dict[str, int] = defaultdict(int)
    made = []
    for call in sorted(calls, key=lambda call: call.end):
        engine = call.engine or members[call.session][number[call.session]]
        number[call.session] += 1
        end = call.end - began
        made.append(Span(engine, end - engines.seconds(call.prompt, call.cached, call.new), end))
    return made


def tail(timeline: Timeline, engines: Engines) -> tuple[float, float]:
    """When the first engine ran dry, in s, and the slot-seconds that all of them were idle from then to the end."""
    last: dict[str, float] = {}
    for span in timeline.spans:
        last[span.engine] = max(last.get(span.engine, 0.0), span.end)
    dry = min(last.values()) if len(last) == engines.count else 0.0  # one that ran nothing was dry from the start
    busy = sum(max(0.0, span.end - max(span.start, dry)) for span in timeline.spans)
    return dry, engines.all_slots * (timeline.makespan_s - dry) - busy


def running(timeline: Timeline, engine: str, times: np.ndarray) -> np.ndarray:
    """Calls in their slots at ``times`` (s): int64, of its shape."""
    mine = [span for span in timeline.spans if span.engine == engine]
    starts = np.sort([span.start for span in mine])
    ends = np.sort([span.end for span in mine])
    count: np.ndarray = np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "right")
    return count
