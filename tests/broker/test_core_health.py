"""Members that are spared for now: slow ones, and stale ones."""

from __future__ import annotations

from typing import Any

import pytest

from support.broker_driver import Driver, driver, given, served_by
from zagent.broker.pool import State
from zagent.wire.messages import Drain, Failure


def started(members: int = 2, credits: int = 8) -> tuple[Driver, bytes, bytes, list[bytes]]:
    """The driver, a caller, the launcher, and members."""
    made = driver()
    nonces = [made.join(f"m{i}", credits) for i in range(members)]
    caller, launcher = made.caller(), made.launcher()
    made.take()
    return made, caller, launcher, nonces


def test_a_slow_member_gets_nothing_new_until_it_is_well() -> None:
    """What it has goes on and is answered; its sessions move on their next call."""
    d, caller, launcher, (m0, m1) = started()
    assert served_by(d.call(caller, b"1", "s")) == "m0"
    d.health(launcher, "m0", slow=True)
    assert d.broker(caller, "status")["pools"]["engine"]["m0"]["state"] == "slow"
    assert [served_by(d.call(caller, b"%d" % i, "s")) for i in (2, 3)] == ["m1", "m1"]
    assert [s.to for s in d.reply(m0, b"1")] == [b"d" + caller]
    d.reply(m1, b"2")
    d.reply(m1, b"3")
    d.health(launcher, "m0", slow=False)
    assert {served_by(d.call(caller, b"n%d" % i)) for i in range(2)} == {"m0", "m1"}
    assert served_by(d.call(caller, b"4", "s")) == "m1"


def test_a_session_that_did_not_call_meanwhile_returns() -> None:
    """Its member has its prefix still, also where the last call ended while it was slow."""
    d, caller, launcher, (m0, _m1) = started()
    d.call(caller, b"1", "s")
    d.health(launcher, "m0", slow=True)
    d.reply(m0, b"1")
    d.health(launcher, "m0", slow=False)
    d.call(caller, b"x")
    assert served_by(d.call(caller, b"2", "s")) == "m0"


def test_what_waited_for_a_slow_member_goes_elsewhere() -> None:
    """Nothing waits for it from then on; with everybody slow, calls wait for whoever is well first."""
    d, caller, launcher, (m0, _) = started(2, credits=1)
    d.call(caller, b"1", "s")
    d.call(caller, b"2", "s")
    d.take()
    d.health(launcher, "m0", slow=True)
    assert given(d.take()) == [(b"2", "m1")]
    d.health(launcher, "m1", slow=True)
    d.call(caller, b"3")
    assert d.core.dispatch.pending == 1
    d.take()
    d.health(launcher, "m1", slow=False)
    assert given(d.take()) == [], "it is full"
    d.health(launcher, "m0", slow=False)
    d.reply(m0, b"1")
    assert given(d.take()) == [(b"3", "m0")]


@pytest.mark.parametrize("slow", [True, False])
def test_a_member_that_leaves_or_is_gone_is_not_made_ready(slow: bool) -> None:
    """Nor is one of another life, or of no name anybody knows."""
    d, _, launcher, (m0, m1, _m2) = started(3)
    d.say(b"c" + m0, Drain())
    d.goodbye(m1)
    for name, epoch in (("m0", 1), ("m1", 1), ("m2", 7), ("nobody", 1)):
        assert d.health(launcher, name, epoch, slow=slow) == []
    states = [str(d.member(f"m{i}").state) for i in range(3)]
    assert states == ["draining", "dead", "ready"], "m2 is of epoch 1"


def test_slowness_may_be_reported_before_the_member_is_there() -> None:
    """It counts for that life only, and ends with it."""
    d, _, launcher, _ = started(0)
    d.health(launcher, "m0", 1, slow=True)
    d.join("m0")
    assert d.member("m0").state is State.SLOW
    d.exited(launcher, "m0", 1)
    d.join("m0", epoch=2)
    assert d.member("m0").state is State.READY
    assert d.core._presence._slow == set()


def test_a_slow_member_can_be_drained_removed_and_lost() -> None:
    """Its calls are answered as anybody's."""
    d, caller, launcher, _ = started()
    d.call(caller, b"1")
    for name in ("m0", "m1"):
        d.health(launcher, name, slow=True)
    d.broker(caller, "drain", ["engine", "m1"])
    assert d.member("m1").state is State.DRAINING
    d.take()
    d.broker(caller, "remove", ["engine", "m0"])
    assert [s.message.call for s in d.take() if isinstance(s.message, Failure)] == [b"1"]
    d.health(launcher, "m1", slow=False)
    assert d.member("m1").state is State.DRAINING


def version(d: Driver, name: str, number: Any) -> State:
    d.join(name, facts={"version": number})
    return d.member(name).state


def test_a_stale_member_is_not_made_ready_by_its_health() -> None:
    """It may leave, and be lost."""
    d = driver()
    launcher = d.launcher()
    version(d, "m0", 2)
    version(d, "m1", 1)
    d.health(launcher, "m1", slow=True)
    d.health(launcher, "m1", slow=False)
    assert d.member("m1").state is State.STALE
    d.exited(launcher, "m1")
    assert d.member("m1").state is State.DEAD
