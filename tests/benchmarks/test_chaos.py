"""The chaos harness without a cluster: its script, its reading of what happened, and that it notices every loss."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zagent
from benchmarks import procfs
from benchmarks.chaos import __main__ as command
from benchmarks.chaos import checks
from benchmarks.chaos.agent import Line, read_ledger, write_line
from benchmarks.chaos.losses import Loss, Losses, Stop, recoveries
from benchmarks.chaos.run import (
    Collector,
    Plan,
    Run,
    batch_of,
    config_of,
    left_behind,
    run_dir_of,
    script_of,
    unsettled,
)
from benchmarks.chaos.script import KINDS, ROOMS, Action, actions, chosen, slow_spells
from benchmarks.chaos.watch import Snapshot
from benchmarks.chaos.wreck import Wrecker
from support.processes import Popen, eventually

# ---- the script -----------------------------------------------------------------------------------------------------


def script(seed: int, count: int = 200, every_s: float = 2.0, kinds: tuple[str, ...] = KINDS) -> list[Action]:
    return list(islice(actions(seed, every_s, kinds), count))


def test_a_seed_decides_everything() -> None:
    """The same seed gives the same script, another one another."""
    assert script(7) == script(7)
    assert script(7) != script(8)
    assert slow_spells(7, 4, KINDS) == slow_spells(7, 4, KINDS) != slow_spells(8, 4, KINDS)


def test_actions_come_in_order_of_time() -> None:
    """Kills and stops are one sequence."""
    times = [action.at_s for action in script(3)]
    assert times == sorted(times)
    assert {action.do for action in script(3)} == {"kill", "stop"}


@pytest.mark.parametrize("every_s", [0.5, 2.0])
def test_kills_come_at_their_pace_and_spare_no_room(every_s: float) -> None:
    """One each so many seconds; of any three in a row each hits another room."""
    kills = [action for action in script(5, every_s=every_s) if action.do == "kill"]
    gaps = [after.at_s - before.at_s for before, after in pairwise(kills)]
    assert gaps == pytest.approx([every_s] * len(gaps))
    assert 0 < kills[0].at_s <= every_s
    thirds = [{kill.room for kill in kills[i : i + 3]} for i in range(0, len(kills) - 3, 3)]
    assert all(rooms == set(ROOMS) for rooms in thirds)
    assert len({tuple(kill.room for kill in kills[i : i + 3]) for i in range(0, len(kills) - 3, 3)}) > 1


def test_only_the_kinds_that_were_asked_for() -> None:
    """Kills of workers alone, stops alone, and nothing at all, which ends."""
    assert {(a.do, a.room) for a in script(1, kinds=("worker", "slow"))} == {("kill", "worker")}
    assert {a.do for a in script(1, kinds=("stop",))} == {"stop"}
    assert script(1, kinds=("slow",)) == []
    assert slow_spells(1, 4, ("engine", "stop")) == []


def test_stops_last_from_a_hiccup_to_beyond_slow() -> None:
    """Between half a second and four, in all rooms."""
    stops = [action for action in script(2) if action.do == "stop"]
    assert all(0.5 <= stop.for_s <= 4.0 for stop in stops)
    assert {stop.room for stop in stops} == set(ROOMS)


def test_spells_of_an_engine_do_not_meet() -> None:
    """Their factors would multiply; the configuration takes them."""
    spells = slow_spells(11, 3, KINDS)
    for engine in range(3):
        mine = [spell for spell in spells if spell["engine"] == engine]
        assert len(mine) == 3
        assert all(a["at_s"] + a["for_s"] <= b["at_s"] for a, b in pairwise(mine))
    zagent.Config.from_dict({"engine": {"kind": "sim", "sim": {"faults": spells}}})


def test_sigterms_come_when_they_are_asked_for() -> None:
    """In all rooms; not unless `term` is named."""
    terms = [action for action in script(2, kinds=("term",)) if action.do == "term"]
    assert {term.room for term in terms} == set(ROOMS)
    assert not any(action.do == "term" for action in script(2))


def test_the_script_ends_when_the_plan_says() -> None:
    """After so many seconds, or never."""
    short = list(script_of(Plan(for_s=9.0), 1))
    assert short == [action for action in script(1) if action.at_s < 9.0] != []
    assert len(list(islice(script_of(Plan(), 1), 500))) == 500


def test_odd_seeds_stream_tokens_back(tmp_path: Path) -> None:
    """Only they; the quiet run has no faults either; the user's overrides win."""
    quiet, even, odd = (config_of(Plan(), tmp_path, seed).engine for seed in (None, 2, 3))
    assert [e.checkpoint_tokens for e in (quiet, even, odd)] == [0, 0, 8]
    assert [len(e.sim.faults) for e in (quiet, even, odd)] == [0, 12, 12]
    mine = config_of(Plan(overrides=("engine.checkpoint_tokens=2", "worker.count=7")), tmp_path, 3)
    assert (mine.engine.checkpoint_tokens, mine.worker.count) == (2, 7)


def test_a_pick_means_the_same_in_any_order() -> None:
    """The choice depends on names only."""
    assert chosen(["b", "a", "c"], 0.4) == chosen(["c", "b", "a"], 0.4) == "b"
    assert (chosen(["a", "b"], 0.0), chosen(["a", "b"], 0.999)) == ("a", "b")


# ---- losses ---------------------------------------------------------------------------------------------------------


def loss(room: Any = "engine", **changes: Any) -> Loss:
    known: dict[str, Any] = {"name": "engine-0", "pid": 10, "epoch": 3, "at": 100.0, "in_flight": 4, "counts": True}
    return Loss(room, **{**known, **changes})


def status(**members: tuple[str, int]) -> dict[str, Any]:
    """Of engines: name -> state and epoch."""
    engines = {name.replace("_", "-"): member(state, epoch) for name, (state, epoch) in members.items()}
    return {"pools": {"engine": engines, "worker": {}}, "pending": 0}


def member(state: str = "ready", epoch: int = 1, **changes: Any) -> dict[str, Any]:
    return {"state": state, "epoch": epoch, "in_flight": 0, "waiting": 0, "pid": 10, **changes}


def test_a_member_is_known_to_be_lost_and_then_back() -> None:
    """Known: dead, gone, or in a later life. Back: ready in a later life."""
    losses = Losses()
    losses.add(lost := loss())
    losses.note_status(100.1, 100.2, status(engine_0=("ready", 3)))
    assert lost.known_at is None
    losses.note_status(100.3, 100.4, status(engine_0=("dead", 3)))
    losses.note_status(100.5, 100.6, status())
    losses.note_status(100.7, 100.8, status(engine_0=("joining", 4)))
    assert (lost.known_at, lost.back_at) == (100.4, None)
    losses.note_status(100.9, 101.0, status(engine_0=("ready", 4)))
    losses.note_status(101.1, 101.2, status(engine_0=("dead", 4)))
    assert (lost.known_at, lost.back_at) == (100.4, 101.0)
    assert losses.open() == []


def test_a_member_that_is_only_missing_is_lost() -> None:
    """A new broker has never heard of it."""
    losses = Losses()
    losses.add(lost := loss())
    losses.note_status(100.0, 100.2, status())
    assert lost.known_at == 100.2


def test_a_broker_is_back_when_it_answers_what_was_asked_after_the_kill() -> None:
    """The last answer of the old one says nothing; its successor's process says that the launcher knows."""
    losses = Losses()
    losses.add(lost := loss("broker", epoch=0))
    losses.note_status(99.9, 100.1, status())
    losses.note_broker(100.2, 10)
    assert (lost.known_at, lost.back_at) == (None, None)
    losses.note_broker(100.3, 11)
    losses.note_broker(100.5, 12)
    losses.note_status(100.1, 100.9, status())
    assert (lost.known_at, lost.back_at) == (100.3, 100.9)


def test_recoveries_are_medians_and_worsts_by_room() -> None:
    """Kills without work in flight are told apart; what nobody saw is no number."""
    losses = [
        loss(known_at=100.1, back_at=101.0),
        loss(known_at=100.2, back_at=103.0),
        loss(known_at=100.6, back_at=102.0, counts=False),
        loss("broker"),
    ]
    engine, broker = recoveries(losses)
    assert (engine.kills, engine.counted) == (3, 2)
    assert (engine.known, engine.back) == (pytest.approx((0.2, 0.6)), pytest.approx((2.0, 3.0)))
    assert (broker.room, broker.known, broker.back) == ("broker", None, None)
    assert "| engine | 3 | 2 | 0.20 s (0.60 s) | 2.00 s (3.00 s) |" in command.table([engine, broker])
    assert "| broker | 1 | 1 | never | never |" in command.table([engine, broker])


def test_too_few_kills_with_work_in_flight_are_a_fault() -> None:
    """Only of the kinds that were asked for."""
    losses = Losses([loss(), loss(), loss(counts=False)])
    assert losses.counted() == {"engine": 2, "worker": 0, "broker": 0}
    assert checks.kill_faults(losses.counted(), ("engine", "stop"), 2) == []
    (fault,) = checks.kill_faults(losses.counted(), ("engine", "stop"), 3)
    assert "only 2 kills of engine" in fault


# ---- the checks -----------------------------------------------------------------------------------------------------


def outcome(index: int, **changes: Any) -> zagent.Outcome:
    output = zagent.AgentLoopOutput(
        prompt_ids=[1, index], response_ids=[2, 3], response_mask=[1, 0], response_logprobs=[-0.5, 0.0]
    )
    known: dict[str, Any] = {"uid": f"q{index // 2}", "sample": index % 2, "status": "ok", "output": output}
    return zagent.Outcome(index, **{**known, **changes})


def lines(index: int, attempt: int = 1, turns: tuple[int, ...] = (0, 1), pid: int = 50, at: float = 0.0) -> list[Line]:
    return [Line(f"q{index // 2}", index % 2, attempt, turn, pid, at + turn, f"d{index}{turn}") for turn in turns]


OUTCOMES = [outcome(i) for i in range(4)]
LEDGER = [line for i in range(4) for line in lines(i)]


def test_a_run_as_it_should_be_has_no_fault() -> None:
    """In any order of outcomes and lines."""
    assert checks.outcome_faults(OUTCOMES[::-1], 4) == []
    assert checks.token_faults(OUTCOMES[::-1], OUTCOMES) == []
    assert checks.ledger_faults(LEDGER[::-1], OUTCOMES) == []
    assert checks.digest_faults(LEDGER[::-1], LEDGER) == []
    assert checks.attempt_faults(LEDGER, OUTCOMES) == []


def test_outcomes_missing_twice_odd_or_failed() -> None:
    """Each is named, with the first line of its error."""
    failed = outcome(3, status="failed", output=None, error=zagent.MemberLost("gone\nlog"))
    faults = checks.outcome_faults([outcome(0), outcome(0), outcome(7), failed], 4)
    assert faults == [
        "row 1 has no outcome",
        "row 2 has no outcome",
        "row 0 has 2 outcomes",
        "an outcome of row 7, which was not asked for",
        "row 3 is failed: MemberLost: gone",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": [1, 9]},
        {"response_ids": [2, 4]},
        {"response_mask": [1, 1]},
        {"response_logprobs": [-0.5000001, 0.0]},
        {"response_ids": [2], "response_mask": [1], "response_logprobs": [-0.5]},
    ],
)
def test_a_single_number_that_differs_is_noticed(change: dict[str, Any]) -> None:
    """Ids, masks and log-probabilities bit for bit, lists or arrays."""
    assert OUTCOMES[2].output is not None
    other = replace(OUTCOMES[2], output=OUTCOMES[2].output.model_copy(update=change))
    faults = checks.token_faults([*OUTCOMES[:2], other], OUTCOMES)
    assert len(faults) == len(change)
    assert all("row 2" in fault for fault in faults)
    same = replace(other, output=OUTCOMES[2].output.model_copy(update={"response_ids": np.array([2, 3], np.int32)}))
    assert checks.token_faults([same], OUTCOMES) == []


def test_an_attempt_that_was_lost_and_ran_again_is_no_fault() -> None:
    """It may have called the tool or not, and a process may have had the same attempt before it was lost."""
    again = [outcome(0, attempt=3)]
    lost = [*lines(0, 1, (0,), pid=50), *lines(0, 3, (0,), pid=51, at=10), *lines(0, 3, pid=52, at=20)]
    assert checks.ledger_faults(lost, again, (), {50: 9.0, 51: 19.0}) == []


def test_what_ran_again_without_a_reason_is_noticed() -> None:
    """Its process was alive when the next run began, and had not been stopped."""
    ledger = [*lines(0, 1, (0,), pid=50), *lines(0, 2, pid=50, at=10)]
    (fault,) = checks.ledger_faults(ledger, [outcome(0, attempt=2)], (), {50: 11.0, 51: 1.0})
    assert "attempt 1 in process 50 was followed by attempt 2 in process 50, and nothing had been done" in fault
    assert checks.ledger_faults(ledger, [outcome(0, attempt=2)], [Stop("worker-0", 50, 5.0, 8.0)]) == []


def test_a_process_that_stood_still_may_be_given_a_row_again() -> None:
    """While it did the broker died, twice: the same attempt begins anew, but is never done twice."""
    stood_still = [Stop("worker-0", 50, 2.0, 8.0)]
    again = [*lines(0, turns=(0,)), *lines(0, at=9)]
    assert checks.ledger_faults(again, [outcome(0)], stood_still) == []
    assert "in turns [0, 0, 1]" in checks.ledger_faults(again, [outcome(0)])[0]
    assert "in turns [0, 1, 0, 1]" in checks.ledger_faults([*lines(0), *lines(0, at=9)], [outcome(0)], stood_still)[0]


def test_a_row_that_was_stopped_before_its_last_answer_was_not_done() -> None:
    """All tool calls are there, and it may be given again all the same."""
    ledger = [*lines(0), *lines(0, at=9)]
    last = lines(0)[-1].at
    assert checks.ledger_faults(ledger, [outcome(0)], [Stop("worker-0", 50, last + 0.1, 8.0)]) == []
    assert checks.ledger_faults(ledger, [outcome(0)], [Stop("worker-0", 50, last + 2 * checks.ANSWER_S, 8.0)])


@pytest.mark.parametrize(
    ("ledger", "fault"),
    [
        (lines(0, 2, (0,)), r"no run of attempt 2, the outcome's, called the tool in turns \[0, 1\]"),
        ([], "no run of attempt 2"),
        (lines(0, 1), "no run of attempt 2"),
        ([*lines(0, 2), *lines(0, 3, (0,), at=9)], "attempt 3 began, and attempt 2 is the outcome"),
        ([*lines(0, 2), *lines(0, 2, (0,), at=9)], r"attempt 2 in process 50 called the tool in turns \[0, 1, 0\]"),
        ([*lines(0, 1, (1,)), *lines(0, 2, at=9)], r"attempt 1 in process 50 called the tool in turns \[1\]"),
        (
            [*lines(0, 1, pid=1), *lines(0, 2, pid=2, at=0.5)],
            "attempt 1 in process 1 went on after attempt 2 in process 2",
        ),
        (
            [*lines(0, 2, pid=1), *lines(0, 2, pid=2, at=0.5)],
            "attempt 2 in process 1 went on after attempt 2 in process 2",
        ),
        ([*lines(0, 2), *lines(0, 1, (0,), at=9)], "attempt 1 in process 50 began after attempt 2"),
        ([*lines(0, 1, (0,), pid=1), *(x._replace(digest="?") for x in lines(0, 2, at=9))], "different tokens before"),
        ([*lines(0, 2), *lines(2, 1, (0,))], "uid q1, sample 0: the tool was called, and there is no such row"),
    ],
)
def test_the_ledger_must_fit_the_outcomes(ledger: list[Line], fault: str) -> None:
    """Every turn at least once, one attempt at a time, none beyond the outcome's, always the same tokens."""
    found = checks.ledger_faults(ledger, [outcome(0, attempt=2)])
    assert any(re.search(fault, text) for text in found), found


def test_only_a_process_that_was_stopped_may_run_beside_another() -> None:
    """Either of them, while it ran or shortly before; any other one must have been dead."""
    ledger = [*lines(0, 2, pid=1), *lines(0, 2, pid=2, at=0.5)]
    outcomes = [outcome(0, attempt=2)]
    assert checks.ledger_faults(ledger, outcomes, [Stop("worker-0", 1, 0.1, 0.9)]) == []
    assert checks.ledger_faults(ledger, outcomes, [Stop("worker-0", 2, 0.1, 0.4)]) == []
    assert checks.ledger_faults(ledger, outcomes, [Stop("worker-0", 3, 0.1, 0.9)])
    assert checks.ledger_faults(ledger, outcomes, [Stop("worker-0", 1, 1.1, 1.9)])
    assert checks.ledger_faults(ledger, outcomes, [Stop("worker-0", 1, -90.0, -80.0)])


def test_a_stop_after_the_last_tool_call_is_a_reason_to_run_again() -> None:
    """The row was not over; but a stop that came only later is none."""
    ledger = [*lines(0, 1, pid=1), *lines(0, 1, pid=2, at=9.0)]
    assert checks.ledger_faults(ledger, [outcome(0)], [Stop("worker-0", 1, 2.0, 8.0)]) == []
    assert checks.ledger_faults(ledger, [outcome(0)], [Stop("worker-0", 1, 9.5, 9.9)])


def test_a_tool_call_on_other_tokens_than_in_the_quiet_run_is_noticed() -> None:
    """Also one of an attempt that came to nothing."""
    odd = [*LEDGER, lines(1, 1, (0,))[0]._replace(digest="other")]
    (fault,) = checks.digest_faults(odd, LEDGER)
    assert "uid q0, sample 1, attempt 1: other tokens before turn 0's tool call" in fault


def test_in_a_quiet_run_nothing_runs_twice() -> None:
    """Neither a row nor a tool call."""
    assert checks.attempt_faults(LEDGER, [outcome(0, attempt=2)]) == ["row 0 needed attempt 2 in a quiet run"]
    (fault,) = checks.attempt_faults([*LEDGER, *lines(0, 1, (1,))], OUTCOMES)
    assert "2 tool calls in turn 1" in fault


def test_many_faults_of_a_kind_are_shortened() -> None:
    """The first five and a count."""
    faults = checks.outcome_faults([], 100)
    assert len(faults) == 6
    assert faults[-1] == "… and 95 more like that"


def test_all_checks_are_made_of_a_run() -> None:
    """Each part of a run can be wrong, and the command says so."""
    plan = Plan(rows=4, kinds=("engine",))
    quiet = Run(outcomes=OUTCOMES, ledger=LEDGER)
    wild = Run(outcomes=list(OUTCOMES), ledger=list(LEDGER), losses=Losses([loss()]))
    assert command.quiet_faults(quiet, plan) == []
    assert command.faults(wild, quiet, plan, 1) == []
    spoilt = [
        replace(wild, broken=["left"]),
        replace(wild, outcomes=OUTCOMES[1:]),
        replace(wild, outcomes=[outcome(0, attempt=2), *OUTCOMES[1:]]),
        replace(wild, ledger=[line._replace(digest="?") for line in LEDGER]),
        replace(wild, outcomes=[replace(OUTCOMES[0], output=OUTCOMES[1].output), *OUTCOMES[1:]]),
        replace(wild, losses=Losses()),
    ]
    assert all(command.faults(one, quiet, plan, 1) for one in spoilt)
    again = replace(quiet, outcomes=[outcome(0, attempt=2), *OUTCOMES[1:]], ledger=[*lines(0, 2), *LEDGER[2:]])
    failed = replace(quiet, outcomes=[*OUTCOMES[:3], outcome(3, status="failed", output=None)], ledger=LEDGER[:-2])
    silent = replace(quiet, ledger=LEDGER[1:])
    assert all(command.quiet_faults(one, plan) for one in (*spoilt[:3], again, failed, silent))


# ---- a cluster at rest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"state": "dead"}, "engine-0 is dead"),
        ({"state": "slow"}, "engine-0 is slow"),
        ({"in_flight": 2}, "engine-0 has 2 calls"),
        ({"waiting": 1}, "engine-0 has 1 calls"),
    ],
)
def test_whoever_is_not_at_rest_is_named(change: dict[str, Any], fault: str) -> None:
    """A member that is not ready, or still has calls."""
    said = {"pools": {"engine": {"engine-0": member(**change)}}, "pending": 0}
    (found,) = unsettled(said, {"engine": 1})
    assert fault in found


def test_missing_members_and_pending_calls_are_no_rest() -> None:
    """All members must be back."""
    said = {"pools": {"engine": {}}, "pending": 3}
    assert len(unsettled(said, {"engine": 1})) == 2
    assert unsettled({"pools": {"engine": {"engine-0": member()}}, "pending": 0}, {"engine": 1}) == []


def test_whatever_is_left_is_named(tmp_path: Path) -> None:
    """A directory; a process. A TCP endpoint does not tell the directory."""
    assert left_behind("chaos-left", tmp_path) == [f"{tmp_path} is left"]
    assert left_behind("chaos-left", run_dir_of(f"ipc://{tmp_path}/gone/b")) == []
    assert left_behind("chaos-left", run_dir_of("tcp://127.0.0.1:1")) == []
    with Popen(["sleep", "600"], env={"ZAGENT_RUN_ID": "chaos-left", "PATH": "/usr/bin:/bin"}) as process:
        found = eventually(lambda: left_behind("chaos-left", None))
        process.kill()
    assert found == [f"process {process.pid} () is left"]


# ---- wrecking -------------------------------------------------------------------------------------------------------


@dataclass
class FakeWatch:
    """A status with one engine, whose process is real."""

    latest: Snapshot
    broker: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, and ends with the test."""
    with Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def wreck(pid: int, in_flight: int, *script: Action, over: Callable[[], bool] = lambda: False) -> Wrecker:
    """A wrecker that has done what the ``script`` says to an engine of that pid."""
    said = {"pools": {"engine": {"engine-0": member(pid=pid, in_flight=in_flight)}, "worker": {}}}
    watch = FakeWatch(Snapshot(time.monotonic(), said), broker=pid)
    wrecker = Wrecker(iter(script), watch, Losses(), every_s=0.0)  # type: ignore[arg-type]
    wrecker.run(over)
    return wrecker


def test_a_kill_is_noted_with_what_was_aboard(victim: subprocess.Popen[bytes]) -> None:
    """The process is gone, and the kill counts."""
    wrecker = wreck(victim.pid, 3, Action(0.0, "kill", "engine", 0.5))
    assert victim.wait(20) == -9
    (lost,) = wrecker.losses.all
    assert replace(lost, at=0.0) == loss(at=0.0, pid=victim.pid, epoch=1, in_flight=3)
    assert "kill engine-0" in wrecker.events[0]


def test_who_is_terminated_is_no_kill(victim: subprocess.Popen[bytes]) -> None:
    """SIGTERM; it may end in order."""
    wrecker = wreck(victim.pid, 3, Action(0.0, "term", "engine", 0.5))
    assert victim.wait(20) == -15
    assert wrecker.losses.all == []
    assert "terminate engine-0" in wrecker.events[0]


def test_a_stop_lasts_as_long_as_the_script_says(victim: subprocess.Popen[bytes]) -> None:
    """Also the last one of it."""
    (stop,) = wreck(victim.pid, 3, Action(0.0, "stop", "engine", 0.5, for_s=0.05)).stops
    assert stop.until - stop.at >= 0.05


def test_nobody_is_killed_twice(victim: subprocess.Popen[bytes]) -> None:
    """A status may be older than the death of who is in it, whoever it is taken for."""
    kill = Action(0.0, "kill", "engine", 0.5)
    wrecker = wreck(victim.pid, 3, kill, kill, replace(kill, room="broker"))
    assert len(wrecker.losses.all) == 1
    assert "nobody to kill" in wrecker.events[-1]


def test_a_kill_without_work_in_flight_does_not_count(victim: subprocess.Popen[bytes]) -> None:
    """It is done all the same."""
    wrecker = wreck(victim.pid, 0, Action(0.0, "kill", "broker", 0.5))
    assert victim.wait(20) == -9
    assert [lost.counts for lost in wrecker.losses.all] == [False]
    assert "not counted" in wrecker.events[0]


def test_whoever_is_stopped_goes_on_at_the_end(victim: subprocess.Popen[bytes]) -> None:
    """However long it was to last."""
    looks = iter([False, False, False])  # over after a few
    stop = Action(0.0, "stop", "engine", 0.5, for_s=3600.0)
    wrecker = wreck(victim.pid, 1, stop, over=lambda: next(looks, True))
    assert [text.split("s  ")[1].split()[0] for text in wrecker.events] == ["stop", "engine-0"]
    assert Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"


# ---- outcomes, ledger, processes ------------------------------------------------------------------------------------


def test_outcomes_are_collected_to_the_end() -> None:
    """All of them, and it is over."""
    collector = Collector(iter(OUTCOMES))
    collector.join()
    assert (collector.outcomes, collector.broken, collector.over.is_set()) == (OUTCOMES, [], True)


def test_a_stream_that_breaks_is_a_fault() -> None:
    """What came before it stays."""

    def breaking() -> Iterator[zagent.Outcome]:
        yield OUTCOMES[0]
        raise zagent.ConnectionLost("gone")

    collector = Collector(breaking())
    collector.join()
    assert (len(collector.outcomes), collector.hung) == (1, False)
    assert collector.broken == ["the stream broke: ConnectionLost: gone"]


def test_a_stream_that_stalls_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it for ever."""
    monkeypatch.setattr("benchmarks.chaos.run.PATIENCE_S", 0.01)
    goes_on = threading.Event()

    def stalling() -> Iterator[zagent.Outcome]:
        goes_on.wait(20)
        yield from ()

    collector = Collector(stalling())
    collector.wait()
    assert not collector.over.is_set()
    goes_on.set()
    collector.join()
    assert collector.hung
    assert "no outcome for 0.01 s, 0 until then" in collector.broken[0]


def test_the_ledger_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Line by line; half a line is refused."""
    ledger = str(tmp_path / "ledger")
    for line in LEDGER:
        write_line(ledger, line)
    assert read_ledger(ledger) == LEDGER
    Path(ledger).write_text("q0 0 1\n")
    with pytest.raises(ValueError, match="not enough values"):
        read_ledger(ledger)


def test_rows_have_names_of_their_own(tmp_path: Path) -> None:
    """Two samples of each prompt."""
    columns = batch_of(5, tmp_path).non_tensor_batch
    assert list(zip(columns["uid"], columns["sample"], strict=True)) == [
        ("q0", 0), ("q0", 1), ("q1", 0), ("q1", 1), ("q2", 0),
    ]  # fmt: skip


def test_processes_are_found_by_what_is_in_their_environment() -> None:
    """By run id, by child's name; and what they hold."""
    env = {"ZAGENT_RUN_ID": "chaos-test", "ZAGENT_CHILD": "broker", "PATH": "/usr/bin:/bin"}
    with Popen(["sleep", "600"], env=env) as process:
        try:
            eventually(lambda: procfs.of_run("chaos-test"))  # between fork and exec it has our environment
            assert procfs.of_run("chaos-test") == {process.pid: "broker"}
            parent = procfs.parent_of(process.pid)
            assert parent is not None
            assert procfs.child_of(parent, "broker") == process.pid
            assert procfs.child_of(parent, "engine-0") is None
            held = procfs.Holdings.of(process.pid)
            assert held.memory > 0
            assert (held.descriptors, held.threads) == (3, 1)
        finally:
            process.kill()
    assert procfs.of_run("chaos-test") == {}
    assert procfs.parent_of(process.pid) is None


# ---- the command ----------------------------------------------------------------------------------------------------


@dataclass
class FakeRun:
    """Takes the place of `run`: gives what a run would, spoilt for the seeds that are named."""

    spoilt: tuple[int, ...] = ()
    seeds: list[int | None] = field(default_factory=list)

    def __call__(self, plan: Plan, directory: Path, seed: int | None = None) -> Run:
        directory.mkdir(parents=True)
        self.seeds.append(seed)
        losses = Losses([loss(room) for room in ROOMS] if seed is not None else [])
        return Run(outcomes=OUTCOMES[1:] if seed in self.spoilt else OUTCOMES, ledger=LEDGER, losses=losses)


def test_the_command_compares_all_seeds_with_one_quiet_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0 and the table; everything is in the JSON file, nothing else is left."""
    monkeypatch.setattr(command, "run", fake := FakeRun())
    monkeypatch.setattr(command.tempfile, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    file = tmp_path / "report.json"
    assert command.main(["--rows", "4", "--seed", "3", "--seeds", "2", "--kills", "1", "--json", str(file)]) == 0
    assert fake.seeds == [None, 3, 4]
    assert "| broker | 2 | 2 |" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert [run["seed"] for run in report["runs"]] == [3, 4]
    assert len(report["runs"][0]["losses"]) == 3
    assert list(tmp_path.iterdir()) == [file]


def test_the_command_says_how_to_run_a_broken_seed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1; the violation, the command for that seed alone, and where its logs are."""
    monkeypatch.setattr(command, "run", FakeRun(spoilt=(4,)))
    monkeypatch.setattr(command.tempfile, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    assert command.main(["--rows", "4", "--seed", "3", "--seeds", "2", "--kills", "1", "--set", "a.b=c"]) == 1
    printed = capsys.readouterr().out
    assert "row 0 has no outcome" in printed
    assert "python -m benchmarks.chaos --seed 4 --rows 4 --every 2" in printed
    assert "--set a.b=c" in printed
    assert [path.name for path in (tmp_path / "chaos-").iterdir() if path.name != "quiet"] == ["seed-4"]


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With those there are."""
    with pytest.raises(SystemExit):
        command.main(["--kinds", "engine,trainer"])
    assert "known: engine, worker, broker, stop, slow" in capsys.readouterr().err
