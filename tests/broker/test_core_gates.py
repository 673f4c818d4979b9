"""Gates and turns over restarts of the broker, and members that sleep."""

from __future__ import annotations

from typing import Any

import pytest

from support.broker_driver import SECRET, Driver, Sent, driver, given, served_by
from zagent import __version__
from zagent.broker.pool import State
from zagent.broker.presence import RECOVER_S
from zagent.errors import InvalidRequest, ProtocolError, StateError
from zagent.wire.messages import Failure, Hello, Outdated

HOLDS = {"gates": [["engine", "update"]]}


def says(d: Driver, member: bytes, *lacks: str, name: str = "m0", version: int = 0) -> list[Sent]:
    """A member that is known says hello again."""
    facts = {"lacks": list(lacks), "version": version}
    return d.hello(member, Hello("engine", name, 1, 8, SECRET, __version__, d.core.incarnation), facts)


def states(d: Driver) -> dict[str, str]:
    return {name: str(member.state) for name, member in d.core.pools["engine"].members.items()}


# ---- gates and turns ------------------------------------------------------------------------------------------------


def held_over() -> tuple[Driver, bytes, bytes]:
    """A second broker, which expects m0 and the trainer that held its gate; m0 is back, and a call waits."""
    d = driver()
    d.join("m0")
    trainer = d.caller("trainer")
    d.broker(trainer, "close_gate", ["engine", "update"])
    d.restart(("engine", "m0", 1), holders=[trainer])
    caller = d.caller()
    d.join("m0")
    assert d.call(caller, b"1") == []
    d.take()
    return d, caller, trainer


def test_a_new_broker_routes_nothing_before_it_knows_the_gates() -> None:
    """Its members are back; who held a gate says so in its hello, and calls wait until it opens."""
    d, _, trainer = held_over()
    assert d.core.dispatch.recovering
    d.caller("trainer", **HOLDS)
    assert not d.core.dispatch.recovering
    assert given(d.take()) == []
    d.broker(trainer, "open_gate", ["engine", "update"])
    assert given(d.take()) == [(b"1", "m0")]


def test_who_held_a_gate_may_have_let_it_go() -> None:
    """Its hello says nothing of it: calls pass at once."""
    d, *_ = held_over()
    d.caller("trainer")
    assert given(d.take()) == [(b"1", "m0")]


def test_who_held_a_gate_is_not_waited_for_longer_than_members() -> None:
    """It may be dead. What it comes with later holds from then on."""
    d, caller, _ = held_over()
    assert given(d.tick(RECOVER_S)) == [(b"1", "m0")]
    d.caller("trainer", **HOLDS)
    assert d.call(caller, b"2") == []


def test_a_broker_without_members_waits_for_holders_too() -> None:
    """Nobody else is expected."""
    d = driver()
    trainer = d.caller("trainer")
    d.restart(holders=[trainer])
    caller = d.caller()
    d.call(caller, b"1")
    d.join("m0")
    assert d.core.dispatch.recovering
    d.caller("trainer", **HOLDS)
    assert given(d.take()) == []


def test_holders_are_told_for_the_next_broker_whenever_they_change() -> None:
    """Of gates and turns, each once; also when they leave, or come with what they hold."""
    told: list[list[bytes]] = []
    d = driver(remember=told.append)
    d.join("m0")
    one, two = d.caller("one"), d.caller("two")
    d.broker(one, "close_gate", ["engine", "update"])
    d.broker(one, "close_gate", ["engine", "update"])
    d.broker(one, "take_turn", "engine")
    d.broker(two, "close_gate", ["engine", "update"])
    d.broker(one, "open_gate", ["engine", "update"])
    d.broker(two, "open_gate", ["engine", "update"])
    d.broker(one, "end_turn", "engine")
    assert told == [[one], [one, two], [one], []]
    three = d.caller("three", turns=["engine"])
    d.goodbye(three)
    assert told[4:] == [[three], []]


def test_one_at_a_time_has_its_turn() -> None:
    """Another one is told so, and nothing changes; it may take it when the first has ended it, or is gone."""
    d = driver()
    one, two = d.caller("one"), d.caller("two")
    for ends in (lambda: d.broker(one, "end_turn", "engine"), lambda: d.goodbye(one)):
        d.broker(one, "take_turn", "engine")
        d.broker(one, "take_turn", "engine")
        with pytest.raises(StateError, match="another trainer is updating the members of pool 'engine'"):
            d.broker(two, "take_turn", "engine")
        d.broker(two, "end_turn", "engine")
        assert d.core.pools["engine"].turn == one
        d.broker(two, "take_turn", "worker")
        d.broker(two, "end_turn", "worker")
        ends()
        d.broker(two, "take_turn", "engine")
        d.broker(two, "end_turn", "engine")


def test_a_turn_is_known_again_after_a_restart() -> None:
    """By the hello of whoever has it; nobody takes it from another by saying so."""
    d = driver()
    d.restart(("engine", "m0", 1))
    one = d.caller("one", turns=["engine"])
    two = d.caller("two", turns=["engine"])
    with pytest.raises(StateError):
        d.broker(two, "take_turn", "engine")
    assert d.core.pools["engine"].turn == one


@pytest.mark.parametrize(
    "names",
    [None, 1, "engine", {"engine": 1}, ["nowhere", 3, None, ["engine"], ["engine", "boredom"], [["engine"], "update"]]],
)
def test_names_of_no_pools_hold_nothing(names: Any) -> None:
    """Any stranger may say hello."""
    d = driver()
    d.caller("one", gates=names, turns=names)
    pool = d.core.pools["engine"]
    assert (pool.gates, pool.turn) == (set(), None)


# ---- asleep ---------------------------------------------------------------------------------------------------------


def test_a_member_that_sleeps_gets_no_calls_until_it_has_woken_up() -> None:
    """Whoever made it sleep may be gone; status says what it lacks, and that calls are held back if nobody is awake."""
    d = driver()
    caller, m0 = d.caller(), d.join("m0")
    says(d, m0, "weights", "kv_cache")
    assert d.call(caller, b"1") == []
    status = d.broker(caller, "status")
    assert (states(d), status["gated"]) == ({"m0": "asleep"}, ["engine"])
    assert status["pools"]["engine"]["m0"]["lacks"] == ["weights", "kv_cache"]
    says(d, m0, "update")
    assert states(d) == {"m0": "asleep"}
    d.take()
    says(d, m0)
    assert given(d.take()) == [(b"1", "m0")]
    assert d.broker(caller, "status")["gated"] == []


def test_sticky_calls_leave_a_member_that_sleeps() -> None:
    """What waits for room there goes to others; a call to it by name, which is how it wakes up, passes."""
    d = driver()
    caller, m0 = d.caller(), d.join("m0", 1)
    d.call(caller, b"1", "s")
    d.progress(m0, b"1")
    d.join("m1", 1)
    d.call(caller, b"2", "s")
    d.take()
    says(d, m0, "kv_cache")
    assert given(d.take()) == [(b"2", "m1")]
    assert d.broker(caller, "status")["gated"] == []
    assert served_by(d.call(caller, b"3", member="m0", lane=b"c")) == "m0"


def test_who_sleeps_is_known_after_a_restart() -> None:
    """It says so as it comes."""
    d = driver()
    d.restart(("engine", "m0", 1), ("engine", "m1", 1))
    caller = d.caller()
    d.call(caller, b"1")
    d.join("m0", facts={"lacks": ["kv_cache"]})
    d.join("m1")
    assert given(d.take()) == [(b"1", "m1")]
    assert states(d) == {"m0": "asleep", "m1": "ready"}


def test_a_member_may_go_to_sleep_or_wake_up_while_others_are_waited_for() -> None:
    """What it has said last counts then."""
    d = driver()
    d.restart(("engine", "m0", 1), ("engine", "m1", 1), ("engine", "m2", 1))
    m0, m1 = d.join("m0"), d.join("m1", facts={"lacks": ["kv_cache"]})
    says(d, m0, "kv_cache")
    says(d, m1, name="m1")
    assert states(d) == dict.fromkeys(("m0", "m1"), str(State.JOINING))
    d.join("m2")
    assert states(d) == {"m0": "asleep", "m1": "ready", "m2": "ready"}


def test_who_sleeps_is_not_told_to_load_weights() -> None:
    """There is no room for them: it is as soon as it is awake, and behind; and one that has them serves."""
    d = driver()
    caller, m0 = d.caller(), d.join("m0")
    says(d, m0, "weights")
    d.take()
    d.broker(caller, "set_version", ["engine", 2, "/2"])
    assert states(d) == {"m0": "asleep"}
    assert not any(isinstance(s.message, Outdated) for s in d.take())
    says(d, m0)
    assert states(d) == {"m0": "stale"}
    assert [tuple(s.message) for s in d.take() if isinstance(s.message, Outdated)] == [(2, "/2")]
    says(d, m0, "kv_cache")
    assert states(d) == {"m0": "asleep"}
    says(d, m0, version=2)
    assert states(d) == {"m0": "ready"}


def test_a_slow_member_may_sleep_and_is_slow_still_when_it_wakes_up() -> None:
    """Its health is remembered meanwhile; and it may be drained."""
    d = driver()
    launcher, m0 = d.launcher(), d.join("m0")
    d.health(launcher, "m0", slow=True)
    says(d, m0, "kv_cache")
    d.health(launcher, "m0", slow=True)
    assert states(d) == {"m0": "asleep"}
    says(d, m0)
    assert states(d) == {"m0": "slow"}
    says(d, m0, "kv_cache")
    d.broker(launcher, "drain", ["engine", "m0"])
    says(d, m0)
    assert states(d) == {"m0": "draining"}


def asleep(d: Driver, *members: bytes) -> tuple[bytes, bytes]:
    """These sleep by order of a trainer, which keeps the gate closed; a caller, and the trainer."""
    caller, trainer = d.caller(), d.caller("trainer")
    d.broker(trainer, "close_gate", ["engine", "asleep"])
    for number, member in enumerate(members):
        says(d, member, "kv_cache", name=f"m{number}")
    assert d.call(caller, b"1") == []
    d.take()
    return caller, trainer


def test_the_gate_of_who_made_members_sleep_opens_when_all_have_woken_up() -> None:
    """Whoever has woken them up, and not with the first of them."""
    d = driver()
    m0, m1 = d.join("m0"), d.join("m1")
    caller, _ = asleep(d, m0, m1)
    says(d, m0)
    assert given(d.take()) == []
    says(d, m1, name="m1")
    assert [call for call, _ in given(d.take())] == [b"1"]
    assert d.broker(caller, "status")["gated"] == []


def test_who_made_members_sleep_may_not_know_that_they_have_woken_up() -> None:
    """What its hello says of that is believed only where a member sleeps, or may: its other reasons always."""
    d = driver()
    m0 = d.join("m0")
    _, trainer = asleep(d, m0)
    says(d, m0)
    d.goodbye(trainer)
    d.caller("trainer", gates=[["engine", "asleep"]])
    pool = d.core.pools["engine"]
    assert pool.gates == set()
    d.goodbye(trainer)
    d.caller("trainer", gates=[["engine", "asleep"], ["engine", "update"]])
    assert {reason for _, reason in pool.gates} == {"update"}
    d.restart(("engine", "m0", 1))
    d.caller("trainer", gates=[["engine", "asleep"]])
    assert d.core.pools["engine"].gates != set()
    d.join("m0")
    assert d.core.pools["engine"].gates == set()


def test_a_member_that_dies_asleep_opens_no_gate() -> None:
    """It is awake when it is back, while the trainer has its memory."""
    d = driver()
    m0 = d.join("m0")
    asleep(d, m0)
    d.goodbye(m0)
    d.join("m0", epoch=2)
    assert given(d.take()) == []
    assert d.core.pools["engine"].gates != set()


@pytest.mark.parametrize("argument", ["engine", ["engine"], ["engine", "boredom"], ["nowhere", "update"], None, [1, 2]])
@pytest.mark.parametrize("method", ["close_gate", "open_gate"])
def test_a_gate_takes_a_pool_and_a_reason(method: str, argument: Any) -> None:
    """Else nothing is closed or opened."""
    d = driver()
    caller = d.caller()
    with pytest.raises(InvalidRequest):
        d.broker(caller, method, argument)
    assert d.core.pools["engine"].gates == set()


def test_what_is_lacked_must_be_a_list() -> None:
    """The hello is refused, and the member stays what it was."""
    d = driver()
    m0 = d.join("m0")
    sent = d.hello(m0, Hello("engine", "m0", 1, 8, SECRET, __version__, d.core.incarnation), {"lacks": "much"})
    (answer,) = [s for s in sent if s.to[:1] == b"c"]
    assert isinstance(answer.message, Failure)
    assert isinstance(answer.error, ProtocolError)
    assert states(d) == {"m0": "ready"}
