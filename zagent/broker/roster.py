"""Who is here: peers by their nonce, from hello to goodbye. Pure bookkeeping; sends nothing."""

from __future__ import annotations

import hmac
from typing import Any

from cachetools import LRUCache

from zagent.broker.pool import Caller, Member, Pool, State
from zagent.errors import DecodeError, ProtocolError
from zagent.wire.messages import Hello

#: First byte of a lane's identity (zagent/client/link.py); the rest is the peer's nonce.
DATA, CONTROL = b"d", b"c"
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
        self.members: dict[bytes, Member] = {}  # by nonce
        self.trusted: set[bytes] = set()  # nonces of peers that know the secret
        #: Nonce -> the lane that has spoken, of peers not yet welcomed; the oldest are forgotten beyond `HALF_MAX`.
        self._half: LRUCache[bytes, bytes] = LRUCache(maxsize=HALF_MAX)

    def hello(self, sender: bytes, hello: Hello, facts: Any) -> bool:
        """One lane's hello; True when the peer is complete (now a caller, and a member if it names a pool).

        Raises:
            ProtocolError: refused; the text says why.
        """
        lane, nonce = sender[:1], sender[1:]
        if lane not in (DATA, CONTROL) or nonce in self.callers:
            raise ProtocolError("a hello from a lane that is not waited for")
        self._check(hello, facts)
        if self._half.get(nonce, lane) == lane:
            self._half[nonce] = lane
            return False
        del self._half[nonce]
        caller = self.callers[nonce] = Caller(DATA + nonce, CONTROL + nonce)
        if self._knows_secret(hello):
            self.trusted.add(nonce)
        if hello.pool:
            self.members[nonce] = Member(
                hello.pool, hello.name, hello.epoch, hello.credits, caller.data, caller.control, facts
            )  # fmt: skip
        return True

    def _check(self, hello: Hello, facts: Any) -> None:
        if not isinstance(facts, dict):
            raise DecodeError("a hello's facts must be a map")
        if not hello.pool:
            return
        if hello.pool not in self._pools:
            raise ProtocolError(f"no pool {hello.pool!r} here, only {sorted(self._pools)}")
        if not self._knows_secret(hello):
            raise ProtocolError(f"{hello.name!r} may not join pool {hello.pool!r}: wrong join secret")
        if hello.credits < 1:
            raise ProtocolError(f"{hello.name!r} grants {hello.credits} credits")
        known = self._pools[hello.pool].members.get(hello.name)
        if known is not None and known.epoch >= hello.epoch:
            raise ProtocolError(f"{hello.name!r} of epoch {hello.epoch} comes after epoch {known.epoch}")

    def _knows_secret(self, hello: Hello) -> bool:
        return hmac.compare_digest(hello.secret.encode(), self._secret)

    def leave(self, nonce: bytes) -> tuple[Caller | None, Member | None]:
        """Forget a peer; what it was."""
        self._half.pop(nonce, b"")
        self.trusted.discard(nonce)
        return self.callers.pop(nonce, None), self.members.pop(nonce, None)

    def nonce_of(self, pool: str, name: str, epoch: int | None = None) -> bytes | None:
        """The live member of that name (and epoch, if given)."""
        for nonce, member in self.members.items():
            if (member.pool, member.name) == (pool, name) and epoch in (None, member.epoch):
                return nonce
        return None

    def status(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Per pool and member, the gone ones included: state, in_flight, total, epoch, version, restarts, pid."""
        return {name: {m.name: _describe(m) for m in pool.members.values()} for name, pool in self._pools.items()}


def _describe(member: Member) -> dict[str, Any]:
    return {
        "state": str(member.state),
        "in_flight": member.in_flight,
        "waiting": len(member.waiting),
        "credits": member.credits,
        "total": member.total,
        "epoch": member.epoch,
        "version": member.facts.get("version", 0),
        "restarts": member.epoch - 1,
        "pid": member.facts.get("pid") if member.state is not State.DEAD else None,
    }
