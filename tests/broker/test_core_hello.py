"""Who is let in, and what strangers can do: nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from support.broker_driver import SECRET, driver, nonce_of, served_by
from zagent import __version__
from zagent.broker.core import STRANGE_MAX
from zagent.broker.facts import FACTS_MAX
from zagent.broker.pulse import PULSE_S
from zagent.broker.roster import HALF_MAX
from zagent.errors import MemberLost, ProtocolError, VersionMismatch
from zagent.wire.codec import encode_body, encode_header
from zagent.wire.messages import BROKER, Call, Cancel, Failure, Goodbye, Hello, HelloWanted, Pulse, Reply, Welcome

ME = Hello("", "me", 0, 0, "", __version__)


def test_a_peer_is_welcomed_when_both_lanes_have_spoken() -> None:
    """On its control lane, with the incarnation and the cluster's facts."""
    d = driver(incarnation=7, facts={"run_id": "r"})
    hello = Hello("", "me", 0, 0, "", __version__)
    assert d.say(b"dn", hello, {}) == []
    (sent,) = d.say(b"cn", hello, {})
    assert (sent.to, sent.message, sent.body) == (b"cn", Welcome(7), {"run_id": "r"})


def test_a_member_with_the_wrong_secret_is_refused() -> None:
    """So that nobody else can register as an engine and read prompts; the secret itself is not told."""
    d = driver()
    (sent, _) = d.hello(b"n", Hello("engine", "evil", 1, 8, "wrong", __version__))
    assert isinstance(sent.error, ProtocolError)
    assert "'evil' may not join pool 'engine': wrong join secret" in str(sent.error)
    assert SECRET not in str(sent.error)
    assert d.in_flight() == {}
    assert d.core.counters["refused"] == 2


@pytest.mark.parametrize("hello", [Hello("", "", 0, 0, "", "0.0.9"), Hello("engine", "m", 1, 8, SECRET, "0.0.9")])
def test_a_peer_with_another_version_of_zagent_is_refused(hello: Hello) -> None:
    """Callers and members; both versions and both interpreters are named."""
    d = driver()
    (sent, _) = d.hello(b"n", hello._replace(python="/trainer/bin/python"))
    assert isinstance(sent.error, VersionMismatch)
    for part in (hello.name or "a caller", "0.0.9", "/trainer/bin/python", __version__, sys.executable):
        assert part in str(sent.error)
    assert d.in_flight() == {}


@pytest.mark.parametrize("credits", [0, -5])
def test_a_member_without_credits_is_refused(credits: int) -> None:
    """It could never be given a call."""
    (sent, _) = driver().hello(b"n", Hello("engine", "m", 1, credits, SECRET, __version__))
    assert f"grants {credits} credits" in str(sent.error)


def test_a_member_of_an_unknown_pool_is_refused() -> None:
    """The known pools are listed."""
    (sent, _) = driver().hello(b"n", Hello("judge", "m", 1, 1, SECRET, __version__))
    assert "no pool 'judge' here, only ['engine', 'worker']" in str(sent.error)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_hello_of_an_old_epoch_is_refused(epoch: int) -> None:
    """Also after that member's death: only a later life may take the name."""
    d = driver()
    nonce = d.join("m0", epoch=2)
    d.goodbye(nonce)
    (sent, _) = d.hello(b"late", Hello("engine", "m0", epoch, 8, SECRET, __version__))
    assert f"epoch {epoch} comes after epoch 2" in str(sent.error)


def test_a_later_life_replaces_the_former_one() -> None:
    """The former's calls are lost, and its late reply cannot touch the new count."""
    d = driver()
    caller, old = d.caller(), d.join("m0")
    d.call(caller, b"1")
    d.take()
    d.join("m0", epoch=2)
    lost = [s for s in d.take() if isinstance(s.message, Failure)]
    assert [(s.message.call, type(s.error)) for s in lost] == [(b"1", MemberLost)]
    d.call(caller, b"2")
    d.reply(old, b"1")
    assert d.in_flight() == {"m0": 1}
    assert d.member("m0").epoch == 2


@pytest.mark.parametrize("facts", [None, [], "x", 5])
def test_a_hello_without_a_map_of_facts_is_refused(facts: Any) -> None:
    """Refused with a reason, and nobody has joined."""
    d = driver()
    (sent,) = d.say(b"dn", Hello("", "x", 0, 0, "", __version__), facts)
    assert "facts must be a map" in str(sent.error)


def test_a_hello_without_a_body_is_refused() -> None:
    """As any other that cannot be read."""
    d = driver()
    (sent,) = d.raw(b"dn", [encode_header(Hello("", "x", 0, 0, "", __version__))])
    assert "without a body" in str(sent.error)


def test_a_second_hello_on_one_lane_is_no_second_lane() -> None:
    """The other lane must speak itself."""
    d = driver()
    hello = Hello("", "x", 0, 0, "", __version__)
    assert d.say(b"dn", hello, {}) == d.say(b"dn", hello, {}) == []
    assert d.core.roster.callers == {}


def test_another_wire_version_is_answered_as_such() -> None:
    """The peer learns why it is not welcomed."""
    d = driver()
    (sent,) = d.raw(b"dn", [b"\x93\x63\x06\xa0"])
    assert isinstance(sent.error, VersionMismatch)
    assert "99" in str(sent.error)


# ---- again ------------------------------------------------------------------------------------------------------


def test_a_hello_said_again_changes_nothing() -> None:
    """One welcome for both lanes, which says that the peer was known; its calls go on."""
    d = driver(incarnation=3, facts={"run_id": "r"})
    m0, caller = d.join("m0", held=[]), d.caller()
    d.call(caller, b"1")
    for nonce, hello in ((caller, ME), (m0, Hello("engine", "m0", 1, 5, SECRET, __version__))):
        (sent,) = d.hello(nonce, hello)
        assert (sent.to, sent.message, sent.body) == (b"c" + nonce, Welcome(3, known=True), {"run_id": "r"})
    assert d.in_flight() == {"m0": 1}
    assert d.member("m0").credits == 8
    assert [s.to for s in d.reply(m0, b"1")] == [b"d" + caller]


def test_a_peer_that_was_forgotten_is_welcomed_as_a_new_one() -> None:
    """The same nonce, unknown again."""
    d = driver()
    caller = d.caller()
    d.unsendable(b"c" + caller)
    (sent,) = d.hello(caller, ME)
    assert sent.message == Welcome(1, known=False)


def test_a_member_that_was_out_of_reach_may_join_again() -> None:
    """In the same life: it is served again, and what it had was lost."""
    d = driver()
    m0, caller = d.join("m0"), d.caller()
    d.call(caller, b"1", "s")
    d.unsendable(b"d" + m0)
    sent = d.hello(m0, Hello("engine", "m0", 1, 8, SECRET, __version__))
    assert [s.message for s in sent if isinstance(s.message, Welcome)] == [Welcome(1, known=False)]
    (lost,) = [s for s in sent if isinstance(s.message, Failure)]
    assert isinstance(lost.error, MemberLost)
    assert not lost.error.crashed
    assert served_by(d.call(caller, b"2", "s")) == "m0"
    assert d.tick(5) == []
    assert d.in_flight() == {"m0": 1}


def test_a_peer_that_has_lost_its_connection_is_forgotten_first() -> None:
    """Whatever was under way on the old one is lost: calls are answered, and its own are given up."""
    d = driver(incarnation=3)
    m0, caller = d.join("m0"), d.caller()
    d.call(caller, b"1")
    again = Hello("engine", "m0", 1, 8, SECRET, __version__, 3, 1)
    sent = d.hello(m0, again)
    assert [s.message for s in sent if isinstance(s.message, Welcome)] == [Welcome(3, known=False)]
    assert [s.message.call for s in sent if isinstance(s.message, Failure)] == [b"1"]
    d.call(caller, b"2")
    cancel, welcome = d.hello(caller, ME._replace(incarnation=3, connection=7))
    assert (cancel.to, cancel.message) == (b"c" + m0, Cancel(b"2", 1))
    assert welcome.message == Welcome(3, known=False)
    assert [s.message for s in d.hello(m0, again)] == [Welcome(3, known=True)]


def test_connections_that_came_before_this_broker_are_no_news() -> None:
    """Hellos of several may have been queued up for it; the last one counts."""
    d = driver(incarnation=3)
    caller, m0 = d.caller(), d.join("m0")
    d.call(caller, b"1")
    for connection in (1, 2):
        (known,) = d.hello(caller, ME._replace(incarnation=2, connection=connection))
        assert known.message == Welcome(3, known=True)
    (known,) = d.hello(caller, ME._replace(incarnation=3, connection=2))
    assert known.message == Welcome(3, known=True)
    assert [s.to for s in d.reply(m0, b"1")] == [b"d" + caller]


def test_lanes_may_tell_of_a_new_connection_at_different_times() -> None:
    """It is news once; what was said on an earlier one, and comes late, is none."""
    d = driver(incarnation=3)
    caller, m0 = d.caller(), d.join("m0")
    one, two = (ME._replace(incarnation=3, connection=number) for number in (1, 2))
    assert d.say(b"d" + caller, two, {}) == []
    (welcome,) = d.say(b"c" + caller, one, {})
    assert welcome.message == Welcome(3, known=False)
    d.call(caller, b"1")
    assert d.say(b"d" + caller, one, {}) == d.say(b"d" + caller, two, {}) == []
    (known,) = d.say(b"c" + caller, two, {})
    assert known.message == Welcome(3, known=True)
    assert [s.to for s in d.reply(m0, b"1")] == [b"d" + caller]


@pytest.mark.parametrize("how", ["goodbye", "exited", "exited later", "removed"])
def test_a_life_that_has_ended_does_not_come_back(how: str) -> None:
    """It said goodbye, the launcher saw it end, or somebody removed it; a later life may take the name."""
    d = driver()
    m0, launcher = d.join("m0"), d.launcher()
    if how == "goodbye":
        d.goodbye(m0)
    elif how == "removed":
        d.broker(launcher, "remove", ["engine", "m0"])
    else:
        if how == "exited later":
            d.unsendable(b"c" + m0)
            d.tick(5)
        d.exited(launcher, "m0")
    (refused, _) = d.hello(m0, Hello("engine", "m0", 1, 8, SECRET, __version__))
    assert "epoch 1 comes after epoch 1" in str(refused.error)
    d.join("m0", epoch=2)
    assert d.member("m0").takes_calls


def test_a_life_that_is_here_cannot_be_taken_over() -> None:
    """Another link of the same epoch is refused while the first is there."""
    d = driver()
    d.join("m0")
    (refused, _) = d.hello(nonce_of("other"), Hello("engine", "m0", 1, 8, SECRET, __version__))
    assert "comes after epoch 1" in str(refused.error)


@pytest.mark.parametrize(
    "facts",
    [{"held": 1}, {"held": [1]}, {"held": [[b"1", 1, "", "m"]]}, {"held": [["1", 1, "", "m", True]]}, {"version": "x"}],
)
def test_facts_of_the_wrong_kind_are_refused(facts: Any) -> None:
    """Held calls and versions are what they must be, or nobody has joined."""
    d = driver()
    (refused, _) = d.hello(b"m", Hello("engine", "m0", 1, 8, SECRET, __version__), facts)
    assert isinstance(refused.error, ProtocolError)
    assert d.in_flight() == {}


# ---- pulses -----------------------------------------------------------------------------------------------------


def test_everybody_feels_the_pulse() -> None:
    """Once a second, on control lanes, from peers' hello on."""
    d = driver(incarnation=4)
    nonces = [d.join("m0"), d.caller()]
    nonces.append(d.caller("late"))
    pulses = []
    for _ in range(16):
        d.take()
        d.tick(PULSE_S / 4)
        pulses.append([(s.to, s.message) for s in d.take()])
    due = [(b"c" + nonce, Pulse(4)) for nonce in nonces]
    assert [p for p in pulses if p] == [due] * 4


# ---- strangers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sender", [b"", b"d", b"dstranger", b"\x00\x00"])
@pytest.mark.parametrize(
    "message", [Call(b"1", 3, "engine", "generate"), Call(b"1", 1, BROKER, "status"), Reply(b"", 1)]
)
def test_a_stranger_is_asked_for_its_hello(sender: bytes, message: Any) -> None:
    """On the lane that spoke; what it said is dropped."""
    d = driver()
    d.join("m0")
    (sent,) = d.say(sender, message)
    assert (sent.to, sent.message) == (sender, HelloWanted())
    assert d.core.counters["strangers"] == 1
    assert d.quiet()


def test_who_has_said_hello_on_one_lane_only_is_a_stranger() -> None:
    """Nothing is routed for it yet."""
    d = driver()
    d.say(b"dhalfhalf", ME, {})
    (sent,) = d.say(b"dhalfhalf", Call(b"halfhalf1", 1, "engine", "generate"))
    assert sent.message == HelloWanted()


def test_a_lane_of_another_kind_is_nobodys() -> None:
    """Though the rest of its identity is a known peer's."""
    d = driver()
    m0 = d.join("m0")
    assert d.say(b"x" + m0, Goodbye()) == []
    assert d.member("m0").takes_calls
    (refused,) = d.say(b"x" + m0, ME, {})
    assert "a lane that is not waited for" in str(refused.error)


def test_a_strangers_goodbye_hurts_nobody() -> None:
    """Nor is it answered: who has left hears nothing."""
    d = driver()
    m0 = d.join("m0")
    assert d.say(b"cstranger", Goodbye()) == d.say(b"x" + m0[:-1], Goodbye()) == []
    assert d.member("m0").takes_calls


def test_a_strangers_long_header_is_not_even_read() -> None:
    """Such a header would take longer to read than a hundred others; a peer's own is read."""
    d = driver()
    caller = d.caller()
    header = encode_header(Hello("", "x" * STRANGE_MAX, 0, 0, "", __version__))
    assert d.raw(b"dstranger", [header, *encode_body({})]) == []
    assert d.core.counters["malformed"] == 1
    d.raw(b"d" + caller, [header, *encode_body({})])
    assert d.core.counters["malformed"] == 1


def test_a_strangers_long_facts_are_not_even_read() -> None:
    """Members list their calls there, and may."""
    d = driver()
    facts = {"x": "x" * FACTS_MAX}
    (refused, _) = d.hello(b"stranger", ME, facts)
    assert "without the join secret has 65536 bytes of facts at most" in str(refused.error)
    d.join("m0", facts=facts)
    assert d.in_flight() == {"m0": 0}


def test_strangers_leave_no_trace() -> None:
    """100 000 of them, with all that they can say, and only so many half hellos are kept."""
    d = driver()
    half, call = (
        [encode_header(ME), *encode_body({})],
        [encode_header(Call(b"1", 1, "engine", "m")), *encode_body(None)],
    )
    for i in range(50_000):
        for frames in (half, call):
            d.core.frames(b"d%08d" % i, frames, 0.0)
    assert len(d.core.roster._half) == HALF_MAX
    assert d.core.roster.callers == d.core.roster.lanes == {}
    assert len(d.core._early) == 0
    assert d.quiet()
