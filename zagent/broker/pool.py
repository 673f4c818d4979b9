"""Pools of members: states, leases, and the choice of the member with the fewest requests in flight."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import Any

from zagent.wire.messages import Call


class State(StrEnum):
    """A member's life; `TRANSITIONS` says what may follow what."""

    JOINING = "joining"  #: said hello on one lane
    READY = "ready"  #: takes calls
    DRAINING = "draining"  #: finishes what it has, takes nothing new
    DEAD = "dead"  #: gone; its leases are revoked


TRANSITIONS: dict[State, frozenset[State]] = {
    State.JOINING: frozenset({State.READY, State.DRAINING, State.DEAD}),
    State.READY: frozenset({State.DRAINING, State.DEAD}),
    State.DRAINING: frozenset({State.DEAD}),
    State.DEAD: frozenset(),
}


@dataclass(slots=True, eq=False)
class Caller:
    """Who waits for answers: a link, by its two lanes' identities."""

    data: bytes
    control: bytes
    calls: set[bytes] = field(default_factory=set)  #: ids of its calls that the broker knows


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that no member has (yet)."""

    call: Call
    frames: Sequence[Any]
    caller: Caller
    to: bytes  #: identity of the lane that wants the answer
    arrived: float  #: s
    number: int  #: order of arrival
    deadline: float | None = None  #: s
    queue: WaitQueue | None = None  #: where it waits


class WaitQueue(OrderedDict[int, Waiting]):
    """Waiting calls by arrival number; first in, first out, and any one can be taken out at O(1)."""

    def put(self, entry: Waiting) -> None:
        entry.queue = self
        self[entry.number] = entry

    def first(self) -> int:
        """Arrival number of the oldest. Raises `StopIteration` when empty."""
        return next(iter(self))

    def take(self) -> Waiting:
        """The oldest, removed."""
        entry = self.popitem(last=False)[1]
        entry.queue = None
        return entry


@dataclass(slots=True, eq=False)
class Lease:
    """A call that a member has. Held until the call is answered or the member is gone."""

    call: bytes
    attempt: int
    caller: Caller
    to: bytes
    member: Member
    session: Hashable | None
    method: str = ""
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Member:
    """One member of a pool, for one life (epoch): one that comes back is a new `Member`."""

    pool: str
    name: str
    epoch: int
    credits: int
    data: bytes  #: identity of its data lane
    control: bytes
    facts: dict[str, Any] = field(default_factory=dict)
    state: State = State.JOINING
    leases: dict[bytes, Lease] = field(default_factory=dict)
    #: Sticky calls that wait for room here.
    waiting: WaitQueue = field(default_factory=WaitQueue)
    total: int = 0  #: calls ever given
    chosen: int = 0  #: when it was last chosen (a count, not a time)

    @property
    def in_flight(self) -> int:
        return len(self.leases)

    @property
    def takes_calls(self) -> bool:
        return self.state is State.READY

    @property
    def has_room(self) -> bool:
        return self.state is State.READY and len(self.leases) < self.credits

    def become(self, state: State) -> None:
        """Change state. Raises `ValueError` where `TRANSITIONS` has no such step; nothing changes then."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"member {self.name} cannot go from {self.state} to {state}")
        self.state = state


class Pool:
    """Members of one kind, balanced by requests in flight, ties to the least recently chosen.

    The heap holds (in flight, last chosen, member) and is cleaned lazily: an entry that no longer describes its member
    is skipped when it surfaces, and the heap is rebuilt when such entries outnumber the members, so each operation is
    O(log members) on average.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[str, Member] = {}
        #: Calls that wait for any member.
        self.waiting = WaitQueue()
        #: Body of the error that calls end in, once no member is left and none will come.
        self.abandoned: Sequence[Any] | None = None
        self._heap: list[tuple[int, int, Member]] = []
        self._choices = 0

    def add(self, member: Member) -> None:
        """A member that said hello; replaces one of the same name."""
        self.members[member.name] = member
        self.abandoned = None

    def ready(self, member: Member) -> None:
        """Let it take calls. It counts as just chosen, so that a newcomer does not win all ties."""
        member.become(State.READY)
        self._choices += 1
        member.chosen = self._choices
        self._offer(member)

    def least(self) -> Member | None:
        """The member to give the next call; None while all are full or none is ready."""
        while self._heap:
            in_flight, chosen, member = self._heap[0]
            if member.has_room and in_flight == member.in_flight and chosen == member.chosen:
                return member
            heappop(self._heap)
        return None

    def lease(self, lease: Lease) -> None:
        """Book a call on its member."""
        member = lease.member
        member.leases[lease.call] = lease
        member.total += 1
        self._choices += 1
        member.chosen = self._choices
        self._offer(member)

    def release(self, lease: Lease) -> bool:
        """Give a lease back; False when that happened before (release is idempotent)."""
        member = lease.member
        if member.leases.pop(lease.call, None) is None:
            return False
        self._offer(member)
        return True

    def _offer(self, member: Member) -> None:
        if not member.has_room:
            return
        # Two entries a member and some slack: rebuilding then costs O(1) per operation, spread out.
        if len(self._heap) > 2 * len(self.members) + 64:
            self._heap = [(m.in_flight, m.chosen, m) for m in self.members.values() if m.has_room]
            heapify(self._heap)
        else:
            heappush(self._heap, (member.in_flight, member.chosen, member))
