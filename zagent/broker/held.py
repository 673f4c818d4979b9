"""Calls that members have from before this broker's time, or from before it forgot them: listed in their hello, until
the callers come back for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zagent.broker.leases import Leases
from zagent.broker.pool import Caller, Lease, Member, State
from zagent.broker.sticky import Sessions
from zagent.broker.waiting import CallKey
from zagent.errors import DecodeError


class Listed(NamedTuple):
    """A call that a member runs (or, if not `running`, whose answer it keeps)."""

    call: bytes
    attempt: int
    session: str
    method: str
    running: bool


_TYPES = (bytes, int, str, str, bool)


def listed(value: Any) -> list[Listed]:
    """The `held` of a hello. Raises `DecodeError` where it is no such list."""
    if not isinstance(value, list):
        raise DecodeError("a hello's held must be a list")
    for one in value:
        if not isinstance(one, list) or tuple(map(type, one)) != _TYPES:
            raise DecodeError("a hello's held must list [call, attempt, session, method, running]")
    return [Listed(*one) for one in value]


class Held(dict[CallKey, Member]):
    """Where calls can be found again. A running one has a lease at once, without a caller: it counts as in flight."""

    def __init__(self, leases: Leases, sessions: Sessions) -> None:
        super().__init__()
        self._leases, self._sessions = leases, sessions
        self._nobody = Caller(b"", b"", b"")
        #: Callers may still come back.
        self.open = True
        #: Until then: the highest attempt that is known of a call, and those that members have come with.
        self._highest: dict[bytes, int] = {}
        self._adopted: dict[bytes, set[int]] = {}

    def adopt(self, member: Member, calls: Sequence[Listed], wanted: set[CallKey], *, forgotten: Member | None) -> None:
        """A member has come with ``calls``. Callers want some now, and until `close` may come for the others; for those
        of a member that had been ``forgotten`` (who it was before), only if they might have come before."""
        for one in calls:
            key, session = one[:2], (member.pool, one.session) if one.session else None
            self.overtake(*key)
            overtaken = one.attempt < self._highest.get(one.call, 0)  # its caller has gone on
            unclaimed = self.open and (forgotten is None or self.get(key) is forgotten)
            kept = key in wanted or (unclaimed and not overtaken)
            if key in self._leases:  # the member came too late: another one has the call by now
                if one.running:
                    self._leases.stop(key, member)
                continue
            if kept:
                self[key] = member
                if self.open:
                    self._adopted.setdefault(one.call, set()).add(one.attempt)
            if one.running:
                lease = Lease(key, self._nobody, b"", member, session, one.method)
                self._leases.take(lease)
                if not kept:
                    self._leases.cancel(lease)
            elif kept and session is not None:
                self._sessions.hold(session, member)
                self._sessions.release(session, member, accepted=True)

    def overtake(self, call: bytes, attempt: int) -> None:
        """A caller, or a member, has come with that attempt: what members have of lower ones is stopped."""
        if not self.open or attempt <= self._highest.get(call, 1):
            return
        self._highest[call] = attempt
        for lower in self._adopted.pop(call, ()):
            self.pop((call, lower), None)
            lease = self._leases.get((call, lower))
            if lease is not None and lease.caller is self._nobody:
                self._leases.cancel(lease)

    def claim(self, key: CallKey) -> Member | None:
        """The member, if it lives, where that call can be had."""
        member = self.pop(key, None)
        return None if member is None or member.state is State.DEAD else member

    def close(self) -> None:
        """No caller comes back any more: stop what nobody has asked for."""
        self.open = False
        for of_calls in (self, self._highest, self._adopted):
            of_calls.clear()
        for key in list(self._nobody.calls):
            self._leases.cancel(self._leases[key])
