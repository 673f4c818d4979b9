"""The optional policies: samples of one prompt together, sessions that leave an overloaded engine, the cap."""

from __future__ import annotations

from typing import Any

import pytest

from support.broker_driver import Driver, driver, given, nonce_of, served_by
from zagent.broker.pool import Lease, Member, Pool, State
from zagent.broker.routing import STICKY, Group, Rebind, Threshold, routing

NOBODY: Any = None


def pool_with(*loads: int, credits: int = 100) -> tuple[Pool, list[Member]]:
    """Members m0, m1, … with as many calls in flight."""
    pool = Pool("engine")
    members = [Member("engine", f"m{i}", 1, credits, b"", b"") for i in range(len(loads))]
    for member, load in zip(members, loads, strict=True):
        pool.add(member)
        pool.ready(member)
        for number in range(load):
            pool.lease(Lease((member.name.encode(), number), NOBODY, b"", member, None))
    return pool, members


def started(loads: int = 2, credits: int = 100, **thresholds: Any) -> tuple[Driver, bytes, list[bytes]]:
    d = driver(routing={"engine": routing(thresholds, 3)})
    nonces = [d.join(f"m{i}", credits) for i in range(loads)]
    caller = d.caller()
    d.take()
    return d, caller, nonces


@pytest.mark.parametrize(
    ("here", "there", "exceeded"),
    [
        (5, 0, True),  # beyond both
        (4, 0, False),  # not more than 4 more
        (15, 10, False),  # 5 more, but not more than 1.5 times as many
        (16, 10, True),
        (0, 0, False),
    ],
)
def test_a_double_threshold_needs_both(here: int, there: int, exceeded: bool) -> None:
    """As in sglang-router: more than `abs` more and more than `rel` times as many."""
    _, (member, least) = pool_with(here, there)
    assert Threshold(4, 1.5).exceeded(member, least) is exceeded


def test_calls_that_wait_for_a_member_are_part_of_its_load() -> None:
    """A full member's line grows while its count in flight does not."""
    d, caller, (m0, _) = started(credits=1, rebind_over=(2, 1.0))
    d.call(caller, b"1", "s")
    d.reply(m0, b"1")
    for number in range(2, 5):
        d.call(caller, b"%d" % number, "s")
    assert d.in_flight() == {"m0": 1, "m1": 0}
    assert served_by(d.call(caller, b"5", "s")) == "m1", "three at m0, none at m1"


def test_a_session_stays_below_the_threshold_and_leaves_beyond_it() -> None:
    """For the least busy one."""
    rebind = Rebind(Threshold(4, 1.5))
    pool, (m0, m1, m2) = pool_with(6, 3, 2)
    assert rebind.choose(pool, m0, None) is m0
    assert rebind.choose(pool, m1, None) is m1
    pool, (m0, _, m2) = pool_with(7, 3, 2)
    assert rebind.choose(pool, m0, None) is m2
    assert rebind.choose(pool, None, None) is m2, "a new session goes to the least busy in any case"


def test_a_session_stays_where_nobody_has_room() -> None:
    """It waits at its own member: others are no better off."""
    pool, (m0, _) = pool_with(2, 2, credits=2)
    assert pool.least() is None
    assert Rebind(Threshold(0, 1.0)).choose(pool, m0, None) is m0


def test_a_group_meets_unless_its_member_is_overloaded_or_takes_nothing() -> None:
    """Then the least busy one is its next."""
    group = Group(Threshold(4, 1.5))
    pool, (m0, m1) = pool_with(4, 0)
    assert group.choose(pool, None, m0) is m0
    assert group.choose(pool, None, None) is m1
    assert group.choose(pool, m1, m0) is m1, "its session is bound elsewhere"
    m0.become(State.SLOW)
    assert group.choose(pool, None, m0) is m1
    pool, (m0, m1) = pool_with(5, 0)
    assert group.choose(pool, None, m0) is m1


def test_a_group_does_not_wait_for_its_full_member() -> None:
    """The prompt is computed once more elsewhere, which is sooner."""
    pool, (m0, m1) = pool_with(2, 1, credits=2)
    assert Group(Threshold(100, 1.0)).choose(pool, None, m0) is m1


def test_samples_of_a_prompt_go_to_one_engine() -> None:
    """Whatever else comes in between; without the policy they are spread."""
    for thresholds, names in (({}, {"m0", "m1"}), ({"group_over": (8, 1.5)}, {"m0"})):
        d, caller, _ = started(**thresholds)
        served = {served_by(d.call(caller, b"%d" % i, f"s{i}", group="g")) for i in range(4)}
        assert served == names
    assert [a.why for a in d.assignments] == ["new", "group", "group", "group"]


def test_a_group_goes_on_where_its_last_session_went() -> None:
    """One that is too large for a member moves on to the next, and does not scatter."""
    d, caller, _ = started(3, group_over=(1, 1.0))
    order = [served_by(d.call(caller, b"%d" % i, f"s{i}", group="g")) for i in range(6)]
    assert order == ["m0", "m0", "m1", "m1", "m2", "m2"]


def test_a_further_turn_does_not_move_the_group() -> None:
    """Only new sessions say where the group is."""
    d, caller, (m0, _) = started(group_over=(0, 1.0))
    assert served_by(d.call(caller, b"1", "s1", group="g")) == "m0"
    assert served_by(d.call(caller, b"2", "s2", group="g")) == "m1"
    d.reply(m0, b"1")
    assert served_by(d.call(caller, b"3", "s1", group="g")) == "m0", "its session's"
    d.reply(m0, b"3")
    d.call(caller, b"4", member="m0", lane=b"c")
    assert d.core.pools["engine"].groups == {"g": d.member("m1")}


def test_groups_are_remembered_up_to_a_number() -> None:
    """The least recently used goes first; its next sample counts as the first."""
    d, caller, _ = started(group_over=(8, 1.5))
    for i, group in enumerate(["a", "b", "c", "a", "d"]):
        d.call(caller, b"%d" % i, f"s{i}", group=group)
    groups = d.core.pools["engine"].groups
    assert groups is not None
    assert set(groups) == {"c", "a", "d"}


def test_calls_without_a_group_are_no_group() -> None:
    """They are spread as ever."""
    d, caller, _ = started(group_over=(8, 1.5))
    assert {served_by(d.call(caller, b"%d" % i)) for i in range(2)} == {"m0", "m1"}
    assert not d.core.pools["engine"].groups


def test_a_session_moves_to_an_idle_newcomer_only_with_the_policy() -> None:
    """An engine that was started again has no sessions of its own."""
    for thresholds, name in (({}, "m0"), ({"rebind_over": (2, 1.5)}, "m1")):
        d, caller, (m0,) = started(1, **thresholds)
        for i in range(4):
            d.call(caller, b"%d" % i, f"s{i}")
        d.join("m1")
        d.reply(m0, b"0")
        assert served_by(d.call(caller, b"again", "s0")) == name
    assert d.assignments[-1].why == "rebound"
    d.reply(nonce_of("m1", 1), b"again")
    assert served_by(d.call(caller, b"stays", "s0")) == "m1", "bound there from now on"


def test_a_session_that_moves_with_calls_in_flight_is_counted_right() -> None:
    """Its former member's answer does not bind it again."""
    d, caller, (m0, m1) = started(rebind_over=(1, 1.0))
    for i in range(3):
        d.call(caller, b"%d" % i, "s")
    assert d.in_flight() == {"m0": 2, "m1": 1}
    d.reply(m1, b"2")
    d.reply(m0, b"0")
    d.reply(m0, b"1")
    assert d.quiet()
    assert served_by(d.call(caller, b"3", "s")) == "m1"


def test_only_the_pool_with_policies_has_them() -> None:
    """A sandbox's session is more than a cache: it stays where it is."""
    d, caller, _ = started(rebind_over=(0, 1.0), group_over=(100, 9.0))
    w0, _ = d.join("w0", pool="worker"), d.join("w1", pool="worker")
    d.call(caller, b"1", "s", pool="worker", group="g")
    d.call(caller, b"2", "s", pool="worker", group="g")
    assert d.in_flight("worker") == {"w0": 2, "w1": 0}
    assert served_by(d.call(caller, b"3", "t", pool="worker", group="g")) == "w1"
    d.reply(w0, b"1")


def test_suspects_are_not_led_by_policies() -> None:
    """They go where they are alone, also with a group and a session."""
    d, caller, _ = started(group_over=(100, 9.0), rebind_over=(100, 9.0))
    assert served_by(d.call(caller, b"1", "s", group="g")) == "m0"
    assert served_by(d.call(caller, b"2", "t", group="g", attempt=2, suspect=True)) == "m1"
    assert served_by(d.call(caller, b"3", "u", group="g")) == "m0", "not to the one on trial"


def test_beyond_the_cap_what_was_sent_again_goes_first() -> None:
    """An engine's credits are the cap: the rest waits in the broker, and its order is kept."""
    d, caller, (m0,) = started(1, credits=1)
    for number, attempt in ((b"1", 1), (b"2", 1), (b"3", 2), (b"4", 1)):
        d.call(caller, number, attempt=attempt)
    order = []
    for call in (b"1", b"3", b"2", b"4"):
        order += given(d.reply(m0, call))
    assert order == [(b"3", "m0"), (b"2", "m0"), (b"4", "m0")]
    assert d.quiet()


def test_policies_come_from_the_thresholds_that_are_set() -> None:
    """None is off; both stand behind one another."""
    assert routing({}, 7) == STICKY
    assert routing({"group_over": None, "rebind_over": None}, 7) == STICKY
    assert routing({"group_over": [1, 2.0]}, 7) == (Group(Threshold(1, 2.0)), 7)
    both = routing({"group_over": [1, 2.0], "rebind_over": [3, 4.0]}, 7)
    assert both.policy == Rebind(Threshold(3, 4.0), Group(Threshold(1, 2.0)))
    assert both.groups == 7
