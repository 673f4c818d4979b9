"""Modelled engines behind the real broker core."""

from __future__ import annotations

import pytest

from benchmarks.modelled.cluster import Layout, simulate
from benchmarks.modelled.engine import Speed
from benchmarks.modelled.work import Sessions, SingleTurns, Trajectory, Turn
from zagent.broker.routing import routing

SPEED = Speed(prefill_tokens_per_s=1000, step_s=0.010, call_s=0.0)


def test_two_engines_share_the_work() -> None:
    """Two equal samples end when one does: 0.64 s of prompt, 100 steps of 10 ms."""
    work = [Trajectory(i, i, (Turn(640, 100),)) for i in range(2)]
    assert simulate(Layout(2, SPEED), work).makespan_s == pytest.approx(1.64)
    assert simulate(Layout(2, SPEED), work).busy == pytest.approx(1.0)


def test_a_trajectory_is_one_session_with_its_tools_waits() -> None:
    """Its second turn finds the first one's context where it was: 12 whole blocks of 778 tokens."""
    one = Trajectory(0, 0, (Turn(640, 128), Turn(10, 100, wait_s=5.0)))
    result = simulate(Layout(3, SPEED), [one])
    assert result.makespan_s == pytest.approx(0.64 + 1.28 + 5.0 + 0.010 + 1.0)
    assert result.cached == 768


def test_a_group_computes_its_prompt_once() -> None:
    """Four samples on four engines: four times without the policy."""
    work = SingleTurns(1, 4, 640).made(0)
    grouped = Layout(4, SPEED, routing({"group_over": (8, 1.5)}, 10))
    assert simulate(grouped, work).prefilled == 640 + 3 * 64
    assert simulate(grouped._replace(routing=routing({}, 10)), work).prefilled == 4 * 640


def test_a_late_engine_gets_sessions_only_with_rebinding() -> None:
    """All have begun at the other one by then."""
    work = Sessions(16, 256).made(0)
    layout = Layout(2, SPEED, late=1, late_s=20.0)
    alone = simulate(layout, work)
    shared = simulate(layout._replace(routing=routing({"rebind_over": (4, 1.5)}, 10)), work)
    assert alone.busy <= 0.5
    assert shared.busy > 0.6
    assert shared.cached < alone.cached


def test_a_cap_leaves_work_for_a_late_engine() -> None:
    """What waits in the broker can still go anywhere."""
    work = SingleTurns(16, 4, 640).made(0)
    layout = Layout(2, Speed(max_batch=8), late=1, late_s=5.0)
    without, capped = simulate(layout, work), simulate(layout._replace(cap=8), work)
    assert capped.makespan_s < without.makespan_s


def test_the_same_seed_is_the_same_run() -> None:
    """Another seed is another one."""
    layout = Layout(2)
    assert simulate(layout, Sessions(8, 64).made(3)) == simulate(layout, Sessions(8, 64).made(3))
    assert simulate(layout, Sessions(8, 64).made(4)) != simulate(layout, Sessions(8, 64).made(3))


def test_trajectories_in_flight_are_limited() -> None:
    """The next begins when one ends."""
    work = [Trajectory(i, i, (Turn(640, 100),)) for i in range(4)]
    assert simulate(Layout(4, SPEED, in_flight=1), work).makespan_s == pytest.approx(4 * 1.64)


def test_samples_share_the_blocks_of_the_prompt_alone() -> None:
    """And each turn's context continues the one before."""
    a, b = Trajectory(0, 5, (Turn(130, 70), Turn(64, 64))), Trajectory(1, 5, (Turn(130, 70),))
    assert a.keys(0)[:2] == b.keys(0)[:2]
    assert not set(a.keys(0)[2:]) & set(b.keys(0)[2:])
    assert a.keys(1)[:3] == a.keys(0)
    assert (a.context(0), a.context(1), len(a.keys(1))) == (130, 264, 5)
