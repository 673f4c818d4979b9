"""Any interleaving of events, restarts of the broker, closed gates and new weights among them, leaves counts exact and
every call answered once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.broker_driver import SECRET, Sent, driver, nonce_of
from zagent import __version__
from zagent.broker.presence import CLAIM_S, EXPLAIN_S, RECOVER_S
from zagent.broker.pulse import PULSE_S
from zagent.broker.routing import STICKY, Routing, routing
from zagent.errors import MemberLost, PoisonedRequest, TransientError
from zagent.wire.messages import Call, Cancel, Drain, Failure, Hello, Outdated, Passed, Pulse, Reply

NAMES = ("m0", "m1", "m2")
index = st.integers(0, 50)
Key = tuple[bytes, int]


@dataclass
class Asked:
    """One attempt of a call, as its caller knows it."""

    caller: bytes
    fields: dict[str, Any]
    sent: bool = True  #: to the broker that there is now
    deadline: float | None = None
    given_up: bool = False
    answers: int = 0

    @property
    def open(self) -> bool:
        return not self.given_up and not self.answers

    @property
    def suspect(self) -> bool:
        return self.fields["suspect"] and not self.fields["member"]


@dataclass
class Twin:
    """A member's process: what it runs, and the answers that it keeps until the broker has passed them on."""

    name: str
    epoch: int
    credits: int
    version: int = 0  #: of its weights
    outdated: int = 0  #: the version that it was told to load
    known: bool = False  #: the broker knows it; if not, answers wait for the next welcome
    deaf: bool = False  #: the next message to it cannot be delivered
    draining: bool = False
    slow: bool = False
    asleep: bool = False
    running: dict[Key, str] = field(default_factory=dict)  # with the session
    kept: dict[Key, int] = field(default_factory=dict)  # with their numbers
    number: int = 0  #: of its last answer
    earlier: int = 0  #: of the last from before the last pulse
    latest: int = 0  #: of the last when that came
    outbox: list[Key] = field(default_factory=list)
    stray: set[Key] = field(default_factory=set)  # running, though another one has the call by now

    @property
    def nonce(self) -> bytes:
        return nonce_of(self.name, self.epoch)


class Broker(RuleBasedStateMachine):
    """The core beside a model that only believes what the core has sent."""

    routing: Routing = STICKY

    def __init__(self) -> None:
        super().__init__()
        self.d = driver(max_pending=6, sticky_cache_size=2, routing={"engine": self.routing})
        self.launcher = self.d.launcher()
        self.epochs: Counter[str] = Counter()
        self.twins: dict[bytes, Twin] = {}  # whose processes live, by nonce
        self.out_of_reach: dict[bytes, float] = {}  # members whose calls are not answered yet, and until when
        self.callers: list[bytes] = []
        self.away: list[bytes] = []  # callers that the broker does not know (any more)
        self.came = 0
        self.removed: bytes | None = None  #: alive, but taken out: told to stop what it runs
        self.calls: dict[Key, Asked] = {}
        self.leased: dict[Key, bytes] = {}  # the member that the broker counts a call at
        self.directed: set[Key] = set()
        self.blamed: set[Key] | None = None  # of a member that has just been reported gone
        self.reactions: list[Callable[[], object]] = []
        self.deaths: Counter[bytes] = Counter()  # at which each call was aboard
        self.version = 0  #: the highest that the broker knows of
        self.gates: set[bytes] = set()  #: callers who keep the gate closed, as far as the broker knows
        self.keeps: set[bytes] = set()  #: and as they see it
        self.awaited: set[bytes] = set()  #: those of them who may come back to a new broker,
        self.until = 0.0  #: until then
        self.claimed = 0.0  #: when a new broker has waited long enough for callers of what members have
        self.once = False  #: the members' method must not run twice
        self.begun: Counter[bytes] = Counter()  # how often each call was, by whatever attempt
        self._new_caller()
        self._new_caller()

    @initialize(once=st.booleans())
    def members(self, once: bool) -> None:
        self.once = once
        self.hello("m0", 2)
        self.hello("m1", 3)

    def _new_caller(self) -> None:
        self.came += 1
        self.callers.append(self.d.caller(f"c{self.came}"))
        self._follow()

    # ---- what the core says -----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Believe what was sent, and let members react."""
        for sent in self.d.take():
            message, nonce = sent.message, sent.to[1:]
            twin = self.twins.get(nonce)
            if twin is not None and twin.deaf:
                self._undeliverable(sent, twin)
            elif isinstance(message, Call):
                assert twin is not None
                self._given(sent, twin)
            elif isinstance(message, Cancel):
                assert twin is not None
                self._cancelled((message.call, message.attempt), twin)
            elif isinstance(message, (Reply, Failure)):
                self._answered(sent)
            elif isinstance(message, Outdated):
                assert twin is not None
                assert twin.version < message.version == self.version, "nothing new"
                assert not self.gates, "told to load while somebody else brings weights"
                assert not twin.asleep, "told to load while it sleeps"
                twin.outdated = message.version
            elif isinstance(message, Pulse) and twin is not None:
                twin.earlier, twin.latest = twin.latest, twin.number
            elif isinstance(message, Passed):
                assert twin is not None
                self._passed(message.number, twin)
        while self.reactions:
            self.reactions.pop(0)()
            self._follow()

    def _passed(self, number: int, twin: Twin) -> None:
        assert number <= twin.earlier, "it may not have left the broker yet"
        for key in [key for key, own in twin.kept.items() if own <= number]:
            del twin.kept[key]
            assert not self.calls[key].open or self.d.now >= self.claimed, "its caller may still come for it"

    def _undeliverable(self, sent: Sent, twin: Twin) -> None:
        if twin.known:
            twin.known = False
            self.out_of_reach[twin.nonce] = self.d.now + EXPLAIN_S
        key = (getattr(sent.message, "call", b""), getattr(sent.message, "attempt", 0))
        if isinstance(sent.message, Call) and (key in twin.running or key in twin.kept):
            self.leased[key] = twin.nonce  # it may have begun: it ends as the member does
        self.reactions.append(lambda: self.d.unsendable(sent.to, sent.frames))

    def _given(self, sent: Sent, twin: Twin) -> None:
        key = (sent.message.call, sent.message.attempt)
        asked = self.calls[key]
        assert asked.open and asked.sent, "given after its end"
        assert twin.known, "given to nobody"
        held = key in twin.running or key in twin.kept
        if key in self.leased:
            assert self.leased[key] == twin.nonce and held, "given twice"
        else:
            directed = held or asked.fields["member"]
            assert directed or not (twin.draining or twin.slow), "given to one that is spared"
            assert directed or not self.gates, "past a closed gate"
            assert directed or not self.awaited, "before the gates are known"
            assert directed or not twin.asleep, "given to one that sleeps"
            assert directed or twin.version == self.version, "given to one with old weights"
            self.leased[key] = twin.nonce
            if sent.to[:1] == b"c":
                self.directed.add(key)
            elif not held:
                assert self.d.member(twin.name).in_flight <= twin.credits, "beyond the cap"
        if key in twin.kept:
            self.reactions.append(lambda: self._send_answer(twin, key))
        elif key not in twin.running:
            twin.running[key] = asked.fields["session"]
            self.begun[key[0]] += 1
            assert self.begun[key[0]] == 1 or not self.once, "run twice"

    def _cancelled(self, key: Key, twin: Twin) -> None:
        asked = self.calls[key]
        wanted = asked.open and asked.sent and self.leased.get(key) == twin.nonce
        assert not wanted or twin.nonce == self.removed, "stopped though its caller waits"
        if key in twin.kept:
            self.reactions.append(lambda: self._send_answer(twin, key))

    def _answered(self, sent: Sent) -> None:
        key = (sent.message.call, sent.message.attempt)
        asked = self.calls[key]
        assert asked.caller == sent.to[1:]
        assert not asked.given_up, "answered though nobody waits"
        asked.answers += 1
        assert asked.answers == 1, "answered twice"
        if self.blamed is not None and isinstance(sent.error, MemberLost):
            assert sent.error.crashed == (key in self.blamed)
        if isinstance(sent.error, PoisonedRequest):
            assert self.blamed == {key}, "convicted in company"
            assert asked.suspect or self.deaths[key[0]] > 1, "convicted at its first death"

    def _waits(self, key: Key) -> bool:
        return self.calls[key].open and self.calls[key].sent and key not in self.leased

    def _release(self, *nonces: bytes) -> None:
        """All that the broker counts at those members."""
        for key in [key for key, at in self.leased.items() if at in nonces]:
            self._returned(key)

    def _returned(self, key: Key) -> None:
        del self.leased[key]
        self.directed.discard(key)

    # ---- members ----------------------------------------------------------------------------------------------------

    def _twin(self, i: int, *, known: bool = True) -> Twin | None:
        twins = [twin for twin in self.twins.values() if twin.known is known]
        return twins[i % len(twins)] if twins else None

    @rule(name=st.sampled_from(NAMES), credits=st.integers(1, 3), weights=st.sampled_from(["first", "latest", "new"]))
    def hello(self, name: str, credits: int, weights: str = "latest") -> None:
        """A new life, also while the former one still counts as live; what that had may go to others before they hear
        of new weights."""
        self.epochs[name] += 1
        former = nonce_of(name, self.epochs[name] - 1)
        version = {"first": 0, "latest": self.version, "new": self.version + (former not in self.twins)}[weights]
        self._gone(former)
        twin = Twin(name, self.epochs[name], credits, version)
        self.twins[twin.nonce] = twin
        self._join(twin)

    @rule(i=index)
    @precondition(lambda self: any(not twin.known for twin in self.twins.values()))
    def rejoin(self, i: int) -> None:
        """A member that the broker does not know comes (back) with what it has."""
        twin = self._twin(i, known=False)
        if twin is not None:
            self._join(twin)

    def _join(self, twin: Twin) -> None:
        self._explained(twin.nonce)
        twin.known, twin.deaf, twin.draining, twin.stray, twin.outdated = True, False, False, set(), 0
        self.version = max(self.version, twin.version)
        for key in twin.running:
            if key in self.leased:
                twin.stray.add(key)
            else:
                self.leased[key] = twin.nonce
        held = [[*self.d.key(*key), session, "generate", True] for key, session in twin.running.items()]
        held += [[*self.d.key(*key), self.calls[key].fields["session"], "generate", False] for key in twin.kept]
        self._hello(twin, held=held, **({"idempotent": []} if self.once else {}))
        for key in twin.outbox:
            self._send_answer(twin, key)
        twin.outbox = []

    def _hello(self, twin: Twin, **facts: Any) -> None:
        hello = Hello("engine", twin.name, twin.epoch, twin.credits, SECRET, __version__, self.d.core.incarnation)
        lacks = ["kv_cache"] if twin.asleep else []
        said = {"version": twin.version, "weights": f"/{twin.version}", "lacks": lacks}
        self.d.hello(twin.nonce, hello, {**said, **facts})
        self._follow()

    def _send_answer(self, twin: Twin, key: Key, error: Exception | None = None, *, accepted: bool = True) -> None:
        """A kept one again, or one just made."""
        if not twin.known:
            twin.outbox.append(key)
            return
        twin.number = twin.kept[key] = twin.number + 1
        if self.leased.get(key) == twin.nonce:
            self._returned(key)
        if error is None:
            self.d.reply(twin.nonce, *key, number=twin.number)
        else:
            self.d.fail(twin.nonce, key[0], error, accepted=accepted, attempt=key[1], number=twin.number)
        self._follow()

    @precondition(lambda self: any(twin.running for twin in self.twins.values()))
    @rule(i=index, j=index, fails=st.booleans(), accepted=st.booleans())
    def answer(self, i: int, j: int, fails: bool, accepted: bool) -> None:
        """Of one that the broker may not know at the moment."""
        self._busy_answers(i, j, TransientError("no") if fails else None, accepted)

    def _busy_answers(self, i: int, j: int = 0, error: Exception | None = None, accepted: bool = True) -> None:
        busy = [twin for twin in self.twins.values() if twin.running]
        if busy:
            self._answer(busy[i % len(busy)], j, error, accepted)

    def _answer(self, twin: Twin, j: int, error: Exception | None = None, accepted: bool = True) -> None:
        key = list(twin.running)[j % len(twin.running)]
        del twin.running[key]
        twin.stray.discard(key)
        twin.kept[key] = twin.number + 1
        asked = self.calls[key]
        expected = asked.answers + (twin.known and asked.open and asked.sent and self.leased.get(key) == twin.nonce)
        self._send_answer(twin, key, error, accepted=accepted)
        assert asked.answers == expected

    @rule(i=index, j=index)
    def late_answer(self, i: int, j: int) -> None:
        """Somebody answers what is not theirs, or over: nothing happens."""
        twin, keys = self._twin(i), list(self.calls)
        if twin is not None and keys:
            key = keys[j % len(keys)]
            if self.leased.get(key) != twin.nonce:
                assert self.d.reply(twin.nonce, *key, number=twin.number) == []

    @rule(i=index, how=st.sampled_from(["goodbye", "exited", "removed"]), crashed=st.booleans())
    def member_gone(self, i: int, how: str, crashed: bool) -> None:
        twin = self._twin(i)
        if twin is None:
            return
        self._judge(twin.nonce, crashed=crashed and how != "removed")
        if how == "removed":
            self.removed = twin.nonce
            self.calls[b"own", 1] = Asked(self.launcher, {})
            self.d.broker(self.launcher, "remove", ["engine", twin.name])
        elif how == "goodbye":
            self.d.goodbye(twin.nonce, crashed=crashed)
        else:
            self.d.exited(self.launcher, twin.name, twin.epoch, crashed=crashed)
        self._release(twin.nonce)
        self._follow()
        del self.twins[twin.nonce]
        self.calls.pop((b"own", 1), None)
        self.blamed = None

    def _judge(self, nonce: bytes, *, crashed: bool) -> None:
        """Before the core is told that this member is gone."""
        at = {key for key, m in self.leased.items() if m == nonce and key not in self.directed} if crashed else set()
        self.blamed = at
        self.deaths.update(call for call, _ in at)

    @rule(i=index)
    def deafness(self, i: int) -> None:
        """A member's connection has broken, and nobody has noticed."""
        twin = self._twin(i)
        if twin is not None:
            twin.deaf = True

    @rule(i=index, lane=st.sampled_from([b"d", b"c"]))
    def out_of_sight(self, i: int, lane: bytes) -> None:
        """A member cannot be reached; its process may live."""
        twin = self._twin(i)
        if twin is not None:
            twin.known = False
            self.out_of_reach[twin.nonce] = self.d.now + EXPLAIN_S
            self.d.unsendable(lane + twin.nonce)
            self._follow()

    @rule(i=index, crashed=st.booleans())
    @precondition(lambda self: any(not twin.known for twin in self.twins.values()))
    def unknown_member_exits(self, i: int, crashed: bool) -> None:
        """One that the broker waits for, or could not reach: the launcher says how it ended."""
        twin = self._twin(i, known=False)
        if twin is not None:
            self._judge(twin.nonce, crashed=crashed)
            self._gone(twin.nonce)
            self.d.exited(self.launcher, twin.name, twin.epoch, crashed=crashed)
            self._follow()
            self.blamed = None

    def _gone(self, nonce: bytes) -> None:
        """Before the core is told."""
        self.twins.pop(nonce, None)
        self.out_of_reach.pop(nonce, None)
        self._release(nonce)

    def _explained(self, nonce: bytes) -> None:
        if self.out_of_reach.pop(nonce, None) is not None:
            self._release(nonce)

    @rule(i=index)
    def drain(self, i: int) -> None:
        twin = self._twin(i)
        if twin is not None:
            twin.draining = True
            self.d.say(b"c" + twin.nonce, Drain())
            self._follow()

    @rule(i=index, slow=st.booleans())
    def health(self, i: int, slow: bool) -> None:
        twin = self._twin(i) if slow else next((twin for twin in self.twins.values() if twin.slow), None)
        if twin is not None:
            twin.slow = slow
            self.d.health(self.launcher, twin.name, twin.epoch, slow=slow)
            self._follow()

    # ---- gates and weights ------------------------------------------------------------------------------------------

    @rule(who=index, closed=st.booleans())
    @precondition(lambda self: self.callers)
    def gate(self, who: int, closed: bool) -> None:
        """A caller closes the gate, or lets it go."""
        caller = self.callers[who % len(self.callers)]
        for holders in (self.gates, self.keeps):
            (holders.add if closed else holders.discard)(caller)
        self._order(caller, "close_gate" if closed else "open_gate", ["engine", "update"])

    @rule(i=index, ahead=st.sampled_from([0, 0, 0, 1]))
    def renew(self, i: int, ahead: int) -> None:
        """A member has loaded the latest weights, or some that nobody has heard of."""
        twin = self._twin(i)
        if twin is not None and not twin.deaf:
            twin.version = self.version = self.version + ahead
            self._hello(twin)

    @rule(i=index, asleep=st.booleans(), ahead=st.sampled_from([0, 0, 1]))
    def sleep(self, i: int, asleep: bool, ahead: int) -> None:
        """A member goes to sleep, or wakes up; it may have got new weights in between."""
        twin = self._twin(i)
        if twin is not None and not twin.deaf:
            twin.asleep = asleep
            twin.version += ahead
            self.version = max(self.version, twin.version)
            self._hello(twin)

    @rule(who=index, ahead=st.sampled_from([0, 1]))
    @precondition(lambda self: self.callers)
    def new_weights(self, who: int, ahead: int) -> None:
        """A trainer says that there are some."""
        self.version += ahead
        self._order(self.callers[who % len(self.callers)], "set_version", ["engine", self.version, f"/{self.version}"])

    @rule(i=index, who=index, count=st.integers(1, 4))
    @precondition(lambda self: self.callers)
    def update(self, i: int, who: int, count: int) -> None:
        """All of it: behind the gate some calls come, members load new weights one by one, it opens again."""
        self.gate(who, closed=True)
        self.call(count, who, "ab"[count % 2], -1, i % 3, group="")
        self._busy_answers(i)
        self.renew(i, 1)
        for number in range(count):
            self.renew(number, 0)
        if self.callers:
            self.gate(who, closed=False)

    def _order(self, caller: bytes, method: str, argument: Any) -> None:
        self.calls[b"own", 1] = Asked(caller, {})
        self.d.broker(caller, method, argument)
        self._follow()
        del self.calls[b"own", 1]

    # ---- callers ----------------------------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: len(self.callers) + len(self.away) < 4)
    def another_caller(self) -> None:
        self._new_caller()

    @rule(
        count=st.integers(1, 4),
        who=index,
        session=st.sampled_from(["", "", "a", "b", "c"]),
        group=st.sampled_from(["", "g", "h"]),
        remaining=st.sampled_from([-1, -1, 0, 500, 3000]),
        again=st.sampled_from([0, 0, 1, 2]),
    )
    def call(self, count: int, who: int, session: str, remaining: int, again: int, *, group: str) -> None:
        """Some calls: fresh, sent again, or sent again as suspects."""
        fields = {
            "session": session, "group": group, "remaining_ms": remaining, "member": "", "suspect": again == 2
        }  # fmt: skip
        for _ in range(count):
            self._call(who, 1 + (again > 0), fields)

    @rule(who=index, name=st.sampled_from(NAMES))
    def directed_call(self, who: int, name: str) -> None:
        self._call(who, 1, {"session": "", "group": "", "remaining_ms": -1, "member": name, "suspect": False})

    def _call(self, who: int, attempt: int, fields: dict[str, Any]) -> None:
        if self.callers:
            asked = Asked(self.callers[who % len(self.callers)], fields)
            self._send((b"call%d" % len(self.calls), attempt), asked)

    def _send(self, key: Key, asked: Asked, **more: Any) -> None:
        self.calls[key] = asked
        remaining = asked.fields["remaining_ms"]
        asked.sent, asked.deadline = True, self.d.now + remaining / 1000 if remaining >= 0 else None
        self.d.call(asked.caller, key[0], attempt=key[1], **asked.fields, **more)
        self._follow()

    @rule(i=index)
    def replayed_call(self, i: int) -> None:
        """A running or waiting call comes again: at most its member hears of it, and knows it."""
        known = [key for key, asked in self.calls.items() if asked.open and asked.sent]
        if known:
            key = known[i % len(known)]
            self.d.call(self.calls[key].caller, key[0], attempt=key[1])
            self._follow()

    @rule(i=index)
    def cancel(self, i: int) -> None:
        """Also by a caller that is away, whose cancel is lost."""
        open_calls = [key for key, asked in self.calls.items() if asked.open]
        if open_calls:
            key = open_calls[i % len(open_calls)]
            self._give_up(key)
            if self.calls[key].caller in self.callers:
                self.d.cancel(self.calls[key].caller, *key)
                self._follow()

    def _give_up(self, key: Key) -> None:
        self.calls[key].given_up = True

    @rule(session=st.sampled_from(["a", "b", "c"]))
    def end_session(self, session: str) -> None:
        assert self.d.end_session(self.launcher, session) == []

    @rule(i=index)
    @precondition(lambda self: len(self.callers) > 2)
    def caller_gone(self, i: int) -> None:
        caller = self.callers.pop(i % len(self.callers))
        self.gates.discard(caller)
        self.keeps.discard(caller)
        for key in [key for key, asked in self.calls.items() if asked.caller == caller and asked.open]:
            self._give_up(key)
        self.d.goodbye(caller)
        self._follow()

    @rule(i=index)
    @precondition(lambda self: self.callers)
    def caller_out_of_sight(self, i: int) -> None:
        """The broker gives its calls up; when it is back, it sends them again as further attempts."""
        caller = self.callers.pop(i % len(self.callers))
        self.gates.discard(caller)
        self.away.append(caller)
        for key in [key for key, asked in self.calls.items() if asked.caller == caller and asked.open]:
            self._give_up(key)
            self.calls[key[0], key[1] + 1] = Asked(caller, self.calls[key].fields, sent=False)
        self.d.unsendable(b"c" + caller)
        self._follow()

    @rule(i=index)
    @precondition(lambda self: self.away)
    def caller_back(self, i: int) -> None:
        """It sends again all that it waits for."""
        self._caller_back(i)

    def _caller_back(self, i: int) -> None:
        if not self.away:
            return
        caller = self.away.pop(i % len(self.away))
        self.awaited.discard(caller)
        self.gates |= {caller} & self.keeps
        self.d.caller(caller.decode().rstrip("."), gates=[["engine", "update"]] if caller in self.keeps else [])
        self.callers.append(caller)
        self._follow()
        for key in [key for key, asked in self.calls.items() if asked.caller == caller and asked.open]:
            self._send(key, self.calls[key], incarnation=0)

    # ---- the broker, and time ---------------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: len(self.leased) > 1 and self.callers)
    def restart(self) -> None:
        """The broker dies and another takes its place. Nobody is known to it but the launcher."""
        self.awaited, self.until, self.claimed = self.gates, self.d.now + RECOVER_S, self.d.now + CLAIM_S
        members = [("engine", twin.name, twin.epoch) for twin in self.twins.values() if twin.known]
        self.d.restart(*members, holders=sorted(self.awaited))
        self.d.launcher()
        self.leased, self.directed, self.out_of_reach = {}, set(), {}
        self.version, self.gates = 0, set()
        self.away, self.callers = self.away + self.callers, []
        for twin in self.twins.values():
            twin.known = twin.deaf = False
            if twin.slow:
                self.d.health(self.launcher, twin.name, twin.epoch, slow=True)
        for asked in self.calls.values():
            asked.sent = False
        self._follow()

    @rule(count=st.integers(1, 6), again=st.integers(0, 2), steps=st.lists(index, min_size=3, max_size=12))
    def restart_under_load(self, count: int, again: int, steps: list[int]) -> None:
        """All of it at once, for most runs of single rules never come to it."""
        for i in range(count if self.callers else 0):
            self.call(1, i, "abc"[i % 3], -1, (again + i) % 3, group="gh"[i % 2])
        if len(self.leased) > 1 and self.callers:
            self.restart()
        for step in steps:
            (self.rejoin, self._caller_back, self._busy_answers, self.cancel)[step % 4](step)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def tick(self, seconds: float) -> None:
        now = self.d.now + seconds
        for nonce in [nonce for nonce, until in self.out_of_reach.items() if until <= now]:
            self._explained(nonce)
        if now >= self.until:
            self.awaited = set()
        self.d.tick(seconds)
        self._follow()
        for key, asked in self.calls.items():
            assert not (self._waits(key) and asked.deadline is not None and asked.deadline <= now), "overdue"

    @invariant()
    def counts_are_the_members_own(self) -> None:
        """And the model's, beyond the credits only for what members brought with them."""
        for twin in self.twins.values():
            if twin.known:
                count = sum(at == twin.nonce and key not in self.directed for key, at in self.leased.items())
                member = self.d.member(twin.name)
                assert member.in_flight == count
                assert count == len([key for key in twin.running if key not in self.directed | twin.stray])
                assert member.suspects == sum(lease.suspect for lease in member.leases.values())
                tried = [lease for lease in member.leases.values() if lease.suspect and not lease.begun]
                assert len(tried) <= 1, "suspects meet"
                others = [
                    lease for lease in member.leases.values() if not (lease.proven or lease.suspect or lease.begun)
                ]
                assert not (tried and any(lease.since > tried[0].since for lease in others)), "a suspect has company"
                assert (member.state == "draining") == twin.draining

    @invariant()
    def who_is_behind_is_stale_and_knows_it(self) -> None:
        """Unless somebody else brings the weights; all others are at the highest version there is."""
        pool = self.d.core.pools["engine"]
        assert (pool.version, {caller for caller, _ in pool.gates}) == (self.version, self.gates)
        for twin in self.twins.values():
            state = self.d.member(twin.name).state if twin.known else ""
            if state in ("ready", "slow", "stale", "asleep"):
                assert twin.asleep == (state == "asleep")
            if state in ("ready", "slow"):
                assert twin.version == self.version
            elif state == "stale":
                assert twin.version < self.version
                assert self.gates or twin.deaf or twin.outdated == self.version

    @invariant()
    def waiting_calls_are_the_models(self) -> None:
        """And what the broker knows of callers is what they wait for."""
        assert self.d.core.dispatch.pending == sum(map(self._waits, self.calls))
        own = self.d.core.incarnation
        assert sum(entry.call.incarnation == own for entry in self.d.core.dispatch._waiting.values()) <= 6
        for caller in self.callers:
            known = {(call[8:], attempt) for call, attempt in self.d.core.roster.callers[caller].calls}
            assert known >= {key for key, asked in self.calls.items() if asked.caller == caller and asked.open}
            assert all(key in self.leased or self._waits(key) for key in known)

    @invariant()
    def nobody_waits_where_there_is_room(self) -> None:
        """A call waits only while every member, or its session's member, is full; a suspect, while none is fit."""
        pool = self.d.core.pools["engine"]
        if pool.waiting:
            assert not any(m.has_room for m in pool.members.values())
        if pool.suspects:
            assert pool.for_suspect() is None
        for m in pool.members.values():
            assert not (m.waiting and m.has_room)
            assert not (m.waiting and not m.takes_calls)

    @invariant()
    def only_sessions_in_flight_exceed_the_cache(self) -> None:
        """Idle sessions never outnumber the cache, nor do groups."""
        assert len(self.d.core.dispatch.sessions._idle) <= 2
        assert len(self.d.core.pools["engine"].groups or ()) <= self.routing.groups

    def teardown(self) -> None:
        """All come back, load the latest weights and answer: then nothing is held, and every call that was not given up
        has its answer."""
        self.tick(PULSE_S)  # notices whom it does not reach
        while self.away:
            self._caller_back(0)
        while self._twin(0, known=False) is not None:
            self.rejoin(0)
        self.tick(CLAIM_S)
        for number in range(len(self.twins)):
            self.sleep(number, False, 0)
            self.renew(number, 0)
        while self.gates:
            self.gate(self.callers.index(min(self.gates)), closed=False)
        self.hello("m0", 3)
        while any(twin.running for twin in self.twins.values()):
            self._busy_answers(0)
        assert self.d.quiet()
        assert not self.d.core.dispatch.sessions._active
        assert not self.d.core.restless
        for key, asked in self.calls.items():
            assert asked.answers == (0 if asked.given_up else 1), key


class BrokerWithPolicies(Broker):
    """Nothing of it changes where sessions move and groups meet."""

    routing = routing({"group_over": (1, 1.0), "rebind_over": (0, 1.0)}, 2)


for machine, examples in ((Broker, 150), (BrokerWithPolicies, 100)):
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine.TestCase.__doc__ = (
        "Counts are the model's, waiting calls are served where there is room, all is zero in the end."
    )
    machine.TestCase.runTest.__doc__ = machine.TestCase.__doc__
TestBroker = Broker.TestCase
TestBrokerWithPolicies = BrokerWithPolicies.TestCase
pytestmark = pytest.mark.timeout(300)
