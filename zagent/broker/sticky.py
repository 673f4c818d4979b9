"""Which member a session's calls go to.

A session is tentatively bound while its first call is on the way and bound for good when a member has accepted one.
Sessions with a call in flight are never evicted; idle ones are kept in an LRU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zagent.broker.pool import Member


@dataclass(slots=True)
class Session:
    """Where a session's calls go."""

    member: Member
    in_flight: int = 0
    bound: bool = False  #: a member accepted a call
    ended: bool = False  #: forget it when its last call is back


class Sessions:
    """All sessions by key (pool name, session name)."""

    def __init__(self, cache_size: int) -> None:
        self._cache_size = cache_size
        self._active: dict[Hashable, Session] = {}
        #: The longest idle first. No cachetools: every call asks here, and would take 1.6 times as long.
        self._idle: OrderedDict[Hashable, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._active) + len(self._idle)

    def member(self, key: Hashable) -> Member | None:
        """The member of a session, if it has one that still takes calls."""
        session = self._active.get(key) or self._idle.get(key)
        if session is None or not session.member.takes_calls:
            return None
        return session.member

    def known(self, key: Hashable) -> bool:
        """Whether the session is remembered, with a member that may be gone."""
        return key in self._active or key in self._idle

    def hold(self, key: Hashable, member: Member) -> None:
        """A call of the session goes to ``member``; another member than before re-binds it."""
        session = self._active.get(key)
        if session is None:
            session = self._idle.pop(key, None) or Session(member)
            self._active[key] = session
        if session.member is not member:
            session.member, session.bound = member, False
        session.in_flight += 1
        session.ended = False

    def release(self, key: Hashable, member: Member, *, accepted: bool) -> None:
        """A call of the session is back from ``member``, or lost with it. The session stays with a member that may take
        calls later."""
        session = self._active[key]
        session.in_flight -= 1
        session.bound = session.bound or (accepted and session.member is member)
        if session.in_flight:
            return
        del self._active[key]
        if session.bound and not session.ended and not session.member.leaves:
            self._idle[key] = session
            if len(self._idle) > self._cache_size:
                self._idle.popitem(last=False)

    def end(self, key: Hashable) -> None:
        """The trajectory is over."""
        self._idle.pop(key, None)
        session = self._active.get(key)
        if session is not None:
            session.ended = True
