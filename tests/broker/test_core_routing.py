"""Who gets a call, and who waits."""

from __future__ import annotations

from collections import Counter

import pytest

from support.broker_driver import Driver, driver, name_of, nonce_of, served_by
from zagent.errors import CallerError, DeadlineExceeded, MemberLost, Overloaded
from zagent.wire.messages import Call, Cancel, Failure, HelloWanted


def started(members: int = 4, credits: int = 1000, **core: object) -> tuple[Driver, bytes, list[bytes]]:
    made = driver(**core)
    nonces = [made.join(f"m{i}", credits) for i in range(members)]
    caller = made.caller()
    made.take()
    return made, caller, nonces


@pytest.mark.parametrize(("calls", "each"), [(200, 50), (1000, 250)])
def test_sequential_new_sessions_are_spread_evenly(calls: int, each: int) -> None:
    """Distinct sessions one after another on four members: an even share each (pitfalls A4, K14)."""
    d, caller, _ = started()
    got: Counter[str] = Counter()
    for i in range(calls):
        name = served_by(d.call(caller, b"%d" % i, f"s{i}"))
        got[name] += 1
        d.reply(nonce_of(name, 1), b"%d" % i)
    assert all(abs(count - each) <= 1 for count in got.values())
    assert d.quiet()


def test_after_all_replies_every_count_is_zero_and_new_sessions_go_to_the_idle() -> None:
    """With three unfinished at one member and none at the other, the next three go to the other (pitfall A1)."""
    d, caller, (m0, m1) = started(2)
    placed = {b"%d" % i: served_by(d.call(caller, b"%d" % i, f"s{i}")) for i in range(6)}
    for call, name in placed.items():
        if name == "m1":
            d.reply(m1, call)
    assert d.in_flight() == {"m0": 3, "m1": 0}
    assert [served_by(d.call(caller, b"n%d" % i, f"n{i}")) for i in range(3)] == ["m1"] * 3
    for call, name in placed.items():
        if name == "m0":
            d.reply(m0, call)
    for i in range(3):
        d.reply(m1, b"n%d" % i)
    assert d.in_flight() == {"m0": 0, "m1": 0}


@pytest.mark.parametrize("order", ["01010101", "00001111", "01100110"])
def test_callers_share_one_balance(order: str) -> None:
    """Two workers with four sessions each on two members: 4/4 for any interleaving (pitfall A2)."""
    d, _, _ = started(2)
    callers = [d.caller("w0"), d.caller("w1")]
    for i, who in enumerate(order):
        d.call(callers[int(who)], b"%d" % i, f"s{i}")
    assert d.in_flight() == {"m0": 4, "m1": 4}


def test_a_session_returns_to_its_member_however_busy_that_is() -> None:
    """Sticky before least in flight."""
    d, caller, (m0, _) = started(2)
    assert served_by(d.call(caller, b"1", "s")) == "m0"
    d.reply(m0, b"1")
    d.call(caller, b"2", "s")
    assert served_by(d.call(caller, b"3", "s")) == "m0"
    assert [a.why for a in d.assignments] == ["new", "sticky", "sticky"]


def test_a_session_moves_when_its_member_is_gone() -> None:
    """The next call goes to a live member, and stays there (pitfall A7)."""
    d, caller, (m0, m1) = started(2)
    d.call(caller, b"1", "s")
    d.reply(m0, b"1")
    d.goodbye(m0)
    assert served_by(d.call(caller, b"2", "s")) == "m1"
    d.reply(m1, b"2")
    d.join("m0", epoch=2)
    assert served_by(d.call(caller, b"3", "s")) == "m1"
    assert [a.why for a in d.assignments] == ["new", "rebound", "sticky"]


def test_a_session_is_bound_only_once_a_member_accepted() -> None:
    """A refusal leaves the session free, an error of its own does not (pitfall A7)."""
    d, caller, (m0, m1) = started(2)
    assert served_by(d.call(caller, b"1", "s")) == "m0"
    d.fail(m0, b"1", accepted=False)
    assert served_by(d.call(caller, b"2", "s")) == "m1"
    d.fail(m1, b"2", ValueError("its own"), accepted=True)
    assert served_by(d.call(caller, b"3", "s")) == "m1"


def test_sessions_in_flight_outlive_the_cache() -> None:
    """However small the cache, a session with a call in flight keeps its member."""
    d, caller, _ = started(4, sticky_cache_size=1)
    busy = served_by(d.call(caller, b"busy", "busy"))
    for i in range(20):
        name = served_by(d.call(caller, b"%d" % i, f"s{i}"))
        d.reply(nonce_of(name, 1), b"%d" % i)
    assert served_by(d.call(caller, b"again", "busy")) == busy
    assert d.broker(caller, "status")["sessions"] == 2


def test_end_session_forgets_the_binding() -> None:
    """The session counts as new afterwards."""
    d, caller, (m0, _) = started(2)
    d.call(caller, b"1", "s")
    d.reply(m0, b"1")
    d.end_session(caller, "s")
    assert d.broker(caller, "status")["sessions"] == 0
    assert served_by(d.call(caller, b"2", "s")) == "m1"


def test_same_session_name_in_another_pool_is_another_session() -> None:
    """Sessions belong to a pool."""
    d, caller, _ = started(2)
    d.join("w0", pool="worker")
    d.call(caller, b"1", "s")
    assert served_by(d.call(caller, b"2", "s", pool="worker")) == "w0"


def test_credits_are_never_exceeded_and_waiting_calls_are_served_in_order() -> None:
    """Two members of two credits: the fifth and sixth call wait, and go out as room appears."""
    d, caller, (m0, m1) = started(2, credits=2)
    for i in range(6):
        d.call(caller, b"%d" % i)
    assert d.in_flight() == {"m0": 2, "m1": 2}
    assert d.core.dispatch.pending == 2
    d.take()
    d.reply(m1, b"1")
    d.reply(m0, b"0")
    served = [(s.message.call, s.to) for s in d.take() if isinstance(s.message, Call)]
    assert served == [(b"4", b"d" + m1), (b"5", b"d" + m0)]


def test_a_sticky_call_waits_for_its_own_member() -> None:
    """It does not move to an idle member while its own is merely full, and keeps its turn there."""
    d, caller, (m0, _m1) = started(2, credits=1)
    d.call(caller, b"1", "s")
    d.reply(m0, b"1")
    d.call(caller, b"2", "s")
    d.call(caller, b"3", "s")
    assert d.in_flight() == {"m0": 1, "m1": 0}
    assert served_by(d.call(caller, b"4")) == "m1"
    d.call(caller, b"5")  # waits for anybody
    d.take()
    d.reply(m0, b"2")
    assert [s.message.call for s in d.take() if isinstance(s.message, Call)] == [b"3"]
    d.reply(m0, b"3")
    assert [s.message.call for s in d.take() if isinstance(s.message, Call)] == [b"5"]


def test_an_older_call_for_anybody_goes_before_a_younger_sticky_one() -> None:
    """Order of arrival, across both queues of a member that has room again."""
    d, caller, (m0, _) = started(2, credits=1)
    d.call(caller, b"1", "s")
    d.call(caller, b"2")
    d.call(caller, b"anybody")
    d.call(caller, b"sticky", "s")
    d.take()
    d.reply(m0, b"1")
    assert [s.message.call for s in d.take() if isinstance(s.message, Call)] == [b"anybody"]


def test_calls_wait_while_no_member_is_ready() -> None:
    """And go out when the first one joins (pitfall K21)."""
    d = driver()
    caller = d.caller()
    for i in range(3):
        d.call(caller, b"%d" % i)
    assert d.core.dispatch.pending == 3
    d.join("m0", credits=2)
    assert d.in_flight() == {"m0": 2}
    assert d.core.dispatch.pending == 1


def test_a_full_queue_refuses() -> None:
    """`Overloaded`, naming the limit and the key; what waits already keeps its place."""
    d, caller, (m0,) = started(1, credits=1, max_pending=2)
    for i in range(3):
        d.call(caller, b"%d" % i)
    (sent,) = d.call(caller, b"3")
    assert isinstance(sent.error, Overloaded)
    assert "broker.max_pending" in str(sent.error)
    assert (sent.message.call, sent.to) == (b"3", b"d" + caller)
    for i in range(3):
        d.reply(m0, b"%d" % i)
    assert d.quiet()


def test_a_waiting_call_ends_at_its_deadline() -> None:
    """`DeadlineExceeded` from the first tick after it, and the call is forgotten."""
    d, caller, _ = started(0)
    d.call(caller, b"1", remaining_ms=1500)
    d.now = 1.4
    assert d.tick() == []
    d.now = 1.6
    (sent,) = d.tick()
    assert isinstance(sent.error, DeadlineExceeded)
    assert "waited 1.6 s for a member of pool 'engine'" in str(sent.error)
    assert d.quiet()


def test_a_call_that_waited_is_sent_with_what_is_left() -> None:
    """The remaining time shrinks by the wait; nothing else in the message changes."""
    d, caller, _ = started(0)
    d.call(caller, b"1", "s", remaining_ms=1500, body={"x": 1})
    d.now = 0.5
    d.join("m0")
    call = next(s for s in d.take() if isinstance(s.message, Call))
    assert call.message == Call(b"1", 1, "engine", "generate", "s", 1000, "", 1)
    assert call.body == {"x": 1}


def test_a_call_that_did_not_wait_is_forwarded_as_it_came() -> None:
    """The broker does not encode again what it merely relays."""
    d, caller, _ = started(1)
    frames = [
        b"\x98\x01\x01\xc4\x09" + caller + b"1\x01\xa6engine\xa8generate\xa0\xcd\x05\xdc",
        b"not even msgpack \xc1",
    ]
    sent = d.raw(b"d" + caller, frames)
    assert sent[0].frames == frames


def test_each_new_session_goes_to_a_member_with_the_fewest_in_flight() -> None:
    """By the core's own record, with callers that answer at different speeds."""
    d, caller, nonces = started(4)
    by_name = {name_of(nonce): nonce for nonce in nonces}
    held: list[tuple[str, bytes]] = []
    for i in range(400):
        held.append((served_by(d.call(caller, b"%d" % i, f"s{i}")), b"%d" % i))
        slow = [h for h in held if h[0] == "m0"]
        done = (held if i % 3 else slow)[:1] if len(held) > 8 else []
        for name, call in done:
            held.remove((name, call))
            d.reply(by_name[name], call)
    assert len(d.assignments) == 400
    for a in d.assignments:
        assert a.why == "new"
        assert a.in_flight[a.member] == min(a.in_flight.values())


def test_the_record_says_who_why_and_when() -> None:
    """One entry per assignment, with all members' counts before it."""
    d, caller, _ = started(2)
    d.now = 2.5
    d.call(caller, b"1", "s")
    assert d.assignments[0]._asdict() == {
        "now": 2.5, "pool": "engine", "session": "s", "member": "m0", "why": "new", "in_flight": {"m0": 0, "m1": 0},
    }  # fmt: skip


def test_a_draining_member_finishes_and_gets_nothing_new() -> None:
    """Its sessions move, what waited for it moves, and its replies still count."""
    d, caller, (m0, m1) = started(2, credits=1)
    d.call(caller, b"1", "s")
    d.call(caller, b"2", "s")  # waits for m0
    d.broker(caller, "drain", ["engine", "m0"])
    assert d.in_flight() == {"m0": 1, "m1": 1}
    d.reply(m1, b"2")
    assert served_by(d.call(caller, b"3", "s")) == "m1"
    answered = d.reply(m0, b"1")
    assert [s.message.call for s in answered] == [b"1"]
    d.reply(m1, b"3")
    assert d.quiet()
    assert d.broker(caller, "status")["pools"]["engine"]["m0"]["state"] == "draining"


def test_removing_a_busy_member_answers_its_calls() -> None:
    """`MemberLost` to the callers, at once; a new life of the same name is served again (pitfall K16)."""
    d, caller, (m0, _) = started(2)
    d.call(caller, b"1")
    d.take()
    d.broker(caller, "remove", ["engine", "m0"])
    sent = d.take()
    lost = [s for s in sent if isinstance(s.message, Failure)]
    assert [(s.message.call, type(s.error)) for s in lost] == [(b"1", MemberLost)]
    told = [s.message for s in sent if s.to == b"c" + m0]
    assert [type(message) for message in told] == [Cancel, HelloWanted], "it lives, and is told to stop"
    assert told[0].call == b"1"
    assert d.broker(caller, "status")["pools"]["engine"]["m0"]["state"] == "dead"
    d.join("m0", epoch=2)
    assert {served_by(d.call(caller, b"n%d" % i)) for i in range(2)} == {"m0", "m1"}


def test_what_waited_at_a_dead_member_goes_elsewhere_in_order() -> None:
    """Its queue joins the pool's by order of arrival."""
    d, caller, (m0, m1) = started(2, credits=1)
    d.call(caller, b"1", "s")
    d.call(caller, b"2")
    d.call(caller, b"3")
    d.call(caller, b"4", "s")
    d.call(caller, b"5")
    d.goodbye(m0)
    order = []
    for call in (b"2", b"3", b"4", b"5"):
        d.take()
        d.reply(m1, call)
        order += [s.message.call for s in d.take() if isinstance(s.message, Call)]
    assert order == [b"3", b"4", b"5"]


def test_a_call_to_an_unknown_pool_is_refused_with_the_known_ones() -> None:
    """A caller's fault, never retried."""
    d, caller, _ = started(1)
    (sent,) = d.call(caller, b"1", pool="judge")
    assert isinstance(sent.error, CallerError)
    assert "no pool 'judge' here, only ['engine', 'worker']" in str(sent.error)


def test_a_directed_call_passes_balancing_and_credits() -> None:
    """To that member, on its control lane, however full it is, without touching its count."""
    d, caller, (m0, _) = started(2, credits=1)
    d.call(caller, b"1")
    (sent,) = d.call(caller, b"2", member="m0", lane=b"c")
    assert sent.to == b"c" + m0
    assert d.in_flight() == {"m0": 1, "m1": 0}
    (answer,) = d.reply(m0, b"2")
    assert answer.to == b"c" + caller


def test_a_directed_call_reaches_a_draining_member_but_no_dead_one() -> None:
    """`MemberLost` names member and pool."""
    d, caller, (_m0, m1) = started(2)
    d.broker(caller, "drain", ["engine", "m0"])
    assert served_by(d.call(caller, b"1", member="m0")) == "m0"
    d.goodbye(m1)
    for name in ("m1", "nobody"):
        (sent,) = d.call(caller, b"2", member=name)
        assert isinstance(sent.error, MemberLost)
        assert name in str(sent.error)


def test_a_directed_call_is_lost_with_its_member() -> None:
    """Its caller is told."""
    d, caller, (m0,) = started(1)
    d.call(caller, b"1", member="m0", lane=b"c")
    sent = [s for s in d.goodbye(m0) if isinstance(s.message, Failure)]
    assert [(s.to, type(s.error)) for s in sent] == [(b"c" + caller, MemberLost)]
    assert d.quiet()


def test_memory_does_not_grow_with_calls() -> None:
    """20 000 calls with sessions leave as many sessions as the cache holds, and nothing else."""
    d, caller, _ = started(4, sticky_cache_size=100)
    for i in range(20_000):
        name = served_by(d.call(caller, b"%d" % i, f"s{i}"))
        d.reply(nonce_of(name, 1), b"%d" % i)
        d.out.clear()
    assert d.quiet()
    assert len(d.core.dispatch.sessions) == 100
    assert len(d.core.pools["engine"]._heap) <= 2 * 4 + 65
