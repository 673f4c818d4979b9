"""Whose fault it is when a member dies, and how calls that may be at fault are run again."""

from __future__ import annotations

from typing import Any

import pytest

from support.broker_driver import Driver, driver, given, nonce_of, served_by
from zagent.broker.presence import EXPLAIN_S
from zagent.errors import DeadlineExceeded, MemberLost, PoisonedRequest, PoolLost, to_wire
from zagent.wire.messages import Abandoned, Failure


def started(members: int = 2, credits: int = 8, **core: Any) -> tuple[Driver, bytes, bytes, list[bytes]]:
    """The driver, a caller, the launcher, and members."""
    made = driver(**core)
    nonces = [made.join(f"m{i}", credits) for i in range(members)]
    caller, launcher = made.caller(), made.launcher()
    made.take()
    return made, caller, launcher, nonces


def blame(made: list[Any]) -> dict[bytes, bool | str]:
    """Which calls were answered `MemberLost`, and whether they are to blame; or "poisoned"."""
    failures = [s for s in made if isinstance(s.message, Failure)]
    assert all(isinstance(s.error, (MemberLost, PoisonedRequest)) for s in failures)
    return {s.message.call: getattr(s.error, "crashed", "poisoned") for s in failures}


# ---- blame ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exited", "goodbye", "unsendable, then exited"])
@pytest.mark.parametrize("crashed", [True, False])
def test_any_of_its_calls_may_have_ended_a_member_that_died_by_itself(how: str, crashed: bool) -> None:
    """However the broker learns of it, and not where it was ended from outside; a call directed to it is no reason."""
    d, caller, launcher, (m0,) = started(1)
    d.call(caller, b"1")
    d.call(caller, b"2")
    d.call(caller, b"directed", member="m0")
    if how == "goodbye":
        made = d.goodbye(m0, "the scheduler died", crashed=crashed)
        assert "m0 is gone: the scheduler died" in str(made[0].error)
    elif how == "exited":
        made = d.exited(launcher, "m0", crashed=crashed)
    else:
        assert d.unsendable(b"d" + m0) == []
        assert d.tick(EXPLAIN_S / 2) == []
        made = d.exited(launcher, "m0", crashed=crashed)
    assert blame(made) == {b"1": crashed, b"2": crashed, b"directed": False}
    assert d.core.counters["crashes"] == crashed
    assert d.quiet()


def test_a_suspect_that_was_alone_is_convicted() -> None:
    """The caller's word is enough: the first death may have been before this broker's time."""
    d, caller, launcher, _ = started(1)
    d.call(caller, b"suspect", suspect=True)
    assert blame(d.exited(launcher, "m0", crashed=True)) == {b"suspect": "poisoned"}


def test_a_suspect_that_was_given_up_is_still_aboard() -> None:
    """It may be what ended the member until that has stopped it: nobody is convicted in its company."""
    d, caller, launcher, _ = started(1)
    d.call(caller, b"0")
    d.restart(("engine", "m0", 1))
    caller, launcher = d.caller(), d.launcher()
    d.join("m0", held=[(b"0", "", True)])
    d.call(caller, b"1", suspect=True)
    d.call(caller, b"0", suspect=True)
    d.cancel(caller, b"0")
    assert b"1" not in blame(d.exited(launcher, "m0", crashed=True))


def test_two_deaths_of_the_same_member_are_no_proof() -> None:
    """Others are alive, and may show whose fault it was: the suspect goes there next."""
    d, caller, launcher, _ = started(1)
    d.call(caller, b"0")
    d.exited(launcher, "m0", crashed=True)
    d.join("m0", epoch=2)
    d.call(caller, b"0", attempt=2, suspect=True)
    d.join("m1")
    assert blame(d.exited(launcher, "m0", 2, crashed=True)) == {b"0": True}
    d.join("m0", epoch=3)
    assert served_by(d.call(caller, b"0", attempt=3, suspect=True)) == "m1"
    assert blame(d.exited(launcher, "m1", crashed=True)) == {b"0": "poisoned"}


def test_a_member_out_of_reach_takes_nothing_while_nobody_knows_why() -> None:
    """Its own calls are cancelled and what waited for it goes elsewhere at once; its calls are answered at the latest
    `EXPLAIN_S` later."""
    d, caller, _, (m0, m1) = started(2, credits=1)
    worker = d.join("w0", pool="worker")
    d.call(caller, b"row", pool="worker")
    d.call(worker, b"generate")
    d.call(caller, b"1", "s")
    d.call(caller, b"2", "s")
    assert d.core.dispatch.pending == 1
    (cancel,) = d.unsendable(b"c" + worker)
    assert (cancel.to, cancel.message.call) == (b"c" + m0, b"generate")
    assert d.core.restless
    assert d.unsendable(b"d" + m1) == []
    d.fail(m0, b"generate")
    assert given(d.take())[-1] == (b"2", "m0")
    assert d.tick(EXPLAIN_S * 0.9) == []
    assert blame(d.tick(EXPLAIN_S * 0.1)) == {b"row": False, b"1": False}
    d.reply(m0, b"2")
    assert d.quiet()
    assert not d.core.restless


def test_a_late_word_of_the_launcher_changes_nothing() -> None:
    """The calls have been answered."""
    d, caller, launcher, (m0,) = started(1)
    d.call(caller, b"1")
    d.unsendable(b"d" + m0)
    d.tick(EXPLAIN_S)
    assert d.exited(launcher, "m0", crashed=True) == d.exited(launcher, "m0", crashed=True) == []
    assert d.core.counters["crashes"] == 0


def test_a_call_of_a_member_out_of_reach_can_be_given_up() -> None:
    """Nobody is told to stop it, and nobody is answered."""
    d, caller, launcher, (m0,) = started(1)
    d.call(caller, b"1")
    d.unsendable(b"d" + m0)
    assert d.cancel(caller, b"1") == []
    assert d.exited(launcher, "m0", crashed=True) == []
    assert d.quiet()


def crashed_together(count: int, members: int = 2) -> Any:
    """A driver whose member m0 has crashed with ``count`` calls (b"0", …), each a second after the one before."""
    d, caller, launcher, _ = started(members)
    for number in range(count):
        d.call(caller, b"%d" % number, "at m0")
        d.tick(1.0)
    assert set(blame(d.exited(launcher, "m0", crashed=True)).values()) == {True}
    return d, caller, launcher


def test_a_conviction_clears_those_who_were_aboard_the_first_time() -> None:
    """Whatever their callers say: those that wait and those that run are ordinary calls, and go on together."""
    d, caller, launcher = crashed_together(4)
    d.join("m2", credits=8)
    for number in range(4):
        d.call(caller, b"%d" % number, attempt=2, suspect=True)
    assert [d.member(m).suspects for m in ("m1", "m2")] == [1, 0]  # the others wait
    made = d.exited(launcher, "m1", crashed=True)
    assert blame(made) == {b"0": "poisoned"}
    assert given(made) == [(b"1", "m2"), (b"2", "m2"), (b"3", "m2")]
    assert d.member("m2").suspects == 0
    assert blame(d.exited(launcher, "m2", crashed=True)) == {b"1": True, b"2": True, b"3": True}  # suspects anew


def test_an_innocent_of_another_death_stays_a_suspect() -> None:
    """Each death needs a culprit of its own."""
    d, caller, launcher = crashed_together(2, members=3)
    d.call(caller, b"x")
    d.call(caller, b"y")
    other = next(m for m in ("m1", "m2") if d.member(m).in_flight)
    d.exited(launcher, other, crashed=True)
    last = "m2" if other == "m1" else "m1"
    d.exited(launcher, last, crashed=True)
    d.join("m9", credits=8)
    d.call(caller, b"0", attempt=2, suspect=True)
    d.call(caller, b"x", attempt=2, suspect=True)
    made = d.exited(launcher, "m9", crashed=True)
    assert blame(made) == {b"0": "poisoned"}
    assert d.core.pools["engine"].suspects
    d.join("m10", credits=8)
    assert d.member("m10").suspects == 1


def test_the_youngest_suspects_are_tried_first() -> None:
    """What had come last before the death most likely brought it."""
    d, caller, _ = crashed_together(3, members=1)
    for number in range(3):
        d.call(caller, b"%d" % number, attempt=2, suspect=True)
    d.take()
    m1 = d.join("m1")
    assert given(d.take()) == [(b"2", "m1")]
    assert given(d.reply(m1, b"2")) == [(b"1", "m1")]


def test_a_suspect_that_outlives_its_time_is_let_go() -> None:
    """Its member had lived with it for a second: after 2.5 it counts as proven, and the next one is tried beside it.
    Another death then accuses both again."""
    d, caller, launcher = crashed_together(2, members=1)
    for number in range(2):
        d.call(caller, b"%d" % number, attempt=2, suspect=True)
    d.join("m1")
    d.take()
    d.tick(2.4)
    assert given(d.take()) == []
    d.tick(0.2)  # that of 1, which had been aboard for a second
    assert given(d.take()) == [(b"0", "m1")]
    assert d.member("m1").suspects == 1
    assert blame(d.exited(launcher, "m1", crashed=True)) == {b"0": True, b"1": True}


def test_of_several_suspects_aboard_each_may_be_to_blame() -> None:
    """They can meet where a member brings them along after a restart of the broker; nobody is convicted by chance."""
    d, caller, launcher, _ = started(1)
    for call in (b"0", b"1"):
        d.call(caller, call)
    d.restart(("engine", "m0", 1))
    caller, launcher = d.caller(), d.launcher()
    d.join("m0", held=[(b"0", "", True), (b"1", "", True)])
    for call in (b"0", b"1"):
        d.call(caller, call, suspect=True)
    assert d.member("m0").suspects == 2
    assert blame(d.exited(launcher, "m0", crashed=True)) == {b"0": True, b"1": True}


# ---- the way of suspects ----------------------------------------------------------------------------------------


def test_suspects_are_alone() -> None:
    """On an empty member, which takes nothing else meanwhile; one at least stays open for the others."""
    d, caller, _, (m0, m1) = started()
    assert served_by(d.call(caller, b"1", suspect=True)) == "m0"
    assert d.call(caller, b"2", suspect=True) == []
    assert d.broker(caller, "status")["pools"]["engine"]["m0"]["suspects"] == 1
    assert [served_by(d.call(caller, b"%d" % i)) for i in (3, 4)] == ["m1", "m1"]
    d.take()
    d.reply(m1, b"3")
    assert given(d.take()) == []
    d.reply(m0, b"1")
    assert given(d.take()) == [(b"2", "m0")]
    d.reply(m0, b"2")
    assert served_by(d.call(caller, b"5")) == "m0"


def test_a_member_is_reserved_where_none_is_empty() -> None:
    """The one with the fewest in flight: it finishes what it has, its sessions go on elsewhere, and it is open again
    when no suspect waits any more."""
    d, caller, _, (_, m1) = started()
    assert served_by(d.call(caller, b"1", "s")) == "m0"
    assert [served_by(d.call(caller, b"%d" % i)) for i in (2, 3)] == ["m1", "m0"]
    assert d.call(caller, b"suspect", suspect=True) == []
    assert served_by(d.call(caller, b"4")) == "m0"
    d.reply(m1, b"2")
    assert given(d.take())[-1] == (b"suspect", "m1")
    assert d.call(caller, b"suspect2", suspect=True) == []
    d.reply(m1, b"suspect")
    assert given(d.take())[-1] == (b"suspect2", "m1")
    assert served_by(d.call(caller, b"5", "s")) == "m0"
    d.reply(m1, b"suspect2")
    assert served_by(d.call(caller, b"6")) == "m1"


def test_a_suspect_that_gives_up_frees_what_was_reserved() -> None:
    """At the next tick."""
    d, caller, _, _ = started()
    for i in (1, 2):
        d.call(caller, b"%d" % i)
    d.call(caller, b"suspect", suspect=True)
    assert [m.reserved for m in (d.member("m0"), d.member("m1"))] == [True, False]
    d.cancel(caller, b"suspect")
    d.tick(0.2)
    assert served_by(d.call(caller, b"3")) == "m0"


def test_suspects_are_served_last() -> None:
    """After all that waits already."""
    d, caller, _, (m0,) = started(1, credits=1)
    d.call(caller, b"1", "s")
    d.call(caller, b"sticky", "s")
    d.call(caller, b"fresh")
    d.call(caller, b"suspect", suspect=True, attempt=2)
    order = []
    for call in (b"1", b"sticky", b"fresh", b"suspect"):
        d.take()
        d.reply(m0, call)
        order += [call for call, _ in given(d.take())]
    assert order == [b"sticky", b"fresh", b"suspect"]
    assert d.quiet()


def test_a_suspect_does_not_wait_for_room_that_others_cannot_use() -> None:
    """What waits for a full member is nothing that the idle one could take."""
    d, caller, _, (m0, m1) = started(2, credits=1)
    d.call(caller, b"1", "s")
    d.call(caller, b"2", suspect=True)
    d.call(caller, b"sticky", "s")
    d.call(caller, b"3", suspect=True)
    d.take()
    d.reply(m1, b"2")
    assert given(d.take()) == [(b"3", "m1")]
    d.reply(m0, b"1")
    assert given(d.take()) == [(b"sticky", "m0")]


def test_a_waiting_suspect_is_served_by_whoever_comes() -> None:
    """A new member, or one that is well again."""
    d, caller, launcher, _ = started(1)
    for i in range(3):
        d.call(caller, b"%d" % i, suspect=True)
    d.exited(launcher, "m0")
    d.take()
    d.health(launcher, "m2", slow=True)
    d.join("m2")
    assert given(d.take()) == []
    d.health(launcher, "m2", slow=False)
    assert given(d.take()) == [(b"1", "m2")]
    d.exited(launcher, "m2")
    d.join("m3")
    assert given(d.take()) == [(b"2", "m3")]


def test_a_waiting_suspect_ends_as_any_call_that_waits() -> None:
    """By a cancel, by its deadline, or with its pool."""
    d, caller, launcher, _ = started(1)
    for i in range(4):
        d.call(caller, b"%d" % i, suspect=True, remaining_ms=5000 if i == 2 else -1)
    d.cancel(caller, b"1")
    (expired,) = d.tick(5.0)
    assert (expired.message.call, type(expired.error)) == (b"2", DeadlineExceeded)
    (lost,) = d.say(b"c" + launcher, Abandoned("engine"), to_wire(PoolLost("nobody is left")))
    assert (lost.message.call, type(lost.error)) == (b"3", PoolLost)
    d.reply(nonce_of("m0", 1), b"0")
    assert d.quiet()


# ---- who goes first ---------------------------------------------------------------------------------------------


def test_calls_that_were_sent_again_go_first() -> None:
    """Ahead of fresh ones, each by arrival, in the pool's queue and in a member's."""
    d, caller, _, (m0,) = started(1, credits=1)
    d.call(caller, b"0", "s")
    for call, session, attempt in (
        (b"fresh1", "", 1), (b"fresh2", "s", 1), (b"again1", "", 2), (b"again2", "s", 4), (b"again3", "", 3),
    ):  # fmt: skip
        d.call(caller, call, session, attempt=attempt)
    order = []
    for _ in range(6):
        d.take()
        d.reply(m0, order[-1] if order else b"0")
        order += [call for call, _ in given(d.take())]
    assert order == [b"again1", b"again2", b"again3", b"fresh1", b"fresh2"]


def test_calls_keep_their_order_when_their_member_is_gone() -> None:
    """What was sent again stays ahead, and suspects stay behind."""
    d, caller, _, (m0, m1) = started(2, credits=1)
    d.call(caller, b"0", "s")
    d.call(caller, b"1")
    d.call(caller, b"fresh", "s")
    d.call(caller, b"suspect", suspect=True, attempt=2)
    d.call(caller, b"fresh2")
    d.call(caller, b"again", "s", attempt=2)
    d.goodbye(m0)
    order = [b"1"]
    for _ in range(4):
        d.take()
        d.reply(m1, order[-1])
        order += [call for call, _ in given(d.take())]
    assert order[1:] == [b"again", b"fresh", b"fresh2", b"suspect"]
