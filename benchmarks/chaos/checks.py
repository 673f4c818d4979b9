"""What must hold of a run, by its outcomes and by the tool's own call log. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

import zagent
from benchmarks.chaos.agent import TURNS, Line
from benchmarks.chaos.losses import Stop

#: Token columns of an output.
COLUMNS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
#: Seconds after a stop within which what it did may still show: calls that nobody claims are ended 10 s after the
#: broker's start, and a row lives some seconds.
STOP_MEMORY_S = 15.0
#: Seconds within which an answer to a tool call is not there, in nine cases of ten: its 24 tokens take half a second,
#: if none of them ends it.
ANSWER_S = 0.3
#: Violations of one kind that are listed; the rest are counted.
SHOWN = 5

#: No process was told to end.
NOTHING: Mapping[int, float] = MappingProxyType({})

#: (uid, sample): one row.
Name = tuple[str, int]


def outcome_faults(outcomes: Sequence[zagent.Outcome], rows: int) -> list[str]:
    """Each of ``rows`` inputs has one outcome, and that is `ok`."""
    seen = Counter(outcome.index for outcome in outcomes)
    missing = [index for index in range(rows) if index not in seen]
    twice = [index for index, count in seen.items() if count > 1]
    odd = sorted(seen.keys() - set(range(rows)))
    return [
        *shortened([f"row {index} has no outcome" for index in missing]),
        *shortened([f"row {index} has {seen[index]} outcomes" for index in twice]),
        *shortened([f"an outcome of row {index}, which was not asked for" for index in odd]),
        *shortened([f"row {o.index} is {o.status}: {described(o.error)}" for o in outcomes if o.status != "ok"]),
    ]


def described(error: Exception | None) -> str:
    """The error's kind and first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def token_faults(outcomes: Iterable[zagent.Outcome], expected: Iterable[zagent.Outcome]) -> list[str]:
    """Rows whose tokens, masks or log-probabilities are not, bit for bit, those of the run that is ``expected``."""
    wanted = {outcome.index: outcome.output for outcome in expected}
    wrong = [
        f"row {outcome.index} (attempt {outcome.attempt}): {column} differs from the quiet run"
        for outcome in outcomes
        for column in _differing(outcome.output, wanted.get(outcome.index))
    ]
    return shortened(wrong)


def _differing(output: Any, wanted: Any) -> list[str]:
    """None where one is missing: that is said elsewhere."""
    if output is None or wanted is None:
        return []
    return [column for column in COLUMNS if not _same(getattr(output, column), getattr(wanted, column))]


def _same(one: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def ledger_faults(
    lines: Iterable[Line],
    outcomes: Iterable[zagent.Outcome],
    stops: Sequence[Stop] = (),
    ended: Mapping[int, float] = NOTHING,
) -> list[str]:
    """The tool was called as the outcomes say: in each turn at least once, by one attempt at a time, whose last is the
    outcome's, and always with the same tokens. Nothing ran again but what a process had that was ``ended`` (pid ->
    when) or stopped."""
    by_row: dict[Name, list[Line]] = defaultdict(list)
    for line in lines:
        by_row[line.uid, line.sample].append(line)
    attempts = {(str(o.uid), o.sample): o.attempt for o in outcomes if o.status == "ok"}
    wrong = [
        f"{_named(name)}: the tool was called, and there is no such row" for name in by_row.keys() - attempts.keys()
    ]
    for name, attempt in attempts.items():
        wrong += [f"{_named(name)}: {fault}" for fault in _row_faults(_runs(by_row[name]), attempt, stops, ended)]
    return shortened(wrong)


#: Lines of each (attempt, process), both in order of their beginning.
Runs: TypeAlias = "Mapping[tuple[int, int], Sequence[Line]]"


def _row_faults(runs: Runs, attempt: int, stops: Sequence[Stop], ended: Mapping[int, float]) -> list[str]:
    lines = [line for run in runs.values() for line in run]
    turns = list(range(TURNS - 1))
    wrong = []
    if not any(number == attempt and turns in map(_turns, _rounds(run)) for (number, _), run in runs.items()):
        wrong.append(f"no run of attempt {attempt}, the outcome's, called the tool in turns {turns}")
    if beyond := sorted({line.attempt for line in lines if line.attempt > attempt}):
        wrong.append(f"attempt {beyond[0]} began, and attempt {attempt} is the outcome")
    for (number, pid), run in runs.items():
        rounds = _rounds(run)
        # A process that stands still while the broker dies may be told to stop a row, and given it again by the next
        # broker that dies: callers count attempts, and count none for a broker.
        own = [stop for stop in stops if stop.pid == pid]
        again = len(rounds) > 1 and not (own and all(_unfinished(round_, own) for round_ in rounds[:-1]))
        if again or any(_turns(round_) != turns[: len(round_)] for round_ in rounds):
            wrong.append(f"attempt {number} in process {pid} called the tool in turns {[line.turn for line in run]}")
    digests = {turn: {line.digest for line in lines if line.turn == turn} for turn in turns}
    wrong += [f"different tokens before the tool call of turn {turn}" for turn in turns if len(digests[turn]) > 1]
    return wrong + _order_faults(runs, stops, ended)


def _rounds(run: Sequence[Line]) -> list[list[Line]]:
    """Its lines, in rounds that begin with turn 0."""
    rounds: list[list[Line]] = []
    for line in run:
        if not rounds or line.turn == 0:
            rounds.append([])
        rounds[-1].append(line)
    return rounds


def _turns(lines: Sequence[Line]) -> list[int]:
    return [line.turn for line in lines]


def _unfinished(round_: Sequence[Line], stops: Iterable[Stop]) -> bool:
    """Turns are missing, or one of the ``stops`` came before the answer to the last tool call can have."""
    return len(round_) < TURNS - 1 or any(0 <= stop.at - round_[-1].at < ANSWER_S for stop in stops)


def _runs(lines: Iterable[Line]) -> Runs:
    runs: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: line.at):
        runs[line.attempt, line.pid].append(line)
    return runs


def _order_faults(runs: Runs, stops: Sequence[Stop], ended: Mapping[int, float]) -> list[str]:
    """Runs beside or behind a later one, or followed by another without a reason. A worker that is stopped when a new
    broker calls its roll is done without: what it runs by then runs twice, until it hears of it."""
    wrong = []
    for one, other in pairwise(runs.values()):
        until = max(one[-1].at, other[0].at)
        if any(_stopped(run[0], until, stops) for run in (one, other)):
            continue
        if one[-1].at > other[0].at:
            wrong.append(f"{_run_name(one[-1])} went on after {_run_name(other[0])} had begun")
        if one[0].attempt > other[0].attempt:
            wrong.append(f"{_run_name(other[0])} began after {_run_name(one[0])}")
        elif ended.get(one[0].pid, math.inf) > other[0].at:
            wrong.append(f"{_run_name(one[0])} was followed by {_run_name(other[0])}, and nothing had been done to it")
    return wrong


def _run_name(line: Line) -> str:
    return f"attempt {line.attempt} in process {line.pid}"


def _stopped(first: Line, until: float, stops: Iterable[Stop]) -> bool:
    """Whether the process of a run was stopped shortly before its ``first`` line, or since, before ``until``."""
    return any(stop.pid == first.pid and first.at - STOP_MEMORY_S < stop.until and stop.at < until for stop in stops)


def ledger_digests(lines: Iterable[Line]) -> dict[tuple[str, int, int], str]:
    """What had been sampled before each tool call, by row and turn."""
    return {(line.uid, line.sample, line.turn): line.digest for line in lines}


def digest_faults(lines: Iterable[Line], expected: Iterable[Line]) -> list[str]:
    """Tool calls whose tokens so far are not those of the ledger that is ``expected``: the outcomes' own check, apart
    from outcomes, and of attempts that came to nothing, too."""
    wanted = ledger_digests(expected)
    wrong = [
        f"{_named((line.uid, line.sample))}, attempt {line.attempt}: other tokens before turn {line.turn}'s tool call"
        for line in lines
        if wanted.get((line.uid, line.sample, line.turn)) != line.digest
    ]
    return shortened(wrong)


def attempt_faults(lines: Sequence[Line], outcomes: Iterable[zagent.Outcome]) -> list[str]:
    """Where nobody dies nothing runs twice: one attempt a row, one tool call a turn."""
    again = [f"row {o.index} needed attempt {o.attempt} in a quiet run" for o in outcomes if o.attempt != 1]
    calls = Counter((line.uid, line.sample, line.turn) for line in lines)
    twice = [f"{_named(key[:2])}: {n} tool calls in turn {key[2]} of a quiet run" for key, n in calls.items() if n > 1]
    return shortened(again) + shortened(twice)


def kill_faults(counted: Mapping[str, int], kinds: Iterable[str], least: int) -> list[str]:
    """Kinds of kills of which too few had work in flight to say much."""
    return [
        f"only {counted[kind]} kills of {kind} with work in flight, {least} are wanted: more --rows"
        for kind in kinds
        if kind in counted and counted[kind] < least
    ]


def shortened(texts: Sequence[str]) -> list[str]:
    """The first few, and how many there are beyond."""
    more = len(texts) - SHOWN
    return [*texts[:SHOWN], *([f"… and {more} more like that"] if more > 0 else [])]


def _named(name: Sequence[Any]) -> str:
    return f"uid {name[0]}, sample {name[1]}"
