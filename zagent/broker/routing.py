"""Which member a call goes to: policies, small classes with one pure method each. They stand behind one another: each
decides its own case and leaves the others to the next.

What they see of load is what the broker counts. What engines report of theirs (queued tokens, KV cache in use) would
come as facts of a `Member`, and would enter at `load`; nothing else here would change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from zagent.broker.pool import Member, Pool


def load(member: Member) -> int:
    """How busy a member is: its calls in flight, and those that wait for room there."""
    return len(member.leases) + len(member.waiting)


class Threshold(NamedTuple):
    """Double, absolute and relative: one alone would be reached by chance where all are idle, or never where all are
    busy. As in sglang-router's `cache_aware`, where the busiest of all is compared; here it is the member that the call
    would go to, so that a crowd at one moves no session of another."""

    abs: int  #: calls more than the least busy member has
    rel: float  #: times as many

    def exceeded(self, member: Member, least: Member) -> bool:
        """Whether ``member`` is that much busier than ``least``."""
        here, there = load(member), load(least)
        return here - there > self.abs and here > self.rel * there


class Policy(Protocol):
    """Decides about calls that are no suspects (those are the pool's own business)."""

    def choose(self, pool: Pool, bound: Member | None, kin: Member | None) -> Member | None:
        """Who is to run a call: a member that may be full, so that the call waits for it; None = whoever has room
        first. ``bound``: its session's, which takes calls; ``kin``: which its group's last went to, in whatever state
        that is by now."""


class Sticky:
    """To the session's member, however busy that is; without one, to the least busy."""

    def choose(self, pool: Pool, bound: Member | None, kin: Member | None) -> Member | None:
        return pool.least() if bound is None else bound


class Rebind(NamedTuple):
    """A session leaves a member that is overloaded, and what that has cached of it, for the least busy one."""

    over: Threshold
    policy: Policy = Sticky()

    def choose(self, pool: Pool, bound: Member | None, kin: Member | None) -> Member | None:
        least = pool.least()
        if bound is not None and least is not None and self.over.exceeded(bound, least):
            return least
        return self.policy.choose(pool, bound, kin)


class Group(NamedTuple):
    """A session begins where the last of its group did, unless that is full or overloaded."""

    over: Threshold
    policy: Policy = Sticky()

    def choose(self, pool: Pool, bound: Member | None, kin: Member | None) -> Member | None:
        if bound is None and kin is not None and kin.has_room:
            least = pool.least()
            if least is not None and not self.over.exceeded(kin, least):
                return kin
        return self.policy.choose(pool, bound, kin)


class Routing(NamedTuple):
    """How the calls of one pool are routed."""

    policy: Policy = Sticky()
    groups: int = 0  #: whose member is remembered, the least recently used go first; 0 = the policy does not ask


#: Without any of the optional policies.
STICKY = Routing()


def routing(thresholds: Mapping[str, Any], groups: int) -> Routing:
    """That of `RoutingConfig.thresholds`: {"group_over": [abs, rel] or None, "rebind_over": …}; ``groups`` are
    remembered where they matter."""
    made = STICKY
    if thresholds.get("group_over") is not None:
        made = Routing(Group(Threshold(*thresholds["group_over"])), groups)
    if thresholds.get("rebind_over") is not None:
        made = made._replace(policy=Rebind(Threshold(*thresholds["rebind_over"]), made.policy))
    return made
