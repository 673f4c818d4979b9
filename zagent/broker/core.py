"""The broker's brain: events (`frames`, `unsendable`, `exited`, `tick`) and the time go in, frames to send come out.

No socket, no clock: the server feeds it (zagent/broker/server.py), tests feed it by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from cachetools import LRUCache

from zagent.broker.dispatch import Assignment, Dispatch, Frames
from zagent.broker.pool import Pool, State
from zagent.broker.roster import CONTROL, Roster
from zagent.broker.sticky import Sessions
from zagent.errors import (
    DecodeError,
    InvalidRequest,
    ProtocolError,
    UnknownMethod,
    VersionMismatch,
    ZagentError,
    to_wire,
)
from zagent.wire.codec import decode_body, decode_header, encode_body, encode_header
from zagent.wire.messages import (
    BROKER,
    Abandoned,
    Call,
    Cancel,
    Drain,
    EndSession,
    Exited,
    Failure,
    Goodbye,
    Hello,
    Reply,
    Welcome,
)

Sends: TypeAlias = "list[tuple[bytes, Frames]]"

#: Cancels that overtook their call (they travel on another lane) are remembered until it comes.
EARLY_CANCELS = 10_000


class BrokerCore:
    """Routes calls between callers and the members of pools.

    Args:
        secret: the launcher's join secret; a member's hello must carry it.
        pools: names of the pools there can be.
        max_pending: calls that may wait for a member.
        sticky_cache_size: idle sessions remembered.
        incarnation: this broker's life, told in every welcome.
        facts: told to every peer in its welcome.
        record: called with every `Assignment`, for tests and for people who debug routing.
    """

    def __init__(
        self,
        *,
        secret: str,
        pools: Sequence[str] = ("engine", "worker"),
        max_pending: int = 100_000,
        sticky_cache_size: int = 10_000,
        incarnation: int = 1,
        facts: dict[str, Any] | None = None,
        record: Callable[[Assignment], None] | None = None,
    ) -> None:
        self.pools = {name: Pool(name) for name in pools}
        self.roster = Roster(secret, self.pools)
        #: What was dropped, refused or could not be delivered.
        self.counters = dict.fromkeys(("malformed", "refused", "late", "early_cancels", "unsendable"), 0)
        self._incarnation = incarnation
        self._facts = facts or {}
        self._out: Sends = []
        self.dispatch = Dispatch(self.pools, self._send, Sessions(sticky_cache_size), max_pending, record)
        self._early: LRUCache[tuple[bytes, int], bool] = LRUCache(maxsize=EARLY_CANCELS)
        self._handlers: dict[type, Callable[[bytes, Any, Frames, float], None]] = {
            Call: self._call,
            Reply: self._answer,
            Failure: self._answer,
            Cancel: self._cancel,
            EndSession: self._end_session,
            Goodbye: self._goodbye,
            Drain: self._drain,
            Exited: self._exited,
            Abandoned: self._abandoned,
        }
        #: Methods of pool `BROKER`; they take (sender, argument, now).
        self._own: dict[str, Callable[[Any, float], Any]] = {
            "status": self._status,
            "drain": self._drain_named,
            "remove": self._remove_named,
        }

    # ---- events -----------------------------------------------------------------------------------------------------

    def frames(self, sender: bytes, frames: Frames, now: float) -> Sends:
        """A message from the peer with identity ``sender``. Bytes that are no message are counted and dropped."""
        try:
            message = decode_header(frames[0])
        except VersionMismatch as error:
            self._refuse(sender, error)
        except (DecodeError, IndexError):
            self.counters["malformed"] += 1
        else:
            kind = type(message)
            if kind is Hello:
                self._hello(sender, message, frames, now)
            elif sender[1:] not in self.roster.callers:
                self._refuse(sender, ProtocolError("say hello first"), message)
            elif kind in self._handlers:
                self._handlers[kind](sender, message, frames, now)
            else:
                self.counters["malformed"] += 1
        return self._flush()

    def unsendable(self, to: bytes, frames: Frames, now: float) -> Sends:
        """A message of this core could not be delivered: its receiver is gone."""
        self.counters["unsendable"] += 1
        message = decode_header(frames[0])
        if type(message) is Call:
            self.dispatch.undelivered(message.call)
        self._gone(to[1:], "it could not be reached", now)
        return self._flush()

    def exited(self, pool: str, name: str, epoch: int, reason: str, now: float) -> Sends:
        """That member's process has ended."""
        nonce = self.roster.nonce_of(pool, name, epoch)
        if nonce is not None:
            self._gone(nonce, reason, now)
        return self._flush()

    def tick(self, now: float) -> Sends:
        """Time has passed."""
        self.dispatch.expire(now)
        return self._flush()

    def _send(self, to: bytes, frames: Frames) -> None:
        self._out.append((to, frames))

    def _flush(self) -> Sends:
        out, self._out = self._out, []
        return out

    # ---- coming and going -------------------------------------------------------------------------------------------

    def _hello(self, sender: bytes, hello: Any, frames: Frames, now: float) -> None:
        try:
            facts = decode_body(frames[1:])
            complete = self.roster.hello(sender, hello, facts)
        except ProtocolError as error:
            self._refuse(sender, error)
            return
        if not complete:
            return
        nonce = sender[1:]
        self._send(CONTROL + nonce, [encode_header(Welcome(self._incarnation)), *encode_body(self._facts)])
        member = self.roster.members.get(nonce)
        if member is not None:
            pool = self.pools[member.pool]
            former = pool.members.get(member.name)
            if former is not None and former.state is not State.DEAD:
                self._gone(former.data[1:], f"epoch {member.epoch} took its place", now)
            pool.add(member)
            pool.ready(member)
            self.dispatch.feed(pool, now)

    def _goodbye(self, sender: bytes, message: Goodbye, frames: Frames, now: float) -> None:
        self._gone(sender[1:], "it said goodbye", now)

    def _exited(self, sender: bytes, message: Exited, frames: Frames, now: float) -> None:
        if self._is_launcher(sender, message):
            nonce = self.roster.nonce_of(message.pool, message.name, message.epoch)
            if nonce is not None:
                self._gone(nonce, message.reason, now)

    def _abandoned(self, sender: bytes, message: Abandoned, frames: Frames, now: float) -> None:
        if self._is_launcher(sender, message) and message.pool in self.pools:
            self.dispatch.abandon(self.pools[message.pool], [bytes(frame) for frame in frames[1:]])

    def _is_launcher(self, sender: bytes, message: Any) -> bool:
        """Whether the sender may say such things; if not, it is told so."""
        if sender[1:] in self.roster.trusted:
            return True
        self._refuse(sender, ProtocolError("only the launcher may say who exited"), message)
        return False

    def _gone(self, nonce: bytes, reason: str, now: float) -> None:
        """A peer is gone: as a caller, nobody waits for its calls; as a member, its leases are lost."""
        caller, member = self.roster.leave(nonce)
        if caller is not None:
            for call in list(caller.calls):
                self.dispatch.give_up(call)
        if member is not None:
            member.become(State.DEAD)
            self.dispatch.lost(member, reason, now)

    def _drain(self, sender: bytes, message: Drain, frames: Frames, now: float) -> None:
        self._stop_giving(sender[1:], now)

    def _stop_giving(self, nonce: bytes | None, now: float) -> None:
        member = self.roster.members.get(nonce) if nonce else None
        if member is not None and member.takes_calls:
            member.become(State.DRAINING)
            self.dispatch.requeue(member, now)

    # ---- calls and answers ------------------------------------------------------------------------------------------

    def _call(self, sender: bytes, call: Call, frames: Frames, now: float) -> None:
        caller = self.roster.callers[sender[1:]]
        if self._early and self._early.pop((call.call, call.attempt), False):
            self.counters["early_cancels"] += 1
        elif self.dispatch.knows(call.call):
            self.counters["refused"] += 1  # a replayed id: the running call goes on, and answers its own caller
        elif call.pool == BROKER:
            self._answer_self(sender, call, frames, now)
        else:
            self.dispatch.submit(caller, sender, call, frames, now)

    def _answer(self, sender: bytes, answer: Reply | Failure, frames: Frames, now: float) -> None:
        member = self.roster.members.get(sender[1:])
        if member is None or not self.dispatch.answer(member, answer, frames, now):
            self.counters["late"] += 1

    def _cancel(self, sender: bytes, message: Cancel, frames: Frames, now: float) -> None:
        if message.call in self.roster.callers[sender[1:]].calls:
            self.dispatch.give_up(message.call)
        elif not self.dispatch.knows(message.call):
            self._early[(message.call, message.attempt)] = True

    def _end_session(self, sender: bytes, message: EndSession, frames: Frames, now: float) -> None:
        self.dispatch.sessions.end((message.pool, message.session))

    def _refuse(self, sender: bytes, error: ZagentError, message: Any = None) -> None:
        """Count it, and answer so that the other side knows why."""
        self.counters["refused"] += 1
        call, attempt = (message.call, message.attempt) if type(message) is Call else (b"", 0)
        self._send(sender, [encode_header(Failure(call, attempt, False)), *encode_body(to_wire(error))])

    # ---- the broker's own methods -----------------------------------------------------------------------------------

    def _answer_self(self, sender: bytes, call: Call, frames: Frames, now: float) -> None:
        try:
            method = self._own.get(call.method)
            if method is None:
                raise UnknownMethod(f"the broker has no method {call.method!r}, only {sorted(self._own)}")
            body = encode_body(method(decode_body(frames[1:]), now))
        except ZagentError as error:
            self.dispatch.fail(sender, call, error)
            return
        self._send(sender, [encode_header(Reply(call.call, call.attempt)), *body])

    def _status(self, argument: Any, now: float) -> dict[str, Any]:
        return {
            "pools": self.roster.status(),
            "sessions": len(self.dispatch.sessions),
            "pending": self.dispatch.pending,
            "callers": len(self.roster.callers),
            "incarnation": self._incarnation,
            "counters": dict(self.counters),
        }

    def _named(self, argument: Any) -> bytes:
        pool, name = argument if isinstance(argument, list) and len(argument) == 2 else (None, None)
        nonce = self.roster.nonce_of(str(pool), str(name))
        if nonce is None:
            raise InvalidRequest(f"no live member {name!r} in pool {pool!r}")
        return nonce

    def _drain_named(self, argument: Any, now: float) -> None:
        self._stop_giving(self._named(argument), now)

    def _remove_named(self, argument: Any, now: float) -> None:
        nonce = self._named(argument)
        self.dispatch.stop(self.roster.members[nonce])
        self._gone(nonce, "it was removed", now)
