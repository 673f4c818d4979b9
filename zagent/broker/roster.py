"""Who is here: peers from hello to goodbye. Pure bookkeeping; sends nothing."""

from __future__ import annotations

import hmac
import sys
from typing import Any

from cachetools import LRUCache

from zagent import __version__
from zagent.broker.pool import Caller, Member, Pool, State
from zagent.errors import ProtocolError, VersionMismatch
from zagent.wire.messages import Hello

#: First byte of a lane's identity (zagent/client/link.py); the rest is the peer's nonce.
DATA, CONTROL = b"d", b"c"
#: Length of a link's nonce, with which its calls' ids begin, so that nobody else can name them.
NONCE = 8
#: Peers that have said hello on one lane only; the other follows within milliseconds, or never.
HALF_MAX = 10_000


class Roster:
    """Callers, and the members among them.

    Args:
        secret: the launcher's join secret; whoever joins a pool, or reports exits, must know it.
        pools: by name; members are added to and removed from them by the core.
    """

    def __init__(self, secret: str, pools: dict[str, Pool]) -> None:
        self._secret = secret.encode()
        self._pools = pools
        self.callers: dict[bytes, Caller] = {}  # by nonce
        self.lanes: dict[bytes, Caller] = {}  # by identity, two of each caller
        #: Nonce -> the lane that has spoken and of which connection, for peers not yet welcomed; beyond `HALF_MAX` the
        #: oldest are forgotten.
        self._half: LRUCache[bytes, tuple[bytes, int]] = LRUCache(maxsize=HALF_MAX)

    def hello(self, sender: bytes, hello: Hello, facts: dict[str, Any]) -> Caller | None:
        """One lane's hello, of a peer that is not here; the peer (a member, if it names a pool) once both have spoken.

        Raises:
            ProtocolError: refused; the text says why. `VersionMismatch`: another version of zagent.
        """
        lane, nonce = sender[:1], sender[1:]
        if lane not in (DATA, CONTROL):
            raise ProtocolError("a hello from a lane that is not waited for")
        self._check(hello)
        half, connection = self._half.get(nonce, (lane, 0))
        connection = max(connection, hello.connection)
        if half == lane:
            self._half[nonce] = lane, connection
            return None
        del self._half[nonce]
        caller = Caller(nonce, DATA + nonce, CONTROL + nonce, self.knows_secret(hello), connection)
        self.callers[nonce] = self.lanes[caller.data] = self.lanes[caller.control] = caller
        if hello.pool:
            caller.member = Member(
                hello.pool, hello.name, hello.epoch, hello.credits, caller.data, caller.control, facts
            )  # fmt: skip
        return caller

    def _check(self, hello: Hello) -> None:
        if hello.package != __version__:
            raise VersionMismatch(
                f"{hello.name or 'a caller'} has zagent {hello.package} under {hello.python}, this cluster zagent "
                f"{__version__} under {sys.executable}: install the same version in both"
            )
        if not hello.pool:
            return
        if hello.pool not in self._pools:
            raise ProtocolError(f"no pool {hello.pool!r} here, only {sorted(self._pools)}")
        if not self.knows_secret(hello):
            raise ProtocolError(f"{hello.name!r} may not join pool {hello.pool!r}: wrong join secret")
        if hello.credits < 1:
            raise ProtocolError(f"{hello.name!r} grants {hello.credits} credits")
        known = self._pools[hello.pool].members.get(hello.name)
        if known is not None and not _may_follow(known, hello.epoch):
            raise ProtocolError(f"{hello.name!r} of epoch {hello.epoch} comes after epoch {known.epoch}")

    def knows_secret(self, hello: Hello) -> bool:
        """Whether the launcher gave it the join secret."""
        return hmac.compare_digest(hello.secret.encode(), self._secret)

    def leave(self, caller: Caller) -> None:
        """Forget a peer."""
        for lane in (caller.data, caller.control):
            self.lanes.pop(lane, None)
        self.callers.pop(caller.nonce, None)

    def member(self, pool: str, name: str, epoch: int | None = None) -> Member | None:
        """The last member of that name, dead or alive; None if it is not of ``epoch``, where that is given."""
        member = self._pools[pool].members.get(name) if pool in self._pools else None
        return member if member is not None and epoch in (None, member.epoch) else None

    def status(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Per pool and member, the gone ones included: state, in_flight, total, epoch, version, lacks, restarts,
        pid."""
        return {name: {m.name: _describe(m) for m in pool.members.values()} for name, pool in self._pools.items()}


def _may_follow(known: Member, epoch: int) -> bool:
    """Whether that epoch may take the name: a later life, or the same one if it was only out of reach."""
    return epoch > known.epoch or (epoch == known.epoch and known.state is State.DEAD and not known.final)


def _describe(member: Member) -> dict[str, Any]:
    return {
        "state": str(member.state),
        "in_flight": member.in_flight,
        "waiting": len(member.waiting),
        "suspects": member.suspects,
        "credits": member.credits,
        "total": member.total,
        "epoch": member.epoch,
        "version": member.version,
        "lacks": member.lacks,
        "restarts": member.epoch - 1,
        "pid": member.facts.get("pid") if member.state is not State.DEAD else None,
    }
