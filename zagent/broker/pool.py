"""Pools of members: states, leases, and the choice of the member with the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import Any

from cachetools import LRUCache

from zagent.broker.routing import STICKY, Routing
from zagent.broker.waiting import CallKey, SuspectQueue, WaitQueue


class State(StrEnum):
    """A member's life; `TRANSITIONS` says what may follow what."""

    JOINING = "joining"  #: here, while others are still waited for after a restart of the broker
    READY = "ready"  #: takes calls
    SLOW = "slow"  #: spared for now: the launcher has no sign of life from it
    STALE = "stale"  #: its weights are older than another's
    ASLEEP = "asleep"  #: it lacks memory, or weights
    DRAINING = "draining"  #: finishes what it has, takes nothing new
    DEAD = "dead"  #: gone; its leases are revoked, at the latest when it is known why


_ENDS = frozenset({State.DRAINING, State.DEAD})
TRANSITIONS: dict[State, frozenset[State]] = {
    State.JOINING: _ENDS | {State.READY, State.SLOW, State.STALE, State.ASLEEP},
    State.READY: _ENDS | {State.SLOW, State.STALE, State.ASLEEP},
    State.SLOW: _ENDS | {State.READY, State.STALE, State.ASLEEP},
    State.STALE: _ENDS | {State.READY, State.SLOW, State.ASLEEP},
    State.ASLEEP: _ENDS | {State.READY, State.SLOW, State.STALE},
    State.DRAINING: frozenset({State.DEAD}),
    State.DEAD: frozenset(),
}


@dataclass(slots=True, eq=False)
class Caller:
    """A peer, as one who waits for answers: a link, by its two lanes' identities."""

    nonce: bytes
    data: bytes
    control: bytes
    trusted: bool = False  #: knows the join secret
    connection: int = 0  #: the latest of its link's that a hello has told of (`Hello.connection`)
    member: Member | None = None  #: what it is beside
    calls: set[CallKey] = field(default_factory=set)  #: its calls that the broker knows


@dataclass(slots=True, eq=False)
class Lease:
    """A call that a member has. Held until the call is answered or the member is gone."""

    key: CallKey
    caller: Caller
    to: bytes  #: identity of the lane that wants the answer; b"" = nobody (any more)
    member: Member
    session: Hashable | None
    method: str = ""
    suspect: bool = False
    proven: bool = False  #: it was a suspect, and is none any more
    directed: bool = False  #: to one named member, outside its credits
    begun: bool = False  #: the member had it before it was sent there (again)
    cancelled: bool = False
    since: float = 0.0  #: s


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
    final: bool = False  #: this life is over, not merely out of reach
    leases: dict[CallKey, Lease] = field(default_factory=dict)
    directed: dict[CallKey, Lease] = field(default_factory=dict)
    suspects: int = 0  #: leases of calls that may be what ends it
    reserved: bool = False  #: for a suspect, once it is empty
    gated: bool = False  #: its pool takes nothing new for now
    reminded: int = 0  #: the version of the weights that it was told to load
    answered: int = 0  #: number of its last answer
    settled: int = 0  #: of the last from before the last pulse
    told: int = 0  #: what it knows of that
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
        return (
            self.state is State.READY
            and len(self.leases) < self.credits
            and not (self.suspects or self.reserved or self.gated)
        )

    @property
    def on_trial(self) -> bool:
        """A suspect runs here, or will as soon as it can do so alone."""
        return self.reserved or self.suspects > 0

    @property
    def unproven(self) -> int:
        """Calls here that have not been tried as suspects."""
        return sum(not lease.proven for lease in self.leases.values())

    @property
    def leaves(self) -> bool:
        """It will never take calls (again)."""
        return self.state in _ENDS

    @property
    def version(self) -> int:
        """Of the weights it serves; 0 = those it started with, or none."""
        version: int = self.facts.get("version", 0)
        return version

    @property
    def weights(self) -> str:
        """The directory where they lie; "" = in none."""
        return str(self.facts.get("weights", ""))

    @property
    def lacks(self) -> list[str]:
        """What it needs before it can run calls; while that is something, it sleeps."""
        lacks: list[str] = self.facts.get("lacks", [])
        return lacks

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

    def __init__(self, name: str, routing: Routing = STICKY) -> None:
        self.name = name
        self.policy = routing.policy
        #: Where the last new session of each group went; None where the policy does not ask.
        self.groups: LRUCache[str, Member] | None = LRUCache(maxsize=routing.groups) if routing.groups else None
        self.members: dict[str, Member] = {}
        #: Calls that wait for any member.
        self.waiting = WaitQueue()
        #: Suspects that wait for a member with none aboard; served when nobody else can be.
        self.suspects = SuspectQueue()
        #: The highest version any member has reported, and where those weights lie ("" = nowhere).
        self.version, self.weights = 0, ""
        #: Callers (by nonce), and their reasons why nothing new is given to members.
        self.gates: frozenset[tuple[bytes, str]] = frozenset()
        #: The caller (by nonce) whose turn it is to change the members.
        self.turn: bytes | None = None
        #: Body of the error that calls end in, once no member is left and none will come.
        self.abandoned: Sequence[Any] | None = None
        self._heap: list[tuple[int, int, Member]] = []
        self._choices = 0

    @property
    def holds_back(self) -> bool:
        """Whether calls wait though members are there: the gate is closed, or who could take them sleeps."""
        states = {member.state for member in self.members.values()}
        return bool(self.gates) or (State.ASLEEP in states and State.READY not in states)

    @property
    def sleeps(self) -> bool:
        """Whether a member that lives lacks something."""
        return any(member.lacks and not member.leaves for member in self.members.values())

    def add(self, member: Member) -> None:
        """A member that said hello; replaces one of the same name."""
        self.members[member.name] = member
        member.gated = bool(self.gates)
        self.raise_version(member.version, member.weights)
        self.abandoned = None

    def raise_version(self, version: int, weights: str) -> None:
        """There are weights of that version, in that directory."""
        if version > self.version:
            self.version, self.weights = version, weights

    def gate(self, gates: Iterable[tuple[bytes, str]]) -> bool:
        """It is closed for these; whether it is open now, and was not before."""
        before, self.gates = bool(self.gates), frozenset(gates)
        for member in self.members.values():
            member.gated = bool(self.gates)
            self._offer(member)
        return before and not self.gates

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
            if chosen == member.chosen and in_flight == len(member.leases) and member.has_room:
                return member
            heappop(self._heap)
        return None

    def for_suspect(self, avoid: Container[str] = ()) -> Member | None:
        """A member for a suspect, where it is alone but for proven ones; none of ``avoid`` if possible. While there is
        none, one is reserved; one at least stays open where there are several. Costs O(requests in flight)."""
        ready = [member for member in self.members.values() if member.state is State.READY and not member.gated]
        free = [member for member in ready if not member.suspects]
        if sum(member.on_trial for member in ready) >= max(1, len(ready) - 1):
            free = [member for member in free if member.reserved]
        chosen = min(free, key=lambda m: (m.unproven, m.name in avoid, m.in_flight, m.chosen), default=None)
        if chosen is not None and chosen.unproven:
            chosen.reserved = chosen.reserved or not (self.waiting or chosen.waiting)
            return None
        return chosen

    def tries_suspects(self) -> bool:
        """Whether some run or wait."""
        return len(self.suspects) > 0 or any(member.on_trial for member in self.members.values())

    def acquit(self, acquitted: Callable[[Lease], bool]) -> list[Member]:
        """Suspects aboard that are ``acquitted`` are none any more. And without any that wait, no member is reserved.
        The members that are open again."""
        opened = []
        for member in [member for member in self.members.values() if member.on_trial]:
            for lease in member.leases.values() if member.suspects else ():
                if lease.suspect and acquitted(lease):
                    lease.suspect, lease.proven = False, True
                    member.suspects -= 1
            member.reserved = member.reserved and len(self.suspects) > 0
            if not member.on_trial:
                self._offer(member)
                opened.append(member)
        return opened

    def lease(self, lease: Lease) -> None:
        """Book a call on its member."""
        member = lease.member
        member.leases[lease.key] = lease
        member.suspects += lease.suspect
        member.reserved = member.reserved and not lease.suspect
        member.total += 1
        self._choices += 1
        member.chosen = self._choices
        self._offer(member)

    def release(self, lease: Lease) -> bool:
        """Give a lease back; False when that happened before (release is idempotent)."""
        member = lease.member
        if member.leases.pop(lease.key, None) is None:
            return False
        member.suspects -= lease.suspect
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
            heappush(self._heap, (len(member.leases), member.chosen, member))
