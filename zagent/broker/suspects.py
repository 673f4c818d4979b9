"""Which calls may be what ends their members: suspicion, conviction, acquittal. Pure.

A member that dies by itself puts the calls it had under suspicion, as one group. Each then runs alone on a member,
another one where there is one. A second death there convicts it; one culprit explains a death, so the others of its
groups are cleared. Let go, too, is a suspect that has been aboard for longer than the member had lived with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cachetools import LRUCache

from zagent.broker.pool import Lease, Member
from zagent.errors import MemberLost, PoisonedRequest, ZagentError
from zagent.wire.messages import Call, may_repeat

#: Calls that are remembered: several of the largest batches. Others stay suspects by their callers' word.
REMEMBERED = 100_000
#: A suspect is let go when it has run for this many times what it had when the member died, and so many seconds more.
PROBATION, PROBATION_S = 1.5, 1.0


@dataclass(slots=True, eq=False)
class Group:
    """The calls that one death put under suspicion."""

    explained: bool = False  #: one of them is convicted


@dataclass(slots=True, eq=False)
class Record:
    """What is known of a call that was aboard at such deaths."""

    groups: list[Group] = field(default_factory=list)
    members: set[str] = field(default_factory=set)  #: that died
    deaths: int = 0
    aboard_s: float = 0.0  #: at the last of them
    let_go: bool = False
    by_word: bool = False  #: the first was before this broker's time

    @property
    def cleared(self) -> bool:
        return self.let_go or all(group.explained for group in self.groups)


class Suspects:
    """What this broker knows of them, by call id; the callers' word (`Call.suspect`) outlives it."""

    def __init__(self) -> None:
        self._records: LRUCache[bytes, Record] = LRUCache(maxsize=REMEMBERED)

    def suspected(self, call: Call) -> bool:
        """Whether it must be its member's only suspect."""
        return call.suspect and not self._cleared(call.call)

    def acquitted(self, lease: Lease, now: float) -> bool:
        """Whether a suspect aboard is none any more."""
        record = self._records.get(lease.key[0])
        if record is not None and now - lease.since > PROBATION * record.aboard_s + PROBATION_S:
            record.let_go = True
        return self._cleared(lease.key[0])

    def died(self, call: bytes) -> Collection[str]:
        """Names of the members that have died with it."""
        record = self._records.get(call)
        return record.members if record is not None else ()

    def _cleared(self, call: bytes) -> bool:
        record = self._records.get(call)
        return record is not None and record.cleared

    def aboard_s(self, call: bytes) -> float:
        """Seconds it was aboard then. Short is suspicious: what kills mostly does so soon after it has come."""
        record = self._records.get(call)
        return record.aboard_s if record is not None else 0.0

    def verdicts(
        self, leases: Sequence[Lease], member: Member, others: int, reason: str, now: float, *, crashed: bool
    ) -> list[tuple[Lease, ZagentError]]:
        """What becomes of the calls of a ``member`` that is gone, by itself if it ``crashed``. ``others``: further
        members that take calls."""
        aboard = [lease for lease in leases if not lease.directed] if crashed else []
        group = Group()
        for lease in aboard:
            self._accuse(lease, group, now)
        convicted = len(aboard) == 1 and self._convicts(aboard[0], others)
        return [(lease, _error(lease, member, reason, crashed, convicted and lease is aboard[0])) for lease in leases]

    def _accuse(self, lease: Lease, group: Group, now: float) -> None:
        known = self._records.get(lease.key[0])
        record = Record(by_word=lease.suspect, deaths=lease.suspect) if known is None else known
        record.groups.append(group)
        record.members.add(lease.member.name)
        record.deaths += 1
        record.aboard_s, record.let_go = now - lease.since, False
        self._records[lease.key[0]] = record

    def _convicts(self, lease: Lease, others: int) -> bool:
        """A second death, with nobody else aboard. Two of the same member may be that member's own fault."""
        record = self._records[lease.key[0]]
        if record.deaths < 2 or (record.deaths == 2 and len(record.members) == 1 and others and not record.by_word):
            return False
        for group in record.groups:
            group.explained = True
        del self._records[lease.key[0]]
        return True


def _error(lease: Lease, member: Member, reason: str, crashed: bool, convicted: bool) -> ZagentError:
    text = f"{member.name} is gone: {reason}"
    if convicted:
        return PoisonedRequest(
            f"members died by themselves while they ran this {lease.method!r}, at last alone; {text}"
        )
    blamed = crashed and not lease.directed
    return MemberLost(text, repeatable=may_repeat(lease.method, member.facts), crashed=blamed)
