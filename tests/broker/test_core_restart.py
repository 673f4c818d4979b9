"""A broker in the place of one that died: who is waited for, and what becomes of calls that were under way."""

from __future__ import annotations

from typing import Any

import pytest

from support.broker_driver import Driver, driver, given, served_by
from zagent.broker.pool import State
from zagent.broker.presence import CLAIM_S, RECOVER_S
from zagent.broker.pulse import PULSE_S
from zagent.errors import DeadlineExceeded, MemberLost, Overloaded, PoolLost, to_wire
from zagent.wire.messages import Abandoned, Call, Cancel, Failure, Passed, Reply


def restarted(*names: str, calls: int = 0, credits: int = 8, **core: Any) -> tuple[Driver, bytes, bytes]:
    """A second broker, which expects ``names``; a caller that is back with its calls (b"0", …; none sent yet), and the
    launcher."""
    d = driver(**core)
    for name in names:
        d.join(name, credits)
    caller = d.caller()
    for i in range(calls):
        d.call(caller, b"%d" % i)
    d.now = 100.0
    d.restart(*[("engine", name, 1) for name in names])
    d.caller()
    launcher = d.launcher()
    d.take()
    return d, caller, launcher


def test_nothing_is_routed_until_all_expected_are_back() -> None:
    """Then in order of arrival; who is back early waits, too, and may be told to leave."""
    d, caller, _ = restarted("m0", "m1", "m2")
    d.join("m0")
    d.join("m1")
    for i in range(3):
        assert d.call(caller, b"%d" % i) == []
    assert d.member("m0").state is State.JOINING
    status = d.broker(caller, "status")
    assert (status["recovering"], status["pending"], status["incarnation"]) == (True, 3, 2)
    d.broker(caller, "drain", ["engine", "m1"])
    d.take()
    d.join("m2")
    assert given(d.take()) == [(b"0", "m0"), (b"1", "m2"), (b"2", "m0")]
    assert not d.core.restless


def test_nobody_is_waited_for_longer_than_it_takes_to_reconnect() -> None:
    """Those who are back serve."""
    d, caller, _ = restarted("m0", "m1")
    d.join("m0")
    d.call(caller, b"0")
    assert d.tick(RECOVER_S * 0.9) == []
    assert given(d.tick(RECOVER_S * 0.1)) == [(b"0", "m0")]
    d.join("m1")
    assert served_by(d.call(caller, b"1")) == "m1"


def test_who_has_exited_is_not_waited_for() -> None:
    """The launcher says so."""
    d, caller, launcher = restarted("m0", "m1")
    d.join("m0")
    d.call(caller, b"0")
    assert given(d.exited(launcher, "m1")) == [(b"0", "m0")]


def test_a_broker_that_expects_nobody_does_not_wait() -> None:
    """The first one, or one that found no member alive."""
    d, caller, _ = restarted()
    d.join("m0")
    assert served_by(d.call(caller, b"0")) == "m0"


def test_waiting_for_members_counts_as_waiting() -> None:
    """Deadlines, cancels, the queue's bound and the end of a pool hold."""
    d, caller, launcher = restarted("m0", max_pending=3)
    d.call(caller, b"0", remaining_ms=500)
    d.call(caller, b"1")
    d.call(caller, b"2", member="m0", lane=b"c")
    (full,) = d.call(caller, b"3")
    assert isinstance(full.error, Overloaded)
    (expired,) = d.tick(1.0)
    assert isinstance(expired.error, DeadlineExceeded)
    d.cancel(caller, b"2")
    (lost,) = d.say(b"c" + launcher, Abandoned("engine"), to_wire(PoolLost("all gone")))
    assert (lost.message.call, type(lost.error)) == (b"1", PoolLost)
    assert d.quiet()


def test_a_call_directed_to_somebody_who_is_not_back_waits_too() -> None:
    """It reaches those who are back at once, and is lost only if its member stays away."""
    d, caller, _ = restarted("m0", "m1", "m2")
    d.join("m0")
    assert served_by(d.call(caller, b"0", member="m0")) == "m0"
    assert d.call(caller, b"1", member="m1", lane=b"c") == d.call(caller, b"2", member="m2", lane=b"c") == []
    m1 = d.join("m1")
    made = d.tick(RECOVER_S)
    assert given(made) == [(b"1", "m1")]
    (lost,) = [s for s in made if isinstance(s.message, Failure)]
    assert (lost.to, lost.message.call, type(lost.error)) == (b"c" + caller, b"2", MemberLost)
    assert [s.to for s in d.reply(m1, b"1")] == [b"c" + caller]


# ---- calls that members hold ------------------------------------------------------------------------------------


def test_a_running_call_is_attached_when_its_caller_is_back() -> None:
    """It counts from its member's hello on, past credits; the message goes to its member, in case the answer was lost;
    the answer goes to the caller, once."""
    d, caller, _ = restarted("m0", "m1", calls=2)
    m0 = d.join("m0", credits=1, held=[(b"0", "s", True), (b"1", "", True)])
    assert d.in_flight() == {"m0": 2}
    (attached,) = d.call(caller, b"0", "s", incarnation=1)
    assert (attached.to, type(attached.message), attached.message.call) == (b"d" + m0, Call, b"0")
    assert d.in_flight() == {"m0": 2}
    assert d.core.counters["claimed"] == 1
    (answer,) = d.reply(m0, b"0")
    assert (answer.to, answer.message) == (b"d" + caller, Reply(b"0", 1))
    assert d.reply(m0, b"0") == []
    assert d.in_flight() == {"m0": 1}


def test_a_caller_that_is_back_before_its_member_is_attached_by_the_members_hello() -> None:
    """Its call does not wait for the others, nor go to them."""
    d, caller, _ = restarted("m0", "m1", calls=2)
    assert d.call(caller, b"0", remaining_ms=5000, incarnation=1) == d.call(caller, b"1", incarnation=1) == []
    d.now += 1.0
    d.take()
    m0 = d.join("m0", held=[(b"0", "", True), (b"1", "", False)])
    assert given(d.take()) == [(b"0", "m0"), (b"1", "m0")]
    assert d.core.dispatch.pending == 0
    assert d.in_flight() == {"m0": 2}
    d.reply(m0, b"0")
    d.reply(m0, b"1")
    d.join("m1")
    assert d.quiet()


def test_the_time_that_is_left_is_told_when_a_call_is_attached() -> None:
    """What it has waited is taken off."""
    d, caller, _ = restarted("m0", calls=1)
    d.call(caller, b"0", remaining_ms=5000)
    d.now += 1.0
    d.take()
    d.join("m0", held=[(b"0", "", True)])
    (attached,) = [s.message for s in d.take() if isinstance(s.message, Call)]
    assert attached.remaining_ms == 4000


def test_an_answer_that_came_before_the_caller_is_sent_again() -> None:
    """The broker keeps no payloads: the member is asked when the caller is back, though it is full."""
    d, caller, _ = restarted("m0", calls=3)
    m0 = d.join("m0", credits=1, held=[(b"0", "", True), (b"1", "", False)])
    assert d.reply(m0, b"0") == []
    assert d.in_flight() == {"m0": 0}
    assert served_by(d.call(caller, b"2")) == "m0"
    assert [served_by(d.call(caller, call)) for call in (b"0", b"1")] == ["m0", "m0"]
    assert [s.to for call in (b"0", b"1", b"2") for s in d.reply(m0, call)] == [b"d" + caller] * 3
    assert d.quiet()


def test_sessions_of_held_calls_return_to_their_members() -> None:
    """Of running and of finished ones."""
    d, caller, _ = restarted("m0", "m1", calls=2)
    d.join("m0")
    m1 = d.join("m1", held=[(b"0", "running", True), (b"1", "finished", False)])
    assert served_by(d.call(caller, b"a", "finished")) == "m1"
    assert served_by(d.call(caller, b"b", "running")) == "m1"
    d.reply(m1, b"0")
    for i in range(3):
        d.call(caller, b"%d" % i)
    d.reply(m1, b"b")
    assert served_by(d.call(caller, b"c", "running")) == "m1"


def test_calls_that_nobody_comes_back_for_are_stopped() -> None:
    """After `CLAIM_S`; the lease is kept until the member has stopped, and nobody is answered."""
    d, caller, _ = restarted("m0", calls=2)
    m0 = d.join("m0", held=[(b"0", "", True), (b"1", "", False)])
    assert d.core.restless
    assert d.tick(CLAIM_S * 0.9) == []
    (cancel,) = d.tick(CLAIM_S * 0.1)
    assert (cancel.to, cancel.message) == (b"c" + m0, Cancel(b"0", 1))
    assert not d.core.restless
    assert d.in_flight() == {"m0": 1}
    assert d.fail(m0, b"0") == []
    assert d.quiet()
    assert served_by(d.call(caller, b"1", incarnation=1)) == "m0", "as any other"


def test_answers_are_kept_for_those_who_come_back() -> None:
    """A member is told to drop nothing while it has any that may be asked for: those have lower numbers than what it
    answers now."""
    d, caller, _ = restarted("m0", "m1", calls=3)
    m0, m1 = d.join("m0", held=[(b"0", "", False), (b"1", "", True)]), d.join("m1")
    d.call(caller, b"2", member="m0")
    d.reply(m0, b"2", number=7)

    def told(pulses: int = 3) -> list[tuple[bytes, Passed]]:
        d.take()
        for _ in range(pulses):
            d.tick(PULSE_S)
        return [(s.to, s.message) for s in d.take() if isinstance(s.message, Passed)]

    for call in (b"0", b"1"):
        assert told() == []
        d.call(caller, call)
    assert told(1) == []
    assert told(1) == [(b"d" + m0, Passed(7))]
    assert told() == []
    d.reply(m1, b"1", number=1)  # of an attempt that is over, but sent
    d.reply(m0, b"0", number=8)
    assert sorted(told()) == [(b"d" + m0, Passed(8)), (b"d" + m1, Passed(1))]


def test_an_answer_counts_as_passed_on_from_the_second_pulse() -> None:
    """At the first it may still lie in the broker's own queues, and die with it."""
    d = driver()
    caller, m0 = d.caller(), d.join("m0")
    told = []
    for number in range(1, 5):
        d.call(caller, b"%d" % number)
        d.reply(m0, b"%d" % number, number=number)
        d.take()
        d.tick(PULSE_S)
        told.append([s.message for s in d.take() if isinstance(s.message, Passed)])
    assert told == [[], [Passed(1)], [Passed(2)], [Passed(3)]]


@pytest.mark.parametrize("came_for", [False, True])
def test_what_a_forgotten_member_came_with_can_still_be_claimed(came_for: bool) -> None:
    """The broker found it out of reach for a moment: that is no reason to run its calls again. One that a caller had
    come for before is: that caller has been told to try again."""
    d, caller, _ = restarted("m0", "m1", calls=1)
    m0 = d.join("m0", held=[(b"0", "", False)])
    d.join("m1")
    if came_for:
        d.call(caller, b"0", incarnation=1)
    d.unsendable(b"c" + m0)
    d.take()
    d.join("m0", held=[(b"0", "", False)])
    lost = [type(s.error) for s in d.take() if isinstance(s.message, Failure)]
    assert (lost, len(d.core.dispatch.held)) == (([MemberLost], 0) if came_for else ([], 1))
    if not came_for:
        assert served_by(d.call(caller, b"0", incarnation=1)) == "m0"


def test_a_held_call_that_its_caller_has_gone_on_from_is_stopped() -> None:
    """A further attempt of it is under way: nobody comes back for this one."""
    d, caller, _ = restarted("m0", "m1", calls=1)
    d.join("m0")
    d.tick(RECOVER_S)
    assert served_by(d.call(caller, b"0", attempt=2)) == "m0"
    d.attempts[b"0"] = 1
    d.take()
    m1 = d.join("m1", held=[(b"0", "", True)])
    assert [(s.to, s.message) for s in d.take()][1:] == [(b"c" + m1, Cancel(b"0", 1))]
    assert d.in_flight() == {"m0": 1, "m1": 1}
    d.fail(m1, b"0")
    assert d.in_flight() == {"m0": 1, "m1": 0}


def hold(d: Driver, name: str, attempt: int, *, running: bool = True) -> bytes:
    """A member comes with that attempt of call 0."""
    d.attempts[b"0"] = attempt
    return d.join(name, held=[(b"0", "", running)])


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("later", [2, 5])
@pytest.mark.parametrize("first", ["older", "newer"])
def test_of_two_attempts_that_members_come_with_the_older_is_stopped(first: str, later: int, running: bool) -> None:
    """Whoever comes first, and however many attempts there were in between; also if the newer has been answered."""
    d, caller, _ = restarted("m0", "m1", calls=1)
    cancels = []
    for attempt in (1, later) if first == "older" else (later, 1):
        hold(d, "m0" if attempt == 1 else "m1", attempt, running=running or attempt == 1)
        cancels += [s.message for s in d.take() if type(s.message) is Cancel]
    assert cancels == [Cancel(b"0", 1)]
    assert [s.message[:2] for s in d.call(caller, b"0", attempt=later, incarnation=1)] == [(b"0", later)]


@pytest.mark.parametrize("later", [2, 5])
def test_an_older_attempt_is_stopped_when_its_caller_comes_with_a_newer_one(later: int) -> None:
    """Which waits: nobody has room, as the broker still waits for another member."""
    d, caller, _ = restarted("m0", "m1", calls=1)
    m0 = hold(d, "m0", 1)
    d.take()
    (cancel,) = d.call(caller, b"0", attempt=later, incarnation=1)
    assert (cancel.to, cancel.message) == (b"c" + m0, Cancel(b"0", 1))
    assert d.core.dispatch.pending == 1


def test_a_newer_attempt_that_waits_stops_the_older_of_a_late_member() -> None:
    """It is told so with its hello."""
    d, caller, _ = restarted("m0", "m1", calls=1)
    d.call(caller, b"0", attempt=3, incarnation=1)
    m0 = hold(d, "m0", 1)
    assert [(s.to, s.message) for s in d.take()][1:] == [(b"c" + m0, Cancel(b"0", 1))]
    assert d.core.dispatch.pending == 1


def test_who_comes_back_too_late_is_answered_all_the_same() -> None:
    """With what the member says of the call that it has just been told to stop."""
    d, caller, _ = restarted("m0", calls=1)
    m0 = d.join("m0", held=[(b"0", "", True)])
    d.tick(CLAIM_S)
    assert d.call(caller, b"0", incarnation=1) == []
    assert [s.to for s in d.fail(m0, b"0")] == [b"d" + caller]
    assert d.quiet()


def test_a_caller_may_give_up_what_it_has_not_asked_for_yet() -> None:
    """Its cancel reaches the member at once; nobody else's does."""
    d, caller, _ = restarted("m0", calls=1)
    m0 = d.join("m0", held=[(b"0", "", True)])
    assert d.cancel(d.caller("other"), b"0") == []
    (cancel,) = d.cancel(caller, b"0")
    assert (cancel.to, cancel.message) == (b"c" + m0, Cancel(b"0", 1))
    d.fail(m0, b"0")
    assert d.quiet()


def test_a_member_that_is_late_finds_its_call_given_to_another() -> None:
    """It is told to stop its own, whose answer is late."""
    d, caller, _ = restarted("m0", "m1", calls=1)
    m0 = d.join("m0")
    d.call(caller, b"0", incarnation=1)
    assert given(d.tick(RECOVER_S)) == [(b"0", "m0")]
    d.take()
    m1 = d.join("m1", held=[(b"0", "", True)])
    assert [(s.to, s.message) for s in d.take()][1:] == [(b"c" + m1, Cancel(b"0", 1))]
    assert d.in_flight() == {"m0": 1, "m1": 0}
    assert d.reply(m1, b"0") == []
    assert [s.to for s in d.reply(m0, b"0")] == [b"d" + caller]
    assert d.quiet()


@pytest.mark.parametrize("running", [True, False])
def test_a_held_call_whose_member_dies_first_is_run_anew(running: bool) -> None:
    """By anybody, for its caller was not told that it was lost."""
    d, caller, launcher = restarted("m0", "m1", calls=1)
    d.join("m0", held=[(b"0", "", running)])
    d.join("m1")
    assert d.exited(launcher, "m0", crashed=True) == []
    assert served_by(d.call(caller, b"0", incarnation=1)) == "m1"
    assert d.in_flight() == {"m0": 0, "m1": 1}


def test_a_suspect_that_is_attached_is_one_again() -> None:
    """Its member takes no other, and it is to blame."""
    d, caller, launcher = restarted("m0", calls=2)
    d.join("m0", held=[(b"0", "", True), (b"1", "", True)])
    d.call(caller, b"0", suspect=True)
    d.call(caller, b"1")
    assert d.call(caller, b"2", suspect=True) == []
    failures = d.exited(launcher, "m0", crashed=True)
    assert {s.message.call: type(s.error) for s in failures} == {b"0": MemberLost, b"1": MemberLost}  # in company
    d.cancel(caller, b"2")
    assert d.quiet()


def test_a_member_that_this_broker_had_forgotten_stops_what_it_has() -> None:
    """Its callers were told that the calls are lost: they are cancelled at once, and count until they have stopped."""
    d = driver()
    m0, caller = d.join("m0"), d.caller()
    d.call(caller, b"0")
    d.call(caller, b"1")
    d.unsendable(b"c" + m0)
    d.tick(1.0)
    d.take()
    d.join("m0", held=[(b"0", "", True), (b"1", "", False)])
    assert [(s.to, s.message) for s in d.take()][1:] == [(b"c" + m0, Cancel(b"0", 1))]
    assert d.in_flight() == {"m0": 1}
    assert served_by(d.call(caller, b"0", attempt=2)) == "m0"
    assert d.in_flight() == {"m0": 2}
    assert d.say(b"d" + m0, Failure(d.id(b"0"), 1), to_wire(MemberLost("stopped"))) == []
    assert d.in_flight() == {"m0": 1}


def test_a_call_that_was_stopped_before_its_caller_came_can_be_given_up() -> None:
    """The caller that comes for it too late hears how it ended, unless it wants to hear no more."""
    d = driver()
    caller, m0 = d.caller(), d.join("m0")
    d.call(caller, b"0")
    d.restart(("engine", "m0", 1))
    d.tick(CLAIM_S + 1)
    d.launcher()
    m0 = d.join("m0", held=[(b"0", "", True)])
    assert d.core.dispatch.leases[d.key(b"0")].cancelled
    caller = d.caller()
    d.call(caller, b"0", incarnation=0)
    d.cancel(caller, b"0")
    assert d.fail(m0, b"0") == []
    assert d.quiet()


def test_a_call_that_waits_for_a_forgotten_member_is_found_there() -> None:
    """Its caller came back while the member was away, so that it was not told anything."""
    d, caller, _ = restarted("m0", calls=1)
    m0 = d.join("m0", held=[(b"0", "", True)])
    d.unsendable(b"d" + m0)
    d.tick(1.0)
    assert d.call(caller, b"0", incarnation=1) == []
    d.take()
    d.join("m0", held=[(b"0", "", True)])
    assert given(d.take()) == [(b"0", "m0")]
    assert [s.to for s in d.reply(m0, b"0")] == [b"d" + caller]
    assert d.quiet()
    assert not d.core.dispatch.held


# ---- calls that must not run twice ------------------------------------------------------------------------------


@pytest.mark.parametrize("incarnation", [0, 1])
@pytest.mark.parametrize("member", ["", "m0"])
def test_a_call_that_may_have_begun_before_is_not_begun_again(incarnation: int, member: str) -> None:
    """Where its method must not run twice and no member has it: its caller is told so, and may not repeat it."""
    d, caller, _ = restarted()
    d.join("m0", facts={"idempotent": []})
    (lost,) = d.call(caller, b"0", incarnation=incarnation, member=member)
    assert isinstance(lost.error, MemberLost)
    assert lost.error.repeatable is False
    assert "must not be run twice" in str(lost.error)
    assert d.quiet()
    assert served_by(d.call(caller, b"1", member=member)) == "m0", "a fresh one is begun"


def test_that_is_decided_when_a_member_is_found() -> None:
    """A call that waits is known to its member until then."""
    d, caller, _ = restarted("m0", "m1", calls=2)
    for i in range(2):
        assert d.call(caller, b"%d" % i, incarnation=1) == []
    facts = {"idempotent": []}
    m0 = d.join("m0", held=[(b"0", "", True)], facts=facts)
    d.take()
    d.join("m1", facts=facts)
    failures = [s for s in d.take() if isinstance(s.message, Failure)]
    assert [(s.message.call, s.error.repeatable) for s in failures] == [(b"1", False)]
    d.reply(m0, b"0")
    assert d.quiet()


def test_a_finished_call_that_must_not_run_twice_is_fetched() -> None:
    """From the member that keeps its answer, and ends as such where that is gone."""
    d, caller, launcher = restarted("m0", "m1", calls=2)
    facts = {"idempotent": []}
    d.join("m0", held=[(b"0", "", False), (b"1", "", False)], facts=facts)
    d.join("m1", facts=facts)
    assert served_by(d.call(caller, b"0", incarnation=1)) == "m0"
    d.exited(launcher, "m0")
    (lost,) = d.call(caller, b"1", incarnation=1)
    assert lost.error.repeatable is False
