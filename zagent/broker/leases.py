"""Who has which call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from zagent.broker.pool import Lease, Member, Pool, State
from zagent.broker.sticky import Sessions
from zagent.broker.waiting import CallKey, Waiting
from zagent.wire.codec import Buffer, encode_header
from zagent.wire.messages import Cancel

Frames: TypeAlias = "Sequence[Buffer]"
Send: TypeAlias = "Callable[[bytes, Frames], None]"


class Leases(dict[CallKey, Lease]):
    """All leases by call, kept in step with what members, callers and sessions know of theirs.

    Args:
        send: takes (identity, frames) of each message to go out.
    """

    def __init__(self, pools: dict[str, Pool], sessions: Sessions, send: Send) -> None:
        super().__init__()
        self._pools, self._sessions, self._send = pools, sessions, send

    def take(self, lease: Lease) -> None:
        """A member is given a call."""
        self[lease.key] = lease
        lease.caller.calls.add(lease.key)
        if lease.directed:
            lease.member.directed[lease.key] = lease
            return
        self._pools[lease.member.pool].lease(lease)
        if lease.session is not None:
            self._sessions.hold(lease.session, lease.member)

    def release(self, lease: Lease, *, accepted: bool) -> None:
        """It has been answered, or its member is gone. ``accepted``: the member took it on."""
        del self[lease.key]
        lease.caller.calls.discard(lease.key)
        if lease.directed:
            del lease.member.directed[lease.key]
            return
        self._pools[lease.member.pool].release(lease)
        if lease.session is not None:
            self._sessions.release(lease.session, lease.member, accepted=accepted)

    def cancel(self, lease: Lease) -> None:
        """Nobody wants its answer any more: tell the member to stop. The lease stays until it has."""
        lease.to = b""  # of one that was cancelled before a caller came for it, too
        if lease.cancelled:
            return
        lease.cancelled = True
        if lease.member.state is not State.DEAD:
            self.stop(lease.key, lease.member)

    def stop(self, key: CallKey, member: Member) -> None:
        """Tell a member to stop a call."""
        self._send(member.control, [encode_header(Cancel(*key))])

    def hand_over(self, lease: Lease, entry: Waiting, *, suspect: bool) -> None:
        """A caller comes (back) for a call that was nobody's."""
        lease.caller.calls.discard(lease.key)
        lease.caller, lease.to = entry.caller, entry.to
        lease.caller.calls.add(lease.key)
        if suspect and not (lease.suspect or lease.directed):
            lease.suspect = True
            lease.member.suspects += 1

    def stop_all(self, member: Member) -> None:
        """Tell a live member that nobody will want what it runs."""
        for lease in self.at(member):
            if not lease.cancelled:
                self.stop(lease.key, member)

    def at(self, member: Member) -> list[Lease]:
        """All leases of a member."""
        return [*member.leases.values(), *member.directed.values()]
