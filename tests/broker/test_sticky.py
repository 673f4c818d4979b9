"""Which member a session's calls go to, and what is remembered."""

from __future__ import annotations

from zagent.broker.pool import Member, State
from zagent.broker.sticky import Sessions


def member(name: str = "m") -> Member:
    made = Member("engine", name, 1, 8, b"", b"")
    made.state = State.READY
    return made


def once(sessions: Sessions, key: str, at: Member, *, accepted: bool = True) -> None:
    sessions.hold(key, at)
    sessions.release(key, at, accepted=accepted)


def test_a_session_stays_with_the_member_that_accepted_it() -> None:
    """Bound for good once a call was accepted."""
    sessions, m = Sessions(10), member()
    once(sessions, "s", m)
    assert sessions.member("s") is m


def test_a_refused_first_call_binds_nothing() -> None:
    """Affinity only to a member that accepted the request (pitfall A7)."""
    sessions, m = Sessions(10), member()
    once(sessions, "s", m, accepted=False)
    assert sessions.member("s") is None
    assert len(sessions) == 0


def test_a_later_refusal_does_not_unbind() -> None:
    """What was bound stays bound."""
    sessions, m = Sessions(10), member()
    once(sessions, "s", m)
    once(sessions, "s", m, accepted=False)
    assert sessions.member("s") is m


def test_concurrent_calls_of_a_new_session_meet() -> None:
    """It is tentatively bound while its first call is on the way."""
    sessions, m = Sessions(10), member()
    sessions.hold("s", m)
    assert sessions.member("s") is m


def test_the_least_recently_used_idle_session_is_evicted() -> None:
    """Using a session keeps it."""
    sessions, m = Sessions(2), member()
    once(sessions, "a", m)
    once(sessions, "b", m)
    once(sessions, "a", m)
    once(sessions, "c", m)
    assert [sessions.known(key) for key in "abc"] == [True, False, True]


def test_sessions_in_flight_are_never_evicted() -> None:
    """Though many more than the cache holds are idle after it."""
    sessions, m = Sessions(2), member()
    for key in ("x", "y", "z"):
        sessions.hold(key, m)
    for i in range(100):
        once(sessions, f"s{i}", m)
    assert all(sessions.member(key) is m for key in ("x", "y", "z"))
    assert len(sessions) == 5


def test_a_member_that_takes_no_calls_is_no_ones_member() -> None:
    """Draining or dead: the session is known, and goes elsewhere."""
    sessions, m = Sessions(10), member()
    once(sessions, "s", m)
    m.become(State.DRAINING)
    assert sessions.member("s") is None
    assert sessions.known("s")


def test_a_late_release_of_the_former_member_does_not_bind() -> None:
    """A session that moved belongs to the new member once that has accepted."""
    sessions, old, new = Sessions(10), member("old"), member("new")
    sessions.hold("s", old)
    old.become(State.DRAINING)
    sessions.hold("s", new)
    sessions.release("s", old, accepted=True)
    sessions.release("s", new, accepted=False)
    assert not sessions.known("s")


def test_an_ended_session_is_forgotten() -> None:
    """At once when idle, with its last call when in flight, not at all when it goes on."""
    sessions, m = Sessions(10), member()
    once(sessions, "idle", m)
    sessions.end("idle")
    sessions.hold("busy", m)
    sessions.end("busy")
    assert sessions.member("busy") is m
    sessions.release("busy", m, accepted=True)
    sessions.hold("again", m)
    sessions.end("again")
    sessions.hold("again", m)
    sessions.release("again", m, accepted=True)
    sessions.release("again", m, accepted=True)
    assert [sessions.known(key) for key in ("idle", "busy", "again")] == [False, False, True]


def test_ending_an_unknown_session_does_nothing() -> None:
    """No error: the cache may have evicted it."""
    sessions = Sessions(10)
    sessions.end("nobody")
    assert len(sessions) == 0
