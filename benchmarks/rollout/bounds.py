"""The least time that a set of engines could need for a set of rows. Pure.

An engine of `zagent.engine.sim` runs ``slots`` calls at once, each at its own fixed speed: a call takes
``(prompt - cached) / prefill + new / decode`` seconds of one slot. At best every turn finds all of the turn before in
the cache, in whole blocks. Nothing can then be done before

* work / capacity: all calls' slot-seconds over all slots, as if they could be packed without a gap;
* the longest row: its calls and tools one after another, without ever waiting.

Both hold for every scheduler, one that knows all lengths beforehand included. Where they are near each other no
scheduler that does not know them reaches either: the long rows would have to begin first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.rollout.trace import Row
from zagent.engine.sim.cache import BLOCK


@dataclass(frozen=True)
class Engines:
    """What there is. Speeds are those of one sequence, in tokens per second."""

    count: int
    slots: int
    prefill_tokens_per_s: float = 8000.0
    decode_tokens_per_s: float = 60.0

    @property
    def all_slots(self) -> int:
        return self.count * self.slots

    def seconds(self, prompt: int, cached: int, new: int) -> float:
        """That a call keeps its slot."""
        return (prompt - cached) / self.prefill_tokens_per_s + new / self.decode_tokens_per_s


class Call(NamedTuple):
    """One engine call of a row, in tokens, and what the tool takes after it."""

    prompt: int
    cached: int  #: at best
    new: int
    tool_s: float


class Bound(NamedTuple):
    """Seconds."""

    work_s: float  #: work / capacity
    longest_s: float  #: the longest row

    @property
    def seconds(self) -> float:
        return max(self)


def calls(row: Row) -> Iterator[Call]:
    """The row's engine calls in order. As in the engine, the last token of a prompt is always computed, and the last
    one of an answer is not in the cache."""
    context, held = row.prompt_tokens, 0
    for turn in row.turns:
        cached = min(held, context - 1) // BLOCK * BLOCK
        yield Call(context, cached, turn.response_tokens, turn.tool_s)
        held = context + turn.response_tokens - 1
        context += turn.response_tokens + turn.tool_tokens


def bound(rows: Iterable[Row], engines: Engines) -> Bound:
    """No schedule is shorter."""
    work = longest = 0.0
    for row in rows:
        busy = idle = 0.0
        for call in calls(row):
            busy += engines.seconds(call.prompt, call.cached, call.new)
            idle += call.tool_s
        work += busy
        longest = max(longest, busy + idle)
    return Bound(work / engines.all_slots, longest)


def cached_share(rows: Sequence[Row]) -> float:
    """The largest share of prompt tokens that can come from the cache."""
    made = [call for row in rows for call in calls(row)]
    return sum(call.cached for call in made) / sum(call.prompt for call in made)
