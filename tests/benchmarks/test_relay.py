"""What the relay benchmark counts as right, as one round, and as a table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.relay import plan, suite
from benchmarks.relay.cluster import Measured, measured
from benchmarks.relay.plan import BASE, MAIN, SWEEPS
from benchmarks.relay.traffic import Case, Load, Round, Timing, answer, list_answer, prompts, wrong_replies
from benchmarks.relay.wire import wire_bytes

CASES = [Case(64, 16, as_lists=False), Case(64, 16, as_lists=True)]


def right_replies(round_: Round, given: list[Any]) -> list[Any]:
    rule = list_answer if round_.case.as_lists else answer
    return [rule(prompt, round_.case.response) for prompt in given]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right_replies_pass_the_check(case):
    """What the servers' rule gives is right, as arrays and as lists."""
    round_ = Round(case, 5, 1, seed=3)
    given = prompts(round_)
    assert wrong_replies(round_, given, right_replies(round_, given)) == 0


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("part", [0, 1], ids=["id", "log-probability"])
def test_one_wrong_number_is_noticed(case, part):
    """A single id or log-probability off by one makes its reply wrong."""
    round_ = Round(case, 5, 1, seed=3)
    given = prompts(round_)
    replies = right_replies(round_, given)
    spoilt = [list(numbers) if case.as_lists else numbers.copy() for numbers in replies[2]]
    spoilt[part][7] += 1
    replies[2] = tuple(spoilt)
    assert wrong_replies(round_, given, replies) == 1


def test_swapped_replies_are_noticed():
    """A reply to another call's prompt is wrong, though its tokens are right for that one."""
    round_ = Round(CASES[0], 2, 1, seed=3)
    given = prompts(round_)
    assert wrong_replies(round_, given, right_replies(round_, given)[::-1]) == 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_reply_in_the_wrong_form_is_wrong(case):
    """Arrays where lists were sent, or the other way round, do not pass."""
    round_ = Round(case, 1, 1, seed=3)
    given = prompts(round_)
    rule = answer if case.as_lists else list_answer
    prompt = np.asarray(given[0], np.int32) if case.as_lists else given[0].tolist()
    assert wrong_replies(round_, given, [rule(prompt, 16)]) == 1


def test_prompts_and_sessions_are_distinct():
    """No two calls of two callers' rounds are the same, so that no cache helps."""
    rounds = [Round(CASES[0], 50, 1, seed=seed) for seed in (1, 2)]
    made = [prompt.tobytes() for round_ in rounds for prompt in prompts(round_)]
    assert len(set(made)) == 100
    assert len({round_.session(number) for round_ in rounds for number in range(50)}) == 100


def test_callers_count_as_one():
    """Calls per second span the first start to the last end; processor time is summed over all processes."""
    timings = [Timing(0.0, 1.0, 0.5, [0.1, 0.1], pid=1), Timing(1.0, 2.0, 0.5, [0.3, 0.3], pid=2)]
    found = measured(timings, served_s=1.0)
    assert (found.calls_per_s, found.p50_ms, found.cpu_us) == (2.0, pytest.approx(200.0), 500_000.0)


def test_a_load_is_named_by_what_differs():
    """Names are the keys of the CSV: what is equal has one name, what differs another."""
    assert str(Load(BASE)) == "1024/128 arrays"
    assert str(Load(BASE, callers=1, in_flight=1)) == "1024/128 arrays, one at a time"
    assert str(Load(BASE, callers=4, in_flight=8, servers=1)) == "1024/128 arrays, 8 in flight, 4 callers, 1 server"
    loads = {load for sweep in SWEEPS.values() for load in sweep} | set(MAIN)
    assert len({str(load) for load in loads}) == len(loads)


def test_ray_is_up_alone():
    """Its processes are never quite idle; the others' clusters are up together, for pairs that follow at once."""
    found = list(plan.stages(suite.PEERS, sweeps=True))
    assert [stage.peers for stage in found[:3]] == [plan.TOGETHER, ("ray-local",), ("ray-global",)]
    assert [(stage.servers, stage.peers) for stage in found[3:]] == [(n, plan.SWEPT) for n in (1, 4)]
    measured_loads = {load for stage in found for load in stage.loads}
    assert measured_loads == {load for sweep in SWEEPS.values() for load in sweep} | set(MAIN)
    assert all(load.servers == stage.servers for stage in found for load in stage.loads)


def test_only_two_peers_are_swept():
    """The others get the main table's loads; one that is measured anyway is not measured twice."""
    first = next(iter(plan.stages(suite.PEERS, sweeps=True)))
    assert first.loads_of("http") == MAIN
    assert len(first.loads_of("zagent")) == len(set(first.loads_of("zagent"))) > len(MAIN)


def test_without_ray_nothing_of_it_runs():
    """Only the peers that were asked for."""
    assert [stage.peers for stage in plan.stages(("zagent", "sockets"), sweeps=False)] == [("zagent", "sockets")]


def test_a_quick_round_is_a_tenth():
    """And slower peers and longer prompts make fewer calls."""
    assert plan.calls(Load(BASE), 1.0, quick=True) == plan.calls(Load(BASE), 1.0, quick=False) // 10
    assert plan.calls(Load(BASE), 0.1, quick=False) < plan.calls(Load(BASE), 1.0, quick=False)
    assert plan.calls(Load(Case(8192, 1024, True)), 0.01, quick=False) == plan.FEWEST


def figures(rates: dict[str, float], case: str, repeat: int = 0):
    return [f for peer, rate in rates.items() for f in suite.figures_of(case, peer, repeat, Measured(rate, 1, 2, 3))]


def test_ratios_are_taken_within_a_repeat():
    """zagent with arrays and with lists, over a peer that knows only lists; median, lowest and highest."""
    arrays, lists = "1024/128 arrays", "1024/128 lists"
    made = []
    for repeat, scale in enumerate((1.0, 0.5, 2.0)):  # a slow minute, and a fast one
        made += figures({"zagent": 9000 * scale}, arrays, repeat)
        made += figures({"zagent": 6000 * scale, "http": (3000 + 500 * repeat) * scale}, lists, repeat)
    (row,) = [line for line in suite.table(made).splitlines() if line.startswith("| http, lists")]
    assert "| 2.57 (2.25–3.00) | 1.71 (1.50–2.00) |" in row


def test_plots_of_what_there_is(tmp_path):
    """A plot whose figures are missing is not drawn."""
    pytest.importorskip("matplotlib")
    made = figures({"zagent": 9000.0, "sockets": 12000.0}, "1024/128 arrays")
    made += figures({"zagent": 5000.0, "sockets": 8000.0}, "1024/128 arrays, 1 in flight")
    assert {path.name for path in suite.plots(made, tmp_path)} == {"relay-1024.png", "relay-calls.png"}
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


@pytest.mark.parametrize("peer", suite.PEERS)
def test_bytes_grow_with_the_tokens(peer):
    """At least 2 bytes a token, at most JSON's dozen."""
    small, large = wire_bytes(peer, Case(1024, 128, True)), wire_bytes(peer, Case(8192, 1024, True))
    assert 2 < (large - small) / (8192 + 1024 - 1024 - 128) < 12


def test_sockets_carry_what_zagent_carries():
    """The yardstick's header is as long as zagent's, so both move as many bytes to within a hundred."""
    for case in plan.CASES:
        assert math.isclose(wire_bytes("zagent", case), wire_bytes("sockets", case), abs_tol=150)
