"""Calls: who gets them, who waits, who is answered.

Every call ends in exactly one answer, unless its caller gave it up or is gone. A lease is held from the moment a call
is handed to a member until the member has answered, or is gone; a cancelled call keeps its lease until the member says
that it has stopped, so that the counts here equal the members' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from zagent.broker.pool import Caller, Lease, Member, Pool, State, Waiting
from zagent.broker.sticky import Sessions
from zagent.errors import (
    CallerError,
    DeadlineExceeded,
    EncodeError,
    MemberLost,
    Overloaded,
    Refused,
    ZagentError,
    to_wire,
)
from zagent.wire.codec import Buffer, encode_body, encode_header
from zagent.wire.messages import Call, Cancel, Failure, Reply, may_repeat

Frames: TypeAlias = "Sequence[Buffer]"
Send: TypeAlias = "Callable[[bytes, Frames], None]"


class Assignment(NamedTuple):
    """Event record: a call was given to a member."""

    now: float  #: s
    pool: str
    session: str
    member: str
    #: "new" (first call of a session, or no session), "sticky", or "rebound" (its former member takes no calls).
    why: str
    #: Requests in flight at every member that takes calls, before this one.
    in_flight: dict[str, int]


class Dispatch:
    """Leases, waiting calls and sessions of all pools.

    Args:
        pools: by name.
        send: takes (identity, frames) of each message to go out.
        max_pending: calls that may wait.
        record: called with each `Assignment`, or None.
    """

    def __init__(
        self,
        pools: dict[str, Pool],
        send: Send,
        sessions: Sessions,
        max_pending: int,
        record: Callable[[Assignment], None] | None,
    ) -> None:
        self._pools = pools
        self._send = send
        self.sessions = sessions
        self._max_pending = max_pending
        self._record = record
        self._leases: dict[bytes, Lease] = {}  # by call id
        self._directed: dict[bytes, Lease] = {}  # calls to one named member, outside its credits
        self._waiting: dict[bytes, Waiting] = {}
        self._arrivals = 0

    def knows(self, call: bytes) -> bool:
        """Whether a call of that id is waiting or at a member."""
        return call in self._leases or call in self._waiting or call in self._directed

    @property
    def pending(self) -> int:
        """Calls that wait for a member."""
        return len(self._waiting)

    # ---- in ---------------------------------------------------------------------------------------------------------

    def submit(self, caller: Caller, to: bytes, call: Call, frames: Frames, now: float) -> None:
        """A new call, to be answered on lane ``to``: balanced, or for one named member on its control lane."""
        pool = self._pools.get(call.pool)
        if pool is None:
            self.fail(to, call, CallerError(f"no pool {call.pool!r} here, only {sorted(self._pools)}"))
        elif call.member:
            self._direct(pool, caller, to, call, frames)
        elif pool.abandoned is not None:
            self._answer(to, call.call, call.attempt, pool.abandoned)
        else:
            self._arrivals += 1
            deadline = now + call.remaining_ms / 1000 if call.remaining_ms >= 0 else None
            self._route(pool, Waiting(call, frames, caller, to, now, self._arrivals, deadline), now)

    def _direct(self, pool: Pool, caller: Caller, to: bytes, call: Call, frames: Frames) -> None:
        member = pool.members.get(call.member)
        if member is None or member.state is State.DEAD:
            self.fail(to, call, MemberLost(f"no live member {call.member!r} in pool {pool.name!r}"))
            return
        self._directed[call.call] = Lease(call.call, call.attempt, caller, to, member, None, call.method)
        caller.calls.add(call.call)
        self._send(member.control, frames)

    def _route(self, pool: Pool, entry: Waiting, now: float) -> None:
        """Give a call to a member, or let it wait."""
        session = entry.call.session
        key = (pool.name, session) if session else None
        bound = self.sessions.member(key) if key else None
        member = bound or pool.least()
        if member is None or not member.has_room:
            self._wait(pool, member, entry)
            return
        if self._record is not None:
            self._record(self._assignment(pool, session, member, bound, now))
        self._assign(pool, entry, member, key, now)

    def _assign(self, pool: Pool, entry: Waiting, member: Member, key: tuple[str, str] | None, now: float) -> None:
        call, frames = entry.call, entry.frames
        if self._waiting.pop(call.call, None) is not None and entry.deadline is not None:
            remaining = max(0, min(call.remaining_ms, int((entry.deadline - now) * 1000)))  # floats round up, too
            try:
                frames = [encode_header(call._replace(remaining_ms=remaining)), *frames[1:]]
            except EncodeError as error:  # a header at the very limit, to which fields that were left out are added
                entry.caller.calls.discard(call.call)
                self.fail(entry.to, call, error)
                return
        lease = Lease(call.call, call.attempt, entry.caller, entry.to, member, key, call.method)
        self._leases[call.call] = lease
        entry.caller.calls.add(call.call)
        if key:
            self.sessions.hold(key, member)
        pool.lease(lease)
        self._send(member.data, frames)

    def _wait(self, pool: Pool, member: Member | None, entry: Waiting) -> None:
        call = entry.call
        if call.call not in self._waiting:
            if len(self._waiting) >= self._max_pending:
                self.fail(entry.to, call, Overloaded(f"{self._max_pending} calls wait already (broker.max_pending)"))
                return
            self._waiting[call.call] = entry
            entry.caller.calls.add(call.call)
        (pool.waiting if member is None else member.waiting).put(entry)

    def feed(self, pool: Pool, now: float) -> None:
        """Give the pool's waiting calls to members that have room, oldest first."""
        while pool.waiting and pool.least() is not None:
            self._route(pool, pool.waiting.take(), now)

    def _feed_from(self, pool: Pool, member: Member, now: float) -> None:
        """``member`` has room again: its own sticky calls and the pool's, in order of arrival."""
        while member.waiting and member.has_room:
            older = pool.waiting and pool.waiting.first() < member.waiting.first()
            self._route(pool, (pool.waiting if older else member.waiting).take(), now)
        self.feed(pool, now)

    # ---- out --------------------------------------------------------------------------------------------------------

    def answer(self, member: Member, answer: Reply | Failure, frames: Frames, now: float) -> bool:
        """A member's answer; False if nobody waits for it any more (an old attempt, another member's call)."""
        lease = self._leases.get(answer.call) or self._directed.get(answer.call)
        if lease is None or lease.attempt != answer.attempt or lease.member is not member:
            return False
        self._release(lease, accepted=isinstance(answer, Reply) or answer.accepted)
        if not lease.cancelled:
            self._send(lease.to, frames)
        pool = self._pools[member.pool]
        if member.waiting or pool.waiting:
            self._feed_from(pool, member, now)
        return True

    def _release(self, lease: Lease, *, accepted: bool) -> None:
        lease.caller.calls.discard(lease.call)
        if self._directed.pop(lease.call, None) is not None:
            return
        del self._leases[lease.call]
        self._pools[lease.member.pool].release(lease)
        if lease.session is not None:
            self.sessions.release(lease.session, lease.member, accepted=accepted)

    def give_up(self, call: bytes) -> None:
        """Nobody waits for that call any more: stop it where it runs."""
        entry = self._waiting.get(call)
        if entry is not None:
            self._forget(entry)
            return
        lease = self._leases.get(call) or self._directed.get(call)
        if lease is not None and not lease.cancelled:
            lease.cancelled = True
            self._send(lease.member.control, [encode_header(Cancel(lease.call, lease.attempt))])

    def _forget(self, entry: Waiting) -> None:
        del self._waiting[entry.call.call]
        entry.caller.calls.discard(entry.call.call)
        if entry.queue is not None:
            del entry.queue[entry.number]

    def stop(self, member: Member) -> None:
        """Tell a live member that nobody will want what it runs."""
        for lease in [*member.leases.values(), *self._directed_at(member)]:
            if not lease.cancelled:
                self._send(member.control, [encode_header(Cancel(lease.call, lease.attempt))])

    def lost(self, member: Member, reason: str, now: float) -> None:
        """A member is gone (its state says so): its calls fail, what waited for it waits for any."""
        for lease in [*member.leases.values(), *self._directed_at(member)]:
            repeatable = may_repeat(lease.method, member.facts)
            self._end(lease, MemberLost(f"{member.name} is gone: {reason}", repeatable=repeatable))
        self.requeue(member, now)

    def undelivered(self, call: bytes) -> None:
        """The call could not be handed to its member, which is gone: nobody has begun it."""
        lease = self._leases.get(call) or self._directed.get(call)
        if lease is not None:
            self._end(lease, Refused(f"{lease.member.name} is gone, and never had the call"))

    def _end(self, lease: Lease, error: ZagentError) -> None:
        self._release(lease, accepted=False)
        if not lease.cancelled:
            self._fail(lease.to, lease.call, lease.attempt, error)

    def abandon(self, pool: Pool, error: Frames) -> None:
        """Nobody will serve that pool any more: what waits there, and what still comes, ends in ``error`` (a body)."""
        pool.abandoned = error
        for entry in [*pool.waiting.values()]:
            self._forget(entry)
            self._answer(entry.to, entry.call.call, entry.call.attempt, error)

    def _directed_at(self, member: Member) -> list[Lease]:
        return [lease for lease in self._directed.values() if lease.member is member]

    def requeue(self, member: Member, now: float) -> None:
        """What waited for room at a member that takes no more waits for any, in order of arrival."""
        pool = self._pools[member.pool]
        entries = sorted([*member.waiting.values(), *pool.waiting.values()], key=lambda entry: entry.number)
        member.waiting.clear()
        pool.waiting.clear()
        for entry in entries:
            pool.waiting.put(entry)
        self.feed(pool, now)

    def expire(self, now: float) -> None:
        """Answer the waiting calls whose time is up."""
        for entry in [e for e in self._waiting.values() if e.deadline is not None and e.deadline <= now]:
            self._forget(entry)
            text = f"waited {now - entry.arrived:.1f} s for a member of pool {entry.call.pool!r}"
            self.fail(entry.to, entry.call, DeadlineExceeded(text))

    def fail(self, to: bytes, call: Call, error: ZagentError) -> None:
        """Answer a call with an error of the broker's own."""
        self._fail(to, call.call, call.attempt, error)

    def _fail(self, to: bytes, call: bytes, attempt: int, error: ZagentError) -> None:
        self._answer(to, call, attempt, encode_body(to_wire(error)))

    def _answer(self, to: bytes, call: bytes, attempt: int, error: Frames) -> None:
        self._send(to, [encode_header(Failure(call, attempt, False)), *error])

    def _assignment(self, pool: Pool, session: str, member: Member, bound: Member | None, now: float) -> Assignment:
        known = bool(session) and self.sessions.known((pool.name, session))
        why = "sticky" if bound else "rebound" if known else "new"
        counts: dict[str, Any] = {m.name: m.in_flight for m in pool.members.values() if m.takes_calls}
        return Assignment(now, pool.name, session, member.name, why, counts)
