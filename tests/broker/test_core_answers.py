"""Every call ends in exactly one answer, on the lane that asked; nothing else gets through."""

from __future__ import annotations

from typing import Any

import pytest

from support.broker_driver import SECRET, Driver, driver, nonce_of, served_by
from zagent import __version__
from zagent.broker.core import COUNTERS
from zagent.errors import (
    InvalidRequest,
    MemberLost,
    ProtocolError,
    Refused,
    UnknownMethod,
)
from zagent.wire.codec import encode_body, encode_header
from zagent.wire.messages import (
    BROKER,
    Call,
    Cancel,
    Drain,
    Exited,
    Failure,
    Health,
    Hello,
    Progress,
    Reply,
    Welcome,
)


def started(members: int = 2, credits: int = 8, **core: Any) -> tuple[Driver, bytes, list[bytes]]:
    made = driver(**core)
    nonces = [made.join(f"m{i}", credits) for i in range(members)]
    caller = made.caller()
    made.take()
    return made, caller, nonces


def counters(d: Driver) -> dict[str, int]:
    return {key: count for key, count in d.core.counters.items() if count}


# ---- answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [b"d", b"c"])
def test_the_answer_goes_to_the_lane_that_asked(lane: bytes) -> None:
    """Uncopied and undecoded: the frames are the member's."""
    d, caller, (m0, _) = started()
    d.call(caller, b"1", lane=lane)
    frames = [encode_header(Reply(*d.key(b"1"))), b"\xc1 no msgpack"]
    (sent,) = d.raw(b"d" + m0, frames)
    assert (sent.to, sent.frames) == (lane + caller, frames)


def test_a_failure_is_relayed_and_releases() -> None:
    """The count goes down on errors too (pitfall A5)."""
    d, caller, (m0, _) = started()
    d.call(caller, b"1")
    (sent,) = d.fail(m0, b"1", ValueError("no"))
    assert isinstance(sent.error, ValueError)
    assert d.quiet()


def test_a_second_answer_is_late() -> None:
    """Counted and dropped; the count does not go below zero."""
    d, caller, (m0, _) = started()
    d.call(caller, b"1")
    d.reply(m0, b"1")
    assert d.reply(m0, b"1") == d.fail(m0, b"1") == []
    assert d.in_flight() == {"m0": 0, "m1": 0}
    assert counters(d) == {"late": 2}


def test_an_answer_from_another_member_is_dropped() -> None:
    """Nobody can answer, or release, a call that another one has."""
    d, caller, (_, m1) = started()
    d.call(caller, b"1")
    assert d.reply(m1, b"1") == []
    assert d.in_flight() == {"m0": 1, "m1": 0}
    assert counters(d) == {"late": 1}


def test_an_answer_to_an_old_attempt_is_dropped() -> None:
    """Attempt 1's reply does not pass for attempt 2's."""
    d, caller, (m0, _) = started()
    d.call(caller, b"1", attempt=2)
    assert d.reply(m0, b"1", attempt=1) == []
    assert [s.message for s in d.reply(m0, b"1", attempt=2)] == [Reply(b"1", 2)]


def test_an_answer_from_a_caller_is_dropped() -> None:
    """Only members answer."""
    d, caller, _ = started()
    d.call(caller, b"1")
    assert d.reply(caller, b"1") == []
    assert counters(d) == {"late": 1}


def test_a_repeated_call_runs_once() -> None:
    """A duplicate of a waiting call is dropped; that of a running one goes to its member, which knows it, and sends an
    answer again that it has given. Each is answered once."""
    d, caller, (m0,) = started(1, credits=1)
    d.call(caller, b"1")
    d.call(caller, b"2")
    assert [(s.to, s.message.call) for s in d.call(caller, b"1")] == [(b"d" + m0, b"1")]
    assert d.call(caller, b"2") == d.call(caller, b"2", member="m0") == []
    d.reply(m0, b"1")
    d.reply(m0, b"2")
    answers = [(s.to, s.message.call) for s in d.take() if isinstance(s.message, Reply)]
    assert answers == [(b"d" + caller, b"1"), (b"d" + caller, b"2")]
    assert counters(d) == {"replayed": 3}


def test_a_cancelled_call_that_is_repeated_gets_the_answer_it_was_cancelled_with() -> None:
    """Whoever sends it again waits for an answer; its member is not told to run it again."""
    d, caller, (m0,) = started(1)
    d.call(caller, b"1")
    d.cancel(caller, b"1")
    assert d.call(caller, b"1") == []
    assert [s.to for s in d.fail(m0, b"1")] == [b"d" + caller]
    assert d.quiet()


def test_a_repeated_call_that_does_not_reach_its_member_may_have_begun() -> None:
    """Its end is the member's end, and no `Refused`."""
    d, caller, _ = started(1)
    d.call(caller, b"1")
    (again,) = d.call(caller, b"1")
    assert d.unsendable(again.to, again.frames) == []
    (lost,) = d.tick(1.0)
    assert isinstance(lost.error, MemberLost)


@pytest.mark.parametrize("call", [b"", b"1", b"caller", nonce_of("other") + b"1"])
def test_a_call_is_named_after_its_caller(call: bytes) -> None:
    """So that nobody can take, replay or cancel another's."""
    d, caller, _ = started()
    d.caller("other")
    (sent,) = d.say(b"d" + caller, Call(call, 1, "engine", "generate"))
    assert isinstance(sent.error, ProtocolError)
    assert "begins with its caller's nonce" in str(sent.error)
    assert sent.frames[0] == encode_header(Failure(call, 1, False))
    assert counters(d) == {"refused": 1}
    assert d.quiet()


def test_a_further_attempt_does_not_wait_for_the_one_before() -> None:
    """Each has a lease and an answer of its own; the old one is no more its caller's."""
    d, caller, (m0, m1) = started()
    d.call(caller, b"1", attempt=1)
    d.cancel(caller, b"1")
    assert served_by(d.call(caller, b"1", attempt=2)) == "m1"
    assert d.in_flight() == {"m0": 1, "m1": 1}
    assert d.fail(m0, b"1") == [], "that was m1's call to answer"
    assert [s.message for s in d.reply(m1, b"1", 2)] == [Reply(b"1", 2)]
    assert d.reply(m0, b"1", 1) == []
    assert d.quiet()


# ---- progress ---------------------------------------------------------------------------------------------------


def test_progress_goes_where_the_answer_will_go() -> None:
    """As it came, and the lease stays."""
    d, caller, (m0, _) = started()
    d.call(caller, b"1", lane=b"c")
    (sent,) = d.progress(m0, b"1", [1, 2])
    assert (sent.to, sent.message, sent.body) == (b"c" + caller, Progress(b"1", 1), [1, 2])
    assert d.in_flight() == {"m0": 1, "m1": 0}


def test_progress_that_nobody_waits_for_is_dropped() -> None:
    """Of a cancelled call, an ended one, another member's, another attempt, or from one who is no member."""
    d, caller, (m0, m1) = started()
    d.call(caller, b"1", attempt=2)
    assert d.progress(m1, b"1") == d.progress(caller, b"1") == []
    assert d.say(b"d" + m0, Progress(d.id(b"1"), 1)) == []
    d.cancel(caller, b"1")
    assert d.progress(m0, b"1") == []
    d.reply(m0, b"1")
    assert d.progress(m0, b"1") == []


# ---- cancel -----------------------------------------------------------------------------------------------------


def test_a_cancelled_call_keeps_its_lease_until_the_member_stops() -> None:
    """CANCEL goes to the member's control lane; its answer releases, and goes to nobody."""
    d, caller, (m0, _) = started()
    d.call(caller, b"1")
    (sent,) = d.cancel(caller, b"1")
    assert (sent.to, sent.message) == (b"c" + m0, Cancel(b"1", 1))
    assert d.in_flight() == {"m0": 1, "m1": 0}
    assert d.fail(m0, b"1") == []
    assert d.quiet()


def test_cancelling_twice_tells_the_member_once() -> None:
    """The second finds it cancelled."""
    d, caller, _ = started()
    d.call(caller, b"1")
    d.cancel(caller, b"1")
    assert d.cancel(caller, b"1") == []


def test_a_waiting_call_is_cancelled_without_a_trace() -> None:
    """No member hears of it, and its place is free."""
    d, caller, (m0,) = started(1, credits=1)
    d.call(caller, b"1")
    d.call(caller, b"2")
    assert d.cancel(caller, b"2") == []
    assert d.core.dispatch.pending == 0
    d.reply(m0, b"1")
    assert d.quiet()


def test_a_sticky_waiting_call_can_be_cancelled_too() -> None:
    """Out of its member's own queue."""
    d, caller, (m0,) = started(1, credits=1)
    d.call(caller, b"1", "s")
    d.call(caller, b"2", "s")
    d.cancel(caller, b"2")
    d.reply(m0, b"1")
    assert d.quiet()


def test_a_cancel_that_overtakes_its_call_stops_it() -> None:
    """The lanes are not ordered among each other: the call is dropped when it comes."""
    d, caller, _ = started()
    d.cancel(caller, b"1")
    assert d.call(caller, b"1") == []
    assert d.quiet()
    assert counters(d) == {"early_cancels": 1}


def test_an_early_cancel_is_for_its_attempt_only() -> None:
    """The same id with another attempt runs."""
    d, caller, _ = started()
    d.cancel(caller, b"1")
    assert served_by(d.call(caller, b"1", attempt=2)) == "m0"


def test_nobody_cancels_another_callers_call() -> None:
    """It is refused, whether the call is known or not, and nothing is kept of it."""
    d, caller, (m0, _) = started()
    other = d.caller("other")
    d.call(caller, b"1")
    assert d.cancel(other, b"1") == d.cancel(other, b"1", 2) == []
    assert counters(d) == {"refused": 2}
    assert served_by(d.call(caller, b"1", attempt=2)) == "m1"
    d.attempts[b"1"] = 1
    assert [s.to for s in d.reply(m0, b"1")] == [b"d" + caller]


def test_a_directed_call_can_be_cancelled() -> None:
    """As any other."""
    d, caller, (m0, _) = started()
    d.call(caller, b"1", member="m0", lane=b"c")
    (sent,) = d.cancel(caller, b"1")
    assert (sent.to, sent.message) == (b"c" + m0, Cancel(b"1", 1))
    assert d.fail(m0, b"1") == []
    assert d.quiet()


# ---- leaving ----------------------------------------------------------------------------------------------------


def test_a_caller_that_leaves_gives_up_its_calls() -> None:
    """Running ones are cancelled, waiting ones forgotten, and no answer is sent to nobody."""
    d, caller, (m0,) = started(1, credits=1)
    d.call(caller, b"1")
    d.call(caller, b"2")
    sent = d.goodbye(caller)
    assert [(s.to, s.message) for s in sent] == [(b"c" + m0, Cancel(b"1", 1))]
    assert d.fail(m0, b"1") == []
    assert d.quiet()
    assert d.core.roster.callers.keys() == {m0}


def test_an_undeliverable_call_was_not_taken_on() -> None:
    """The member is gone: the call's caller hears `Refused`, which may always be sent again, since nobody has begun it;
    the callers of what the member had before hear `MemberLost` (pitfall I7)."""
    d, caller, (_m0, m1) = started()
    d.goodbye(m1)
    d.call(caller, b"0")
    (sent,) = d.call(caller, b"1")
    (refused,) = d.unsendable(sent.to, sent.frames)
    (lost,) = d.tick(1.0)
    assert (refused.to, refused.message.call, type(refused.error)) == (b"d" + caller, b"1", Refused)
    assert (lost.to, lost.message.call, type(lost.error)) == (b"d" + caller, b"0", MemberLost)
    assert counters(d) == {"unsendable": 1}
    assert d.quiet()


def test_an_undeliverable_call_to_a_named_member_was_not_taken_on_either() -> None:
    """Nor is it answered where its caller has given it up."""
    d, caller, _ = started()
    (sent,) = d.call(caller, b"1", member="m0")
    (refused,) = d.unsendable(sent.to, sent.frames)
    assert isinstance(refused.error, Refused)
    (sent,) = d.call(caller, b"2", member="m1")
    d.cancel(caller, b"2")
    assert d.unsendable(sent.to, sent.frames) == []
    assert d.quiet()


def test_an_undeliverable_answer_means_the_caller_is_gone() -> None:
    """What else it had running is cancelled."""
    d, caller, (m0, m1) = started()
    d.call(caller, b"1")
    d.call(caller, b"2")
    d.reply(m0, b"1")
    (sent,) = d.unsendable(b"d" + caller)
    assert (sent.to, sent.message) == (b"c" + m1, Cancel(b"2", 1))
    d.fail(m1, b"2")
    assert d.quiet()


def test_a_member_that_is_also_a_caller_leaves_as_both() -> None:
    """A worker's own engine calls are cancelled with it, and its rows are lost."""
    d, caller, (m0, _) = started()
    worker = d.join("w0", pool="worker")
    d.call(caller, b"row", pool="worker")
    d.call(worker, b"generate")
    sent = d.goodbye(worker)
    assert [(s.to, type(s.message)) for s in sent] == [(b"c" + m0, Cancel), (b"d" + caller, Failure)]


def test_the_launcher_says_who_exited() -> None:
    """The reason reaches the callers."""
    d, caller, _ = started()
    launcher = d.launcher()
    d.call(caller, b"1")
    (sent,) = d.say(b"c" + launcher, Exited("engine", "m0", 1, "killed by SIGKILL"))
    assert isinstance(sent.error, MemberLost)
    assert "killed by SIGKILL" in str(sent.error)


@pytest.mark.parametrize("message", [Exited("engine", "m0", 1, "a lie"), Health("engine", "m0", 1, True)])
def test_nobody_else_says_who_exited_or_is_slow(message: Any) -> None:
    """Without the join secret it is refused."""
    d, caller, _ = started()
    (sent,) = d.say(b"c" + caller, message)
    assert isinstance(sent.error, ProtocolError)
    assert f"only the launcher may say {type(message).__name__}" in str(sent.error)
    assert d.member("m0").takes_calls


def test_an_exit_of_a_former_life_changes_nothing() -> None:
    """The epoch says which life ended."""
    d, _, _ = started(1)
    d.join("m0", epoch=2)
    launcher = d.launcher()
    assert d.exited(launcher, "m0", 1) == d.exited(launcher, "m9", 1) == []
    assert d.member("m0").takes_calls
    d.exited(launcher, "m0", 2)
    assert not d.member("m0").takes_calls


def test_a_member_can_drain_itself() -> None:
    """Nothing new for it from then on."""
    d, caller, (m0, _) = started()
    d.say(b"c" + m0, Drain())
    assert [served_by(d.call(caller, b"%d" % i)) for i in range(2)] == ["m1", "m1"]


# ---- the broker's own methods -----------------------------------------------------------------------------------


def test_status_is_exact() -> None:
    """States, counts and facts of every member, the gone ones included."""
    d, caller, (m0, _m1) = started(2, credits=1)
    gone = d.join("m2", facts={"pid": 5, "version": 0}, epoch=4)
    d.goodbye(gone)
    for i in range(3):
        d.call(caller, b"%d" % i, f"s{i}")
    d.reply(m0, b"0")
    d.raw(b"d" + m0, [b"rubbish"])
    status = d.broker(caller, "status")
    assert status["pending"] == 0
    assert status["sessions"] == 3
    assert status["callers"] == 3
    assert status["incarnation"] == 1
    assert status["recovering"] is False
    assert status["counters"] == {**dict.fromkeys(COUNTERS, 0), "malformed": 1}
    shared = {"waiting": 0, "suspects": 0, "epoch": 1, "version": 0, "lacks": [], "restarts": 0, "pid": None}
    assert status["pools"]["engine"] == {
        "m0": {"state": "ready", "in_flight": 1, "credits": 1, "total": 2, **shared},
        "m1": {"state": "ready", "in_flight": 1, "credits": 1, "total": 1, **shared},
        "m2": {
            "state": "dead",
            "in_flight": 0,
            "waiting": 0,
            "suspects": 0,
            "credits": 8,
            "total": 0,
            "epoch": 4,
            "version": 0,
            "lacks": [],
            "restarts": 3,
            "pid": None,
        },
    }


def test_an_unknown_method_of_the_broker_is_named() -> None:
    """With the known ones."""
    d, caller, _ = started()
    with pytest.raises(UnknownMethod, match=r"no method 'explode', only \['close_gate', 'drain'"):
        d.broker(caller, "explode")


@pytest.mark.parametrize("argument", [None, "m0", ["engine"], ["engine", "nobody"], ["worker", "m0"], [1, 2], [[], {}]])
def test_draining_what_is_not_there_is_refused(argument: Any) -> None:
    """`InvalidRequest`, and nothing changes."""
    d, caller, _ = started()
    for method in ("drain", "remove"):
        with pytest.raises(InvalidRequest, match="no live member"):
            d.broker(caller, method, argument)
    assert d.member("m0").takes_calls


def test_facts_that_cannot_be_told_do_not_end_the_broker() -> None:
    """A member's strange facts fail the status call, not the process."""
    d, caller, _ = started(1)
    hello = encode_header(Hello("engine", "odd", 1, 1, SECRET, __version__))
    facts = b"\x81\xa7version\xd6\xff\x00\x00\x00\x00"  # a msgpack timestamp, which decodes to no value of ours
    d.raw(b"do", [hello, facts])
    d.raw(b"co", [hello, facts])
    sent = d.say(b"c" + caller, Call(caller + b"own", 1, BROKER, "status"))
    assert [type(s.message) for s in sent] in ([Failure], [Reply])


# ---- malformed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"\xc1"], [b"\x90"], [b"\x92\x01\x63"], [b"\xc0"], [encode_header(Welcome(1)), *encode_body({})]],
    ids=["no frame", "empty frame", "no msgpack", "empty list", "unknown kind", "no list", "a kind for peers"],
)
def test_what_is_no_message_is_counted_and_dropped(frames: list[bytes]) -> None:
    """The broker goes on as before."""
    d, caller, (_m0, _) = started()
    assert d.raw(b"d" + caller, frames) == []
    assert counters(d) == {"malformed": 1}
    assert served_by(d.call(caller, b"1")) == "m0"
