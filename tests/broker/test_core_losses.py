"""Lost calls that may be sent again or not, and pools that nobody serves any more."""

from __future__ import annotations

from typing import Any

import pytest

from support.broker_driver import driver, served_by
from zagent.errors import MemberLost, PoolLost, ProtocolError, to_wire
from zagent.wire.messages import Abandoned


@pytest.mark.parametrize(
    ("facts", "repeatable"),
    [({}, True), ({"idempotent": ["generate"]}, True), ({"idempotent": ["other"]}, False), ({"idempotent": 5}, True)],
)
def test_a_lost_call_says_whether_it_may_be_sent_again(facts: Any, repeatable: bool) -> None:
    """By what its member's hello said about the method; members that say nothing repeat everything."""
    d = driver()
    caller, member = d.caller(), d.join("m0", facts=facts)
    d.call(caller, b"1")
    (lost,) = d.goodbye(member)
    assert isinstance(lost.error, MemberLost)
    assert lost.error.repeatable is repeatable


def abandon(d: Any, sender: bytes, pool: str = "engine") -> Any:
    return d.say(b"c" + sender, Abandoned(pool), to_wire(PoolLost("nobody is left, last words: cheese")))


def test_an_abandoned_pools_calls_end_in_the_launchers_words() -> None:
    """Those that wait, also bound to a member that is gone, and those that come later; `PoolLost` is not transient."""
    d = driver()
    caller, launcher, member = d.caller(), d.launcher(), d.join("m0", credits=1)
    d.call(caller, b"1", "s")
    d.call(caller, b"2", "s")
    d.call(caller, b"3")
    d.goodbye(member)
    answers = abandon(d, launcher)
    assert [(a.to, a.message.call) for a in answers] == [(b"d" + caller, b"2"), (b"d" + caller, b"3")]
    (late,) = d.call(caller, b"4")
    for answer in (*answers, late):
        assert isinstance(answer.error, PoolLost)
        assert "last words: cheese" in str(answer.error)
    assert d.quiet()


def test_a_member_that_comes_after_all_opens_its_pool_again() -> None:
    """Somebody started one by hand."""
    d = driver()
    caller, launcher = d.caller(), d.launcher()
    abandon(d, launcher)
    d.join("m0")
    assert served_by(d.call(caller, b"1")) == "m0"


def test_only_the_launcher_may_abandon_a_pool() -> None:
    """Anybody else is told no, and unknown pools are ignored."""
    d = driver()
    caller, launcher = d.caller(), d.launcher()
    (refused,) = abandon(d, caller)
    assert isinstance(refused.error, ProtocolError)
    assert abandon(d, launcher, "nonsense") == []
    assert d.call(caller, b"1") == []
