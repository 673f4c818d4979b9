"""Any interleaving of events leaves the counts exact and every call answered once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.broker_driver import Sent, driver
from zagent.errors import TransientError
from zagent.wire.messages import Call, Cancel, Drain, Failure, Reply

NAMES = ("m0", "m1", "m2")
index = st.integers(0, 50)


@dataclass
class Asked:
    """A call as the model knows it."""

    caller: bytes
    deadline: float | None
    directed: bool
    given_up: bool = False
    member: bytes | None = None  #: nonce of who has it
    answers: int = 0

    @property
    def waits(self) -> bool:
        return self.member is None and not self.answers and not self.given_up


class Broker(RuleBasedStateMachine):
    """The core beside a model that only believes what the core has sent."""

    def __init__(self) -> None:
        super().__init__()
        self.d = driver(max_pending=6, sticky_cache_size=2)
        self.epochs: Counter[str] = Counter()
        self.credits: dict[bytes, int] = {}  # of live members, by nonce
        self.draining: set[bytes] = set()
        self.callers: list[bytes] = []
        self.came = 0
        self.removed: bytes | None = None  #: alive, but taken out: told to stop what it runs
        self.calls: dict[bytes, Asked] = {}
        self._new_caller()

    def _new_caller(self) -> None:
        self.came += 1
        self.callers.append(self.d.caller(f"caller{self.came}"))
        self._follow()

    def _follow(self) -> None:
        """Believe what was sent."""
        for sent in self.d.take():
            nonce, message = sent.to[1:], sent.message
            if isinstance(message, Call):
                self._given(sent, nonce)
            elif isinstance(message, Cancel):
                assert self.calls[message.call].member == nonce
                assert self.calls[message.call].given_up or nonce == self.removed
            elif isinstance(message, (Reply, Failure)):
                self._answered(message, nonce)

    def _given(self, sent: Sent, nonce: bytes) -> None:
        asked = self.calls[sent.message.call]
        assert asked.waits, "given twice, or after its end"
        assert nonce in self.credits, "given to nobody"
        assert asked.directed or nonce not in self.draining, "given to a member that leaves"
        assert sent.to[:1] == (b"c" if asked.directed else b"d")
        asked.member = nonce

    def _answered(self, message: Any, nonce: bytes) -> None:
        asked = self.calls[message.call]
        assert asked.caller == nonce
        assert not asked.given_up, "answered though nobody waits"
        asked.answers += 1
        assert asked.answers == 1, "answered twice"
        asked.member = None

    def _held(self, i: int) -> bytes | None:
        held = [call for call, asked in self.calls.items() if asked.member]
        return held[i % len(held)] if held else None

    def _live(self, i: int) -> bytes | None:
        live = list(self.credits)
        return live[i % len(live)] if live else None

    def _member_gone(self, nonce: bytes) -> None:
        """Before the core is told: what it had will be answered, or is forgotten if given up."""
        del self.credits[nonce]
        self.draining.discard(nonce)
        for asked in self.calls.values():
            if asked.member == nonce and asked.given_up:
                asked.member = None

    def _check_lost(self, nonce: bytes) -> None:
        self._follow()
        assert not [call for call, asked in self.calls.items() if asked.member == nonce]

    @rule(name=st.sampled_from(NAMES), credits=st.integers(1, 3))
    def hello(self, name: str, credits: int) -> None:
        """Joins, or comes back with a higher epoch, also while its former life still counts as live."""
        self.epochs[name] += 1
        former = f"{name}/{self.epochs[name] - 1}".encode()
        nonce = f"{name}/{self.epochs[name]}".encode()
        self.credits[nonce] = credits
        if former in self.credits:
            self._member_gone(former)
        self.d.join(name, credits, epoch=self.epochs[name])
        self._check_lost(former)

    @rule()
    @precondition(lambda self: len(self.callers) < 3)
    def another_caller(self) -> None:
        self._new_caller()

    @rule(
        who=index, session=st.sampled_from(["", "", "a", "b", "c"]), remaining=st.sampled_from([-1, -1, 0, 500, 3000])
    )
    def call(self, who: int, session: str, remaining: int) -> None:
        self._call(who, session, remaining, "")

    @rule(who=index, name=st.sampled_from(NAMES))
    def directed_call(self, who: int, name: str) -> None:
        self._call(who, "", -1, name)

    def _call(self, who: int, session: str, remaining: int, member: str) -> None:
        caller, call = self.callers[who % len(self.callers)], b"call%d" % len(self.calls)
        deadline = self.d.now + remaining / 1000 if remaining >= 0 else None
        self.calls[call] = Asked(caller, deadline, bool(member))
        self.d.call(caller, call, session, remaining_ms=remaining, member=member)
        self._follow()

    @rule(i=index, session=st.sampled_from(["", "a"]))
    def replayed_call(self, i: int, session: str) -> None:
        """A running or waiting call comes again: nothing happens."""
        known = [call for call, asked in self.calls.items() if asked.member or asked.waits]
        if known:
            call = known[i % len(known)]
            assert self.d.call(self.callers[0], call, session) == []

    @rule(i=index)
    def reply(self, i: int) -> None:
        call = self._held(i)
        if call is not None:
            self._answer(call, lambda member: self.d.reply(member, call))

    @rule(i=index, accepted=st.booleans())
    def failure(self, i: int, accepted: bool) -> None:
        call = self._held(i)
        if call is not None:
            self._answer(call, lambda member: self.d.fail(member, call, TransientError("no"), accepted=accepted))

    def _answer(self, call: bytes, answer: Any) -> None:
        asked = self.calls[call]
        member = asked.member
        if asked.given_up:
            asked.member = None
        answer(member)
        self._follow()
        assert asked.member is None
        assert asked.answers == (0 if asked.given_up else 1)

    @rule(i=index, j=index)
    def late_answer(self, i: int, j: int) -> None:
        """Somebody answers what is not theirs, or over, or of another attempt: nothing happens."""
        member, calls = self._live(i), list(self.calls)
        if member is not None and calls:
            call = calls[j % len(calls)]
            attempt = 2 if self.calls[call].member == member else 1
            assert self.d.reply(member, call, attempt) == []

    @rule(i=index)
    def cancel(self, i: int) -> None:
        open_calls = [c for c, asked in self.calls.items() if not asked.given_up and (asked.member or asked.waits)]
        if open_calls:
            call = open_calls[i % len(open_calls)]
            self.calls[call].given_up = True
            self.d.cancel(self.calls[call].caller, call)
            self._follow()

    @rule(session=st.sampled_from(["a", "b", "c"]))
    def end_session(self, session: str) -> None:
        assert self.d.end_session(self.callers[0], session) == []

    @rule(i=index, how=st.sampled_from(["goodbye", "exited", "data", "control", "removed"]))
    def member_gone(self, i: int, how: str) -> None:
        nonce = self._live(i)
        if nonce is None:
            return
        name, _, epoch = nonce.decode().partition("/")
        self._member_gone(nonce)
        if how == "goodbye":
            self.d.goodbye(nonce)
        elif how == "exited":
            self.d._note(self.d.core.exited("engine", name, int(epoch), "test", self.d.now))
        elif how == "removed":
            self.calls[b"own"] = Asked(self.callers[0], None, False)
            self.removed = nonce
            self.d.broker(self.callers[0], "remove", ["engine", name])
        else:
            self.d.unsendable((b"d" if how == "data" else b"c") + nonce)
        self._check_lost(nonce)
        self.calls.pop(b"own", None)

    @rule(i=index)
    def drain(self, i: int) -> None:
        nonce = self._live(i)
        if nonce is not None:
            self.draining.add(nonce)
            self.d.say(b"c" + nonce, Drain())
            self._follow()

    @rule(i=index)
    @precondition(lambda self: len(self.callers) > 1)
    def caller_gone(self, i: int) -> None:
        caller = self.callers.pop(i % len(self.callers))
        for asked in self.calls.values():
            if asked.caller == caller and (asked.member or asked.waits):
                asked.given_up = True
        self.d.goodbye(caller)
        self._follow()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def tick(self, seconds: float) -> None:
        self.d.now += seconds
        self.d.tick()
        self._follow()
        overdue = [c for c, a in self.calls.items() if a.waits and a.deadline is not None and a.deadline <= self.d.now]
        assert not overdue

    @invariant()
    def counts_are_the_models(self) -> None:
        """In flight per member and waiting in all, and never beyond the credits."""
        counts: Counter[bytes] = Counter(a.member for a in self.calls.values() if a.member and not a.directed)
        for nonce, credits in self.credits.items():
            name = nonce.decode().partition("/")[0]
            assert self.d.member(name).in_flight == counts[nonce] <= credits
        assert self.d.core.dispatch.pending == sum(a.waits for a in self.calls.values()) <= 6
        known = sum(len(caller.calls) for caller in self.d.core.roster.callers.values())
        gone = {asked.caller for asked in self.calls.values()} - set(self.callers)
        assert known == sum(bool(a.member or a.waits) for a in self.calls.values() if a.caller not in gone)

    @invariant()
    def nobody_waits_where_there_is_room(self) -> None:
        """A call waits only while every member, or its session's member, is full."""
        pool = self.d.core.pools["engine"]
        if pool.waiting:
            assert not any(m.has_room for m in pool.members.values())
        for m in pool.members.values():
            assert not (m.waiting and m.has_room)
            assert not (m.waiting and not m.takes_calls)

    @invariant()
    def only_sessions_in_flight_exceed_the_cache(self) -> None:
        """Idle sessions never outnumber the cache."""
        assert len(self.d.core.dispatch.sessions._idle) <= 2

    def teardown(self) -> None:
        """Answer everything: then nothing is held, and every call that was not given up has had its answer."""
        self.hello("m0", 3)
        while (call := self._held(0)) is not None:
            self._answer(call, lambda member, call=call: self.d.reply(member, call))
        assert self.d.quiet()
        assert not self.d.core.dispatch._leases
        assert not self.d.core.dispatch._directed
        assert not self.d.core.dispatch.sessions._active
        for call, asked in self.calls.items():
            assert asked.answers == (0 if asked.given_up else 1), call


Broker.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
Broker.TestCase.__doc__ = (
    "Counts are the model's, waiting calls are served where there is room, all is zero in the end."
)
TestBroker = Broker.TestCase
TestBroker.runTest.__doc__ = Broker.TestCase.__doc__
