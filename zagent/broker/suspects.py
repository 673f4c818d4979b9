"""Which calls may be what ends their members: suspicion, conviction, acquittal. Pure.

A member that dies by itself puts the calls it had under suspicion, as one group. Each then runs as the only suspect of
its member. A second such death convicts it, and the others of its group are cleared: one culprit explains the death.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from zagent.broker.pool import Lease, Member
from zagent.errors import MemberLost, PoisonedRequest, ZagentError
from zagent.wire.messages import Call, may_repeat

#: Calls whose group is remembered: several of the largest batches. Others stay suspects by their callers' word.
REMEMBERED = 100_000


@dataclass(slots=True, eq=False)
class Group:
    """The calls that one death put under suspicion."""

    cleared: bool = False  #: one of them is convicted


class Suspects:
    """What this broker knows of them, by call id; the callers' word (`Call.suspect`) outlives it."""

    def __init__(self) -> None:
        #: Group, and the seconds aboard when the member died.
        self._known: LRUCache[bytes, tuple[Group, float]] = LRUCache(maxsize=REMEMBERED)

    def suspected(self, call: Call) -> bool:
        """Whether it must be its member's only suspect."""
        return call.suspect and not self.cleared(call.call)

    def cleared(self, call: bytes) -> bool:
        """Whether another call has been convicted for the death that made it a suspect."""
        known = self._known.get(call)
        return known is not None and known[0].cleared

    def aboard_s(self, call: bytes) -> float:
        """Seconds it was aboard then. Short is suspicious: what kills mostly does so soon after it has come."""
        known = self._known.get(call)
        return known[1] if known is not None else 0.0

    def verdicts(
        self, leases: Sequence[Lease], member: Member, reason: str, now: float, *, crashed: bool
    ) -> list[tuple[Lease, ZagentError]]:
        """What becomes of the calls of a ``member`` that is gone.

        Where it ``crashed``, by itself, the only suspect aboard is convicted; of several, or of all where there was
        none, each may be to blame.
        """
        aboard = [lease for lease in leases if not lease.directed] if crashed else []
        blamed = [lease for lease in aboard if lease.suspect] or aboard
        convicted = blamed[0] if len(blamed) == 1 and blamed[0].suspect else None
        if convicted is not None:
            self._convict(convicted)
        else:
            self._suspect(blamed, now)
        return [(lease, _error(lease, member, reason, lease is convicted, lease in blamed)) for lease in leases]

    def _convict(self, lease: Lease) -> None:
        known = self._known.pop(lease.key[0], None)
        if known is not None:
            known[0].cleared = True

    def _suspect(self, leases: Sequence[Lease], now: float) -> None:
        group = Group()
        for lease in leases:
            self._known[lease.key[0]] = group, now - lease.since


def _error(lease: Lease, member: Member, reason: str, convicted: bool, blamed: bool) -> ZagentError:
    text = f"{member.name} is gone: {reason}"
    if convicted:
        return PoisonedRequest(f"two members died by themselves while they ran this {lease.method!r}; {text}")
    return MemberLost(text, repeatable=may_repeat(lease.method, member.facts), crashed=blamed)
