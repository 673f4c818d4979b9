"""Calls: who gets them, who waits, who is answered.

Every call ends in exactly one answer, unless its caller gave it up or is gone. A lease is held from the moment a call
is handed to a member until the member has answered, or is gone; a cancelled call keeps its lease until the member says
that it has stopped, so that the counts here equal the members' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zagent.broker.held import Held, Listed
from zagent.broker.leases import Frames, Leases, Send
from zagent.broker.pool import Caller, Lease, Member, Pool, State
from zagent.broker.record import Assignment, assignment
from zagent.broker.sticky import Sessions
from zagent.broker.suspects import Suspects
from zagent.broker.waiting import CallKey, Waiting, WaitQueue, Waits
from zagent.errors import (
    CallerError,
    DeadlineExceeded,
    MemberLost,
    Overloaded,
    Refused,
    ZagentError,
    to_wire,
)
from zagent.wire.codec import encode_body, encode_header
from zagent.wire.messages import Call, Failure, Progress, Reply, may_repeat


class Dispatch:
    """Leases, waiting calls and sessions of all pools.

    Args:
        pools: by name.
        send: takes (identity, frames) of each message to go out.
        max_pending: calls that may wait.
        incarnation: this broker's; a call that names another one may have begun before.
        recovering: members are still waited for (until `resume`).
        counters: `replayed` and `claimed` are counted.
        record: called with each `Assignment`, or None.
    """

    def __init__(
        self,
        pools: dict[str, Pool],
        send: Send,
        sessions: Sessions,
        *,
        max_pending: int,
        incarnation: int,
        recovering: bool,
        counters: dict[str, int],
        record: Callable[[Assignment], None] | None,
    ) -> None:
        self._pools = pools
        self._send = send
        self.sessions = sessions
        self._max_pending = max_pending
        self._incarnation = incarnation
        self.recovering = recovering
        self._counters = counters
        self._record = record
        self.leases = Leases(pools, sessions, send)
        self.held = Held(self.leases, sessions)
        self._suspects = Suspects()
        self._waiting = Waits()
        #: Calls to one named member that wait for the end of the recovery.
        self._directed = WaitQueue()
        self._arrivals = 0

    @property
    def pending(self) -> int:
        """Calls that wait for a member."""
        return len(self._waiting)

    # ---- in ---------------------------------------------------------------------------------------------------------

    def submit(self, caller: Caller, to: bytes, call: Call, frames: Frames, now: float) -> None:
        """A call, to be answered on lane ``to``: balanced, or for one named member on its control lane."""
        pool = self._pools.get(call.pool)
        if pool is None:
            self.fail(to, call, CallerError(f"no pool {call.pool!r} here, only {sorted(self._pools)}"))
            return
        self._arrivals += 1
        deadline = now + call.remaining_ms / 1000 if call.remaining_ms >= 0 else None
        entry = Waiting(call[:2], call, frames, caller, to, now, self._arrivals, deadline)
        if call.attempt > 1:
            self.held.overtake(*entry.key)
        if entry.key in self._waiting:
            self._counters["replayed"] += 1
        elif (entry.key in self.leases or self.held) and self._found(pool, entry, now):
            pass
        elif call.member:
            self._direct(pool, entry, now)
        elif pool.abandoned is not None:
            self._answer(to, entry.key, pool.abandoned)
        else:
            self._route(pool, entry, now)

    def _found(self, pool: Pool, entry: Waiting, now: float) -> bool:
        """Whether a member has that call already: it gets the message again, ignores it where it runs the call, and
        sends the answer again where it keeps that."""
        member = self.held.claim(entry.key)
        lease = self.leases.get(entry.key)
        if lease is not None:
            self._counters["replayed" if lease.to else "claimed"] += 1
            if not lease.to:
                self.leases.hand_over(lease, entry, suspect=self._suspects.suspected(entry.call))
            if not lease.cancelled and lease.member.state is not State.DEAD:
                lease.begun = True
                self._send(lease.member.data, entry.message(now))
            return True
        if member is None:
            return False
        self._counters["claimed"] += 1
        session = (pool.name, entry.call.session) if entry.call.session else None
        self._assign(entry, member, session, now, begun=True)
        return True

    def _direct(self, pool: Pool, entry: Waiting, now: float) -> None:
        call = entry.call
        member = pool.members.get(call.member)
        if member is None and self.recovering:
            self._wait(self._directed, entry)
        elif member is None or member.state is State.DEAD:
            self.fail(entry.to, call, MemberLost(f"no live member {call.member!r} in pool {pool.name!r}"))
        elif self._may_begin(entry, member):
            self.leases.take(Lease(entry.key, entry.caller, entry.to, member, None, call.method, directed=True))
            self._send(member.control, entry.message(now))

    def _route(self, pool: Pool, entry: Waiting, now: float) -> None:
        """Give a call to a member, or let it wait."""
        session = entry.call.session
        key = (pool.name, session) if session else None
        bound = self.sessions.member(key) if key else None
        kin = None
        if self._suspects.suspected(entry.call):
            entry.aboard_s = self._suspects.aboard_s(entry.call.call)
            member = pool.for_suspect(self._suspects.died(entry.call.call))
            queue: WaitQueue = pool.suspects
        else:
            kin = pool.groups.get(entry.call.group) if pool.groups is not None and bound is None else None
            member = pool.policy.choose(pool, None if bound is None or bound.on_trial else bound, kin)
            queue = pool.waiting if member is None else member.waiting
            member = member if member is not None and member.has_room else None
        if member is None:
            self._wait(queue, entry)
        elif entry.call.incarnation == self._incarnation or self._may_begin(entry, member):
            if self._record is not None:
                known = key is not None and self.sessions.known(key)
                why = "sticky" if member is bound else "rebound" if known else "group" if member is kin else "new"
                self._record(assignment(pool, session, member.name, why, now))
            if pool.groups is not None and entry.call.group and member is not bound:
                pool.groups[entry.call.group] = member
            self._assign(entry, member, key, now)

    def _may_begin(self, entry: Waiting, member: Member) -> bool:
        """Whether a call may be given to a member that does not have it; if not, it is answered. One that names another
        broker, or none, may have begun under that, at a member that is gone."""
        call = entry.call
        if call.incarnation == self._incarnation or may_repeat(call.method, member.facts):
            return True
        self._waiting.forget(entry)
        text = f"{call.method!r} may have begun before the broker lost sight of it, and must not be run twice"
        self.fail(entry.to, call, MemberLost(text, repeatable=False))
        return False

    def _assign(
        self, entry: Waiting, member: Member, session: tuple[str, str] | None, now: float, *, begun: bool = False
    ) -> None:
        self._waiting.pop(entry.key, None)
        call = entry.call
        suspect = self._suspects.suspected(call)
        self.leases.take(
            Lease(entry.key, entry.caller, entry.to, member, session, call.method, suspect, begun=begun, since=now)
        )
        self._send(member.data, entry.frames if now == entry.arrived else entry.message(now))

    def _wait(self, queue: WaitQueue, entry: Waiting) -> None:
        found_again = entry.call.incarnation != self._incarnation  # it may run: another attempt would run beside it
        if len(self._waiting) < self._max_pending or entry.key in self._waiting or found_again:
            self._waiting.put(entry, queue)
        else:
            text = f"{self._max_pending} calls wait already (broker.max_pending)"
            self.fail(entry.to, entry.call, Overloaded(text))

    def feed(self, pool: Pool, now: float) -> None:
        """Give the pool's waiting calls to members that have room, in their order; suspects when no other can go."""
        while pool.waiting and pool.least() is not None:
            self._route(pool, pool.waiting.take(), now)
        while pool.suspects and pool.for_suspect() is not None:
            self._route(pool, pool.suspects.take(), now)

    def acquit(self, pool: Pool, now: float) -> None:
        """Suspects that are none any more go on as others do, and so does what waited for them."""
        for entry in pool.suspects.empty():
            (pool.suspects if self._suspects.suspected(entry.call) else pool.waiting).put(entry)
        for member in pool.acquit(lambda lease: self._suspects.acquitted(lease, now)):
            self._feed_from(pool, member, now)

    def _feed_from(self, pool: Pool, member: Member, now: float) -> None:
        """``member`` has room again: its own sticky calls and the pool's, in their order."""
        while member.waiting and member.has_room:
            before = pool.waiting and pool.waiting.first().turn < member.waiting.first().turn
            self._route(pool, (pool.waiting if before else member.waiting).take(), now)
        self.feed(pool, now)

    # ---- after a restart --------------------------------------------------------------------------------------------

    def adopt(self, member: Member, calls: Sequence[Listed], now: float, *, forgotten: Member | None) -> None:
        """A member comes with ``calls``; those that wait here are found. ``forgotten``: who it was here before."""
        entries = [self._waiting[one[:2]] for one in calls if one[:2] in self._waiting]
        for entry in entries:
            self._waiting.forget(entry)
        wanted = {entry.key for entry in entries}
        self.held.adopt(member, calls, wanted, forgotten=forgotten)
        for entry in entries:
            self._found(self._pools[member.pool], entry, now)

    def resume(self, now: float) -> None:
        """Everybody who is expected is back, or late: route what waits."""
        self.recovering = False
        for entry in self._directed.empty():
            self._waiting.forget(entry)
            self._direct(self._pools[entry.call.pool], entry, now)
        for pool in self._pools.values():
            self.feed(pool, now)

    # ---- out --------------------------------------------------------------------------------------------------------

    def answer(self, member: Member, answer: Reply | Failure, frames: Frames, now: float) -> bool:
        """A member's answer; False if nobody waits for it any more (an old attempt, another member's call)."""
        lease = self.leases.get(answer[:2])
        if lease is None or lease.member is not member:
            return False
        self.leases.release(lease, accepted=isinstance(answer, Reply) or answer.accepted)
        if lease.to:
            self._send(lease.to, frames)
        if self._waiting:
            self._feed_from(self._pools[member.pool], member, now)
        return True

    def progress(self, member: Member, progress: Progress, frames: Frames) -> None:
        """A part of an answer, for whoever waits for the whole."""
        lease = self.leases.get(progress[:2])
        if lease is not None and lease.member is member and lease.to:
            self._send(lease.to, frames)

    def give_up(self, key: CallKey) -> bool:
        """Nobody waits for that call any more: stop it where it runs. False if it is not known."""
        entry, lease = self._waiting.get(key), self.leases.get(key)
        if entry is not None:
            self._waiting.forget(entry)
        elif lease is not None:
            self.leases.cancel(lease)
        return entry is not None or lease is not None

    def lost(self, member: Member, reason: str, now: float, *, crashed: bool) -> None:
        """A member is gone (its state says so), ``crashed`` if by itself: its calls fail, what waited for it waits for
        any."""
        pool, leases = self._pools[member.pool], self.leases.at(member)
        others = sum(other.takes_calls for other in pool.members.values())
        for lease, error in self._suspects.verdicts(leases, member, others, reason, now, crashed=crashed):
            self._end(lease, error)
        self.acquit(pool, now)
        self.requeue([member], now)

    def undelivered(self, key: CallKey) -> None:
        """The call could not be handed to its member, which is gone: unless that had it before, nobody has begun it."""
        lease = self.leases.get(key)
        if lease is not None and not lease.begun:
            self._end(lease, Refused(f"{lease.member.name} is gone, and never had the call"))

    def _end(self, lease: Lease, error: ZagentError) -> None:
        self.leases.release(lease, accepted=False)
        if lease.to:
            self._answer(lease.to, lease.key, encode_body(to_wire(error)))

    def abandon(self, pool: Pool, error: Frames) -> None:
        """Nobody will serve that pool any more: what waits there, and what still comes, ends in ``error`` (a body)."""
        pool.abandoned = error
        for entry in [*pool.waiting.empty(), *pool.suspects.empty()]:
            self._waiting.forget(entry)
            self._answer(entry.to, entry.key, error)

    def requeue(self, members: Sequence[Member], now: float) -> None:
        """What waited for room at these ``members`` of one pool waits for any, in order."""
        pool = self._pools[members[0].pool]
        queues = [pool.waiting, *(member.waiting for member in members)]
        for entry in sorted((entry for queue in queues for entry in queue.empty()), key=lambda entry: entry.turn):
            pool.waiting.put(entry)
        self.feed(pool, now)

    def expire(self, now: float) -> None:
        """Answer the waiting calls whose time is up."""
        for pool in filter(Pool.tries_suspects, self._pools.values()):
            self.acquit(pool, now)
        for entry in self._waiting.overdue(now):
            self._waiting.forget(entry)
            text = f"waited {now - entry.arrived:.1f} s for a member of pool {entry.call.pool!r}"
            self.fail(entry.to, entry.call, DeadlineExceeded(text))

    def fail(self, to: bytes, call: Call, error: ZagentError) -> None:
        """Answer a call with an error of the broker's own."""
        self._answer(to, call[:2], encode_body(to_wire(error)))

    def _answer(self, to: bytes, key: CallKey, error: Frames) -> None:
        self._send(to, [encode_header(Failure(*key, False)), *error])
