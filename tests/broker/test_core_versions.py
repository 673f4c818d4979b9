"""Versions of what members serve, and gates behind which calls wait while it changes."""

from __future__ import annotations

from typing import Any

import pytest

from support.broker_driver import SECRET, Driver, Sent, driver, given, nonce_of, served_by
from zagent import __version__
from zagent.broker.pool import State
from zagent.errors import InvalidRequest
from zagent.wire.messages import Call, Failure, Hello, Outdated, Reply

STATES = {"m0": State.READY, "m1": State.READY}


def join(d: Driver, name: str, number: Any = 0, weights: str = "", epoch: int = 1) -> bytes:
    return d.join(name, epoch=epoch, facts={"version": number, "weights": weights})


def says(d: Driver, member: bytes, name: str, number: Any, weights: str = "/w") -> list[Sent]:
    """A member that is known says hello again: it serves other weights now."""
    facts = {"version": number, "weights": weights}
    return d.hello(member, Hello("engine", name, 1, 8, SECRET, __version__, d.core.incarnation), facts)


def states(d: Driver) -> dict[str, State]:
    return {name: member.state for name, member in d.core.pools["engine"].members.items()}


def reminded(sent: list[Sent]) -> dict[bytes, tuple[int, str]]:
    return {s.to[1:]: tuple(s.message) for s in sent if isinstance(s.message, Outdated)}


def calls(sent: list[Sent]) -> list[bytes]:
    return [s.message.call for s in sent if isinstance(s.message, Call)]


# ---- versions -------------------------------------------------------------------------------------------------------


def test_a_member_of_an_older_version_gets_no_calls() -> None:
    """It is there, and says so; those that are at the highest version serve."""
    d = driver()
    caller = d.caller()
    for i, number in enumerate((3, 3, 2)):
        join(d, f"m{i}", number)
    assert states(d) == {**STATES, "m2": State.STALE}
    assert {served_by(d.call(caller, b"%d" % i)) for i in range(6)} == {"m0", "m1"}
    status = d.broker(caller, "status")
    assert (status["pools"]["engine"]["m2"]["state"], status["pools"]["engine"]["m2"]["version"]) == ("stale", 2)
    assert status["versions"] == {"engine": 3, "worker": 0}


def test_who_comes_with_older_weights_is_told_where_the_newer_ones_lie() -> None:
    """And serves as soon as it says that it has them."""
    d = driver()
    join(d, "m0", 5, "/weights/5")
    d.take()
    late = join(d, "m1", 0)
    assert reminded(d.take()) == {late: (5, "/weights/5")}
    says(d, late, "m1", 5, "/weights/5")
    assert states(d) == STATES


def test_who_is_still_behind_is_told_of_each_newer_version_once() -> None:
    """One that loads version 1 while version 2 comes hears of it, however it comes; and not again when it says that it
    has version 1."""
    d = driver()
    caller, late = d.caller(), join(d, "m0")
    d.broker(caller, "set_version", ["engine", 1, "/1"])
    d.broker(caller, "set_version", ["engine", 1, "/1"])
    assert [tuple(s.message) for s in d.take() if isinstance(s.message, Outdated)] == [(1, "/1")]
    join(d, "m1", 2, "/2")
    assert reminded(d.take()) == {late: (2, "/2")}
    says(d, late, "m0", 1, "/1")
    assert reminded(d.take()) == {}
    d.broker(caller, "set_version", ["engine", 3, "/3"])
    assert reminded(d.take())[late] == (3, "/3")
    assert states(d) == {"m0": State.STALE, "m1": State.STALE}
    says(d, late, "m0", 3, "/3")
    assert states(d)["m0"] is State.READY


def test_who_comes_with_newer_weights_leaves_the_others_behind() -> None:
    """Whatever they serve is old from then on; what they run ends there."""
    d = driver()
    caller, m0 = d.caller(), join(d, "m0", 1)
    d.call(caller, b"1")
    d.take()
    join(d, "m1", 2, "/weights/2")
    assert states(d) == {"m0": State.STALE, "m1": State.READY}
    assert reminded(d.take()) == {m0: (2, "/weights/2")}
    assert [type(s.message) for s in d.reply(m0, b"1")] == [Reply]
    assert served_by(d.call(caller, b"2")) == "m1"


def test_sticky_calls_leave_a_member_that_has_become_stale() -> None:
    """What waited for room there goes to others."""
    d = driver()
    caller = d.caller()
    m0 = d.join("m0", 1, facts={"version": 0})
    d.call(caller, b"1", "s")
    d.progress(m0, b"1")
    d.call(caller, b"2", "s")
    d.take()
    join(d, "m1", 1)
    assert calls(d.take()) == [b"2"]


def test_members_that_become_stale_together_get_nothing_of_each_other() -> None:
    """A sticky call that waits for room at one of them, which is full, waits on: the other is behind, too."""
    d = driver()
    caller, m0 = d.caller(), d.join("m0", 1)
    d.call(caller, b"1", "s")
    d.progress(m0, b"1")
    d.join("m1", 1)
    d.call(caller, b"2", "s")
    d.take()
    d.broker(caller, "set_version", ["engine", 1, "/1"])
    assert calls(d.take()) == []
    assert states(d) == {"m0": State.STALE, "m1": State.STALE}
    join(d, "m2", 1)
    assert given(d.take()) == [(b"2", "m2")]


def test_an_older_version_than_its_own_changes_nothing() -> None:
    """Hellos may be old."""
    d = driver()
    m0 = join(d, "m0", 3, "/weights/3")
    says(d, m0, "m0", 2, "/weights/2")
    assert (d.member("m0").version, d.member("m0").weights, states(d)) == (3, "/weights/3", {"m0": State.READY})


@pytest.mark.parametrize("version", ["2", 2.0, -1, 2**63, None])
def test_a_version_that_is_none_is_refused(version: Any) -> None:
    """Of a newcomer as of a known member, which stays what it was; and of whoever says that there is one."""
    d = driver()
    caller, m0 = d.caller(), join(d, "m0", 1)
    (answer,) = [s for s in says(d, m0, "m0", version) if s.to[:1] == b"c"]
    assert isinstance(answer.message, Failure)
    assert f"{version!r}, and versions are 0 to" in str(answer.error)
    with pytest.raises(InvalidRequest):
        d.broker(caller, "set_version", ["engine", version, "/2"])
    assert (d.member("m0").version, d.core.pools["engine"].version) == (1, 1)


def test_versions_are_a_pools_own() -> None:
    """A worker has none, and is not stale beside engines."""
    d = driver()
    join(d, "m0", 9)
    d.join("w0", pool="worker")
    assert d.member("w0", "worker").takes_calls


def test_a_version_may_be_told_before_anybody_has_it() -> None:
    """Members that come are stale then, and are told where the weights lie."""
    d = driver()
    caller, m0 = d.caller(), join(d, "m0")
    d.take()
    d.broker(caller, "set_version", ["engine", 4, "/weights/4"])
    assert reminded(d.take()) == {m0: (4, "/weights/4")}
    assert states(d) == {"m0": State.STALE}
    d.broker(caller, "set_version", ["engine", 3, "/weights/3"])  # an old one changes nothing
    assert d.broker(caller, "status")["versions"]["engine"] == 4


def test_a_slow_member_may_become_stale_and_is_slow_still_when_it_has_caught_up() -> None:
    """Its health is remembered meanwhile."""
    d = driver()
    launcher, m0 = d.launcher(), join(d, "m0")
    d.health(launcher, "m0", slow=True)
    join(d, "m1", 1)
    assert d.member("m0").state is State.STALE
    says(d, m0, "m0", 1)
    assert d.member("m0").state is State.SLOW
    d.health(launcher, "m0", slow=False)
    assert d.member("m0").state is State.READY


def test_versions_are_found_again_after_a_restart() -> None:
    """Members tell them: the highest counts, also of who comes first, or alone."""
    d = driver()
    d.restart(("engine", "m0", 1), ("engine", "m1", 1))
    join(d, "m0", 0)
    m1 = join(d, "m1", 2, "/weights/2")
    assert states(d) == {"m0": State.STALE, "m1": State.READY}
    assert m1 not in reminded(d.take())


# ---- gates ----------------------------------------------------------------------------------------------------------


def gated(d: Driver) -> tuple[bytes, bytes, bytes]:
    """One member that runs a call; the gate is closed for the sake of the trainer."""
    caller, trainer, member = d.caller(), d.caller("trainer"), d.join("m0")
    d.call(caller, b"1", "s")
    d.broker(trainer, "close_gate", ["engine", "update"])
    d.take()
    return caller, trainer, member


def test_nothing_passes_a_closed_gate_and_all_does_when_it_opens() -> None:
    """What runs goes on; fresh calls, repeated ones and those of a session wait, and keep their order."""
    d = driver()
    caller, trainer, member = gated(d)
    for call, session in ((b"2", ""), (b"3", "s")):
        assert d.call(caller, call, session) == []
    assert d.call(caller, b"4", attempt=2) == []
    assert [type(s.message) for s in d.reply(member, b"1")] == [Reply]
    assert d.in_flight() == {"m0": 0}
    assert d.broker(caller, "status")["gated"] == ["engine"]
    d.take()
    d.broker(trainer, "open_gate", ["engine", "update"])
    assert calls(d.take()) == [b"4", b"2", b"3"]
    assert d.broker(caller, "status")["gated"] == []


def test_a_call_to_a_named_member_passes() -> None:
    """Those are how weights are changed."""
    d = driver()
    caller, *_ = gated(d)
    assert calls(d.call(caller, b"9", member="m0", lane=b"c")) == [b"9"]


def test_other_pools_have_gates_of_their_own() -> None:
    """Workers get rows while engines take nothing new."""
    d = driver()
    caller, *_ = gated(d)
    d.join("w0", pool="worker")
    assert calls(d.call(caller, b"9", pool="worker")) == [b"9"]


def test_the_gate_opens_when_all_who_closed_it_have_let_go() -> None:
    """Also by going away, however they do."""
    d = driver()
    caller, trainer, _ = gated(d)
    other = d.caller("other")
    d.broker(other, "close_gate", ["engine", "update"])
    d.call(caller, b"2")
    d.take()
    d.broker(trainer, "open_gate", ["engine", "update"])
    assert calls(d.take()) == []
    d.unsendable(b"c" + other)
    assert calls(d.take()) == [b"2"]


def test_a_newcomer_waits_behind_the_gate_too() -> None:
    """An engine that comes back meanwhile gets nothing before the gate opens."""
    d = driver()
    caller, trainer, _ = gated(d)
    d.call(caller, b"2")
    d.take()
    d.join("m1")
    assert calls(d.take()) == []
    d.broker(trainer, "open_gate", ["engine", "update"])
    assert calls(d.take()) == [b"2"]


def test_a_gate_may_close_and_open_before_anybody_is_there() -> None:
    """A new broker whose members are all dead: calls wait as they did, and go to the first that comes."""
    d = driver()
    caller, trainer = d.caller(), d.caller("trainer")
    d.broker(trainer, "close_gate", ["engine", "update"])
    d.call(caller, b"1")
    d.broker(trainer, "open_gate", ["engine", "update"])
    d.broker(trainer, "open_gate", ["engine", "update"])
    d.take()
    d.join("m0")
    assert calls(d.take()) == [b"1"]


def test_who_has_gone_while_the_gate_was_closed_changes_nothing() -> None:
    """Its calls wait like others, and go to whoever is there when it opens; leases are given back."""
    d = driver()
    caller, trainer, _ = gated(d)
    d.join("m1")
    d.goodbye(nonce_of("m0", 1))
    assert d.call(caller, b"1", "s", attempt=2) == []
    d.take()
    d.broker(trainer, "open_gate", ["engine", "update"])
    assert given(d.take()) == [(b"1", "m1")]
    assert d.in_flight() == {"m0": 0, "m1": 1}


def test_a_slow_member_behind_the_gate_gets_nothing_when_it_is_well_again() -> None:
    """Whatever changes meanwhile: health, drain, other versions, an answer that makes room."""
    d = driver()
    caller, _, member = gated(d)
    launcher = d.launcher()
    for i in range(3):
        d.call(caller, b"%d" % (i + 2), "s" if i else "")
    d.take()
    d.health(launcher, "m0", slow=True)
    d.health(launcher, "m0", slow=False)
    join(d, "m1", 1)
    says(d, member, "m0", 1)
    d.reply(member, b"1")
    d.tick(5.0)
    assert calls(d.take()) == []
    assert states(d) == STATES
    assert d.core.dispatch.pending == 3


def test_a_suspect_waits_behind_the_gate_too() -> None:
    """It is not tried meanwhile."""
    d = driver()
    caller, trainer, member = gated(d)
    d.reply(member, b"1")
    assert calls(d.call(caller, b"2", suspect=True, attempt=2)) == []
    d.broker(trainer, "open_gate", ["engine", "update"])
    assert calls(d.take()) == [b"2"]


def test_while_the_gate_is_closed_its_holder_brings_the_weights() -> None:
    """Members are not told to fetch them until it opens: those that have none then, are."""
    d = driver()
    _, trainer, m0 = gated(d)
    m1 = d.join("m1")
    d.take()
    says(d, m0, "m0", 1)
    assert states(d) == {"m0": State.READY, "m1": State.STALE}
    assert reminded(d.take()) == {}
    d.broker(trainer, "open_gate", ["engine", "update"])
    assert reminded(d.take()) == {m1: (1, "/w")}


def test_a_waiting_call_may_be_given_up_or_run_out_of_time_behind_the_gate() -> None:
    """It is answered, and does not come up when the gate opens."""
    d = driver()
    caller, trainer, member = gated(d)
    d.reply(member, b"1")
    d.call(caller, b"2")
    d.call(caller, b"3", remaining_ms=1000)
    d.cancel(caller, b"2")
    d.take()
    (late,) = d.tick(1.0)
    assert (late.message.call, type(late.message)) == (b"3", Failure)
    d.broker(trainer, "open_gate", ["engine", "update"])
    assert calls(d.take()) == []
    assert d.quiet()


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("close_gate", "nowhere"),
        ("open_gate", None),
        ("open_gate", ["engine"]),
        ("set_version", ["engine", "1", "/w"]),
        ("set_version", ["nowhere", 1, "/w"]),
        ("set_version", None),
    ],
)
def test_what_cannot_be_meant_is_refused(method: str, argument: Any) -> None:
    """By name; nothing changes."""
    d = driver()
    with pytest.raises(InvalidRequest):
        d.broker(d.caller(), method, argument)
