"""What follows when peers come, leave, fall silent or fall behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zagent.broker.dispatch import Dispatch
from zagent.broker.facts import facts_of
from zagent.broker.gates import Gates
from zagent.broker.held import Listed, listed
from zagent.broker.leases import Frames, Send
from zagent.broker.pool import Caller, Member, Pool, State
from zagent.broker.roster import Roster
from zagent.wire.codec import encode_body, encode_header
from zagent.wire.messages import Exited, Goodbye, Health, Hello, HelloWanted, Outdated, Welcome

#: After a restart the broker waits this long for the members that were alive, in seconds: peers try to reconnect ten
#: times a second.
RECOVER_S = 2.0
#: Calls that members have from before are kept for their callers this long after a restart, in seconds.
CLAIM_S = 10.0
#: A member that cannot be reached has been seen to end by the launcher, too; its word comes this much later at most, in
#: seconds, or not at all.
EXPLAIN_S = 1.0

#: A member's life: pool, name, epoch.
Life = tuple[str, str, int]


class Presence:
    """Keeps members' states, and tells the dispatch what becomes of calls.

    Args:
        counters: `crashes` are counted.
        facts: told to every peer in its welcome.
        expected: members (pool, name, epoch) that were alive when this broker was started in another's place, and
            callers (nonces) that held gates; nothing is routed until they are back, or `RECOVER_S` have passed.
        now: when the broker starts, s.
    """

    def __init__(
        self,
        roster: Roster,
        pools: dict[str, Pool],
        dispatch: Dispatch,
        send: Send,
        counters: dict[str, int],
        *,
        gates: Gates,
        incarnation: int,
        facts: dict[str, Any],
        expected: Iterable[Life | bytes],
        now: float,
    ) -> None:
        self._roster, self._pools, self._dispatch, self._send = roster, pools, dispatch, send
        self._gates, self._counters = gates, counters
        self._incarnation = incarnation
        self._facts = facts
        self._expected = set(expected)
        self._started = now
        #: Whom the launcher calls slow; it may say so before they are here.
        self._slow: set[Life] = set()
        #: Members that could not be reached, and until when the launcher may say why.
        self._unexplained: dict[Member, float] = {}

    @property
    def restless(self) -> bool:
        """Whether the next ticks do something."""
        return bool(self._unexplained) or self._dispatch.recovering or bool(self._dispatch.held)

    # ---- coming -----------------------------------------------------------------------------------------------------

    def hello(self, sender: bytes, caller: Caller | None, hello: Hello, body: Frames, now: float) -> None:
        """A hello on one lane, of ``caller`` if it is here. Raises `ProtocolError` where it is refused."""
        if caller is not None and hello.incarnation == self._incarnation and hello.connection > caller.connection:
            self.unreachable(sender, now)  # it was, for a moment, and what was under way then is lost
        elif caller is not None:
            caller.connection = max(caller.connection, hello.connection)  # the lanes may tell of it at different times
            if sender == caller.control:  # once for both lanes
                self._renewed(caller, facts_of(hello, body, known=self._roster.knows_secret(hello)), now)
            return
        facts = facts_of(hello, body, known=self._roster.knows_secret(hello))
        held = listed(facts.pop("held", []))
        caller = self._roster.hello(sender, hello, facts)
        if caller is not None:
            self._gates.hello(caller, facts, all_here=not self._dispatch.recovering)
            self._welcome(caller, known=False)
            if caller.member is not None:
                self._join(caller.member, held, now)
            self._back(caller.nonce, now)

    def _welcome(self, caller: Caller, *, known: bool) -> None:
        self._send(caller.control, [encode_header(Welcome(self._incarnation, known)), *encode_body(self._facts)])

    def _join(self, member: Member, held: Sequence[Listed], now: float) -> None:
        pool = self._pools[member.pool]
        former = pool.members.get(member.name)
        forgotten = former is not None and former.epoch == member.epoch  # whoever had calls there has gone on
        if former is not None:
            reason = "it was out of reach" if forgotten else f"epoch {member.epoch} took its place"
            self._end(former, reason, now)
        pool.add(member)
        self._dispatch.adopt(member, held, now, forgotten=former if forgotten else None)
        if not self._dispatch.recovering:
            self._admit(pool, member)
            self.set_version(pool, member.version, member.weights, now)
        self._back(_life(member), now)

    def _back(self, who: Life | bytes, now: float) -> None:
        """That member, or caller, need not be waited for."""
        self._expected.discard(who)
        if self._dispatch.recovering and not self._expected:
            self._recovered(now)

    def _recovered(self, now: float) -> None:
        for pool in self._pools.values():
            for member in pool.members.values():
                if member.state is State.JOINING:
                    self._admit(pool, member)
        self._dispatch.resume(now)
        self._woken(now)

    def _admit(self, pool: Pool, member: Member) -> None:
        if member.lacks:  # it could not load newer weights either
            member.become(State.ASLEEP)
        elif member.version < pool.version:
            member.become(State.STALE)
            self._remind(pool, member)
        elif _life(member) in self._slow:
            member.become(State.SLOW)
        else:
            pool.ready(member)

    # ---- versions ---------------------------------------------------------------------------------------------------

    def _renewed(self, caller: Caller, facts: dict[str, Any], now: float) -> None:
        """It is known, and welcome. A member may serve newer weights than before, or have gone to sleep or woken up."""
        self._welcome(caller, known=True)
        member = caller.member
        if member is None:
            return
        slept, says = bool(member.lacks), {"lacks": facts.get("lacks", [])}
        if facts.get("version", 0) > member.version:
            says |= {"version": facts["version"], "weights": facts.get("weights", "")}
        elif says["lacks"] == member.lacks:
            return
        member.facts = {**member.facts, **says}
        pool = self._pools[member.pool]
        if member.lacks and member.state in (State.READY, State.SLOW, State.STALE):
            member.become(State.ASLEEP)
        elif member.state is State.ASLEEP and not member.lacks:
            self._admit(pool, member)
        self.set_version(pool, member.version, member.weights, now)
        if member.state is State.ASLEEP:  # not before it is known who has old weights
            self._dispatch.requeue([member], now)
        if slept and not member.lacks:
            self._woken(now)

    def set_version(self, pool: Pool, version: int, weights: str, now: float) -> None:
        """There are weights of that version: members with older ones get no calls until they have caught up."""
        pool.raise_version(version, weights)
        fallen = []
        for member in pool.members.values():
            behind = member.version < pool.version
            if behind and member.state in (State.READY, State.SLOW):
                member.become(State.STALE)
                fallen.append(member)
            if behind and member.state is State.STALE:
                self._remind(pool, member)
            elif member.state is State.STALE:
                self._admit(pool, member)
        if fallen:  # not before all of them are known: one would get what waited for the other
            self._dispatch.requeue(fallen, now)
        self._dispatch.feed(pool, now)

    def _remind(self, pool: Pool, member: Member) -> None:
        """Whoever has closed the gate updates the members; in between, and those that come later, update themselves."""
        if not pool.gates and member.reminded < pool.version:
            member.reminded = pool.version
            self._send(member.control, [encode_header(Outdated(pool.version, pool.weights))])

    def open_gate(self, pool: Pool, caller: Caller, reason: str, now: float) -> None:
        """That caller has that reason no more."""
        if self._gates.open(pool, caller, reason):
            self._opened(pool, now)

    def _woken(self, now: float) -> None:
        """Nobody sleeps any more, perhaps."""
        for pool in self._pools.values():
            if self._gates.woken(pool):
                self._opened(pool, now)

    def _opened(self, pool: Pool, now: float) -> None:
        members = list(pool.members.values())
        for member in members:
            if member.state is State.STALE:
                self._remind(pool, member)
        if members:  # nobody has ever come to a new broker
            self._dispatch.requeue(members, now)

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def goodbye(self, caller: Caller, message: Goodbye, now: float) -> None:
        """A peer leaves for good."""
        if caller.member is None:
            self._forget(caller, now)
        else:
            self._end(caller.member, message.reason or "it said goodbye", now, final=True, crashed=message.crashed)

    def exited(self, message: Exited, now: float) -> None:
        """The launcher knows how a member's process ended."""
        life = message[:3]
        self._slow.discard(life)
        member = self._roster.member(*life)
        if member is not None:
            self._end(member, message.reason, now, final=True, crashed=message.crashed)
        self._back(life, now)

    def remove(self, member: Member, now: float) -> None:
        """It lives, but is wanted no more, and hears so at its next hello."""
        self._dispatch.leases.stop_all(member)
        self._end(member, "it was removed", now, final=True)
        self._send(member.control, [encode_header(HelloWanted())])

    def unreachable(self, to: bytes, now: float) -> None:
        """A message could not be delivered: the peer is gone. If it was a member, who had its calls is told later, when
        it is known how it ended."""
        caller = self._roster.lanes.get(to)
        if caller is not None:
            self._forget(caller, now)
            if caller.member is not None:
                self._unexplained[caller.member] = now + EXPLAIN_S
                self._dispatch.requeue([caller.member], now)

    def _end(self, member: Member, reason: str, now: float, *, final: bool = False, crashed: bool = False) -> None:
        """That life is over, if it was not before."""
        member.final = member.final or final
        if member.state is not State.DEAD:
            self._forget(self._roster.lanes[member.control], now)
        elif self._unexplained.pop(member, None) is None:
            return
        self._counters["crashes"] += crashed
        self._dispatch.lost(member, reason, now, crashed=crashed)

    def _forget(self, caller: Caller, now: float) -> None:
        """Nobody waits for its calls, nor at its gates; as a member, it is dead."""
        self._roster.leave(caller)
        for call in list(caller.calls):
            self._dispatch.give_up(call)
        if caller.member is not None:
            caller.member.become(State.DEAD)
        for pool in self._gates.gone(caller):
            self._opened(pool, now)

    # ---- in between -------------------------------------------------------------------------------------------------

    def health(self, message: Health, now: float) -> None:
        """A member is spared from now on, or is well again; one that leaves, or is stale, stays that."""
        life = message[:3]
        (self._slow.add if message.slow else self._slow.discard)(life)
        member = self._roster.member(*life)
        if member is None:
            return
        if message.slow and member.state is State.READY:
            member.become(State.SLOW)
            self._dispatch.requeue([member], now)
        elif not message.slow and member.state is State.SLOW:
            pool = self._pools[member.pool]
            pool.ready(member)
            self._dispatch.feed(pool, now)

    def drain(self, member: Member, now: float) -> None:
        """Give it nothing new."""
        if not member.leaves:
            member.become(State.DRAINING)
            self._dispatch.requeue([member], now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._dispatch.recovering and now >= self._started + RECOVER_S:
            self._recovered(now)
        if self._dispatch.held.open and now >= self._started + CLAIM_S:
            self._dispatch.held.close()
        for member in [member for member, until in self._unexplained.items() if until <= now]:
            self._end(member, "it could not be reached", now)


def _life(member: Member) -> Life:
    return member.pool, member.name, member.epoch
