"""The broker's brain: events (`frames`, `unsendable`, `tick`) and the time go in, frames to send come out.

No socket, no clock: the server feeds it (zagent/broker/server.py), tests feed it by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from cachetools import LRUCache

from zagent.broker.dispatch import Dispatch
from zagent.broker.gates import Gates
from zagent.broker.leases import Frames
from zagent.broker.own import Own
from zagent.broker.pool import Caller, Pool
from zagent.broker.presence import Presence
from zagent.broker.pulse import Pulses
from zagent.broker.record import Assignment
from zagent.broker.roster import NONCE, Roster
from zagent.broker.routing import STICKY, Routing
from zagent.broker.sticky import Sessions
from zagent.errors import (
    DecodeError,
    ProtocolError,
    VersionMismatch,
    ZagentError,
    to_wire,
)
from zagent.wire.codec import decode_header, encode_body, encode_header
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
    Health,
    Hello,
    HelloWanted,
    Progress,
    Reply,
)

Sends: TypeAlias = "list[tuple[bytes, Frames]]"
#: Takes (peer, identity of its lane, message, frames, now).
Handler: TypeAlias = "Callable[[Caller, bytes, Any, Frames, float], None]"

#: Cancels that overtook their call (they travel on another lane) are remembered until it comes.
EARLY_CANCELS = 10_000
#: Longest header of a peer that is not here, in bytes: a hello's is some hundred, and larger ones take time to read.
STRANGE_MAX = 4096
#: What was dropped, refused or could not be delivered; and what was noticed.
COUNTERS = (
    *("malformed", "strangers", "refused", "replayed", "late", "early_cancels", "unsendable", "turned_away"),
    *("crashes", "claimed"),
)

_HELLO_WANTED = [encode_header(HelloWanted())]


class BrokerCore:
    """Routes calls between callers and the members of pools.

    Args:
        secret: the launcher's join secret; a member's hello must carry it.
        pools: names of the pools there can be.
        max_pending: calls that may wait for a member.
        sticky_cache_size: idle sessions remembered.
        routing: by pool, where it is not merely sticky.
        incarnation: this broker's life, told in every welcome.
        expected: members (pool, name, epoch) to wait for, where it was started in the place of one that died.
        holders: callers (by nonce) to wait for as well, since they may hold gates (`Gates`).
        remember: called with the holders whenever they change, for the broker that may have to take this one's place.
        facts: told to every peer in its welcome.
        record: called with every `Assignment`, for tests and for people who debug routing.
        now: when it starts, s.
    """

    def __init__(
        self,
        *,
        secret: str,
        pools: Sequence[str] = ("engine", "worker"),
        max_pending: int = 100_000,
        sticky_cache_size: int = 10_000,
        routing: Mapping[str, Routing] = MappingProxyType({}),
        incarnation: int = 1,
        expected: Sequence[Sequence[Any]] = (),
        holders: Sequence[bytes] = (),
        remember: Callable[[list[bytes]], None] | None = None,
        facts: dict[str, Any] | None = None,
        record: Callable[[Assignment], None] | None = None,
        now: float = 0.0,
    ) -> None:
        self.pools = {name: Pool(name, routing.get(name, STICKY)) for name in pools}
        self.roster = Roster(secret, self.pools)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.incarnation = incarnation
        self._out: Sends = []
        self.dispatch = Dispatch(
            self.pools,
            self._send,
            Sessions(sticky_cache_size),
            max_pending=max_pending,
            incarnation=incarnation,
            recovering=bool(expected or holders),
            counters=self.counters,
            record=record,
        )
        gates = Gates(self.pools, remember)
        self._presence = Presence(
            self.roster,
            self.pools,
            self.dispatch,
            self._send,
            self.counters,
            gates=gates,
            incarnation=incarnation,
            facts=facts or {},
            expected=[*((pool, name, epoch) for pool, name, epoch in expected), *holders],
            now=now,
        )
        self._pulses = Pulses(self.roster, self.dispatch.held, self._send, incarnation=incarnation, now=now)
        self._early: LRUCache[tuple[bytes, int], bool] = LRUCache(maxsize=EARLY_CANCELS)
        self._handlers: dict[type, Handler] = {
            Call: self._call,
            Reply: self._answer,
            Failure: self._answer,
            Progress: self._progress,
            Cancel: self._cancel,
            EndSession: self._end_session,
            Goodbye: self._goodbye,
            Drain: self._drain,
            Exited: self._from_launcher(self._exited),
            Health: self._from_launcher(self._health),
            Abandoned: self._from_launcher(self._abandoned),
        }
        self._own = Own(
            self.roster, self.pools, self.dispatch, self._presence, self.counters, gates=gates, incarnation=incarnation
        )

    # ---- events -----------------------------------------------------------------------------------------------------

    def frames(self, sender: bytes, frames: Frames, now: float) -> Sends:
        """A message from the peer with identity ``sender``. Bytes that are no message are counted and dropped."""
        caller = self.roster.lanes.get(sender)
        try:
            if caller is None and len(frames[0]) > STRANGE_MAX:
                raise DecodeError("a stranger's header is too long")
            message = decode_header(frames[0])
        except VersionMismatch as error:
            self._refuse(sender, error)
        except (DecodeError, IndexError):
            self.counters["malformed"] += 1
        else:
            kind = type(message)
            if kind is Hello:
                self._hello(sender, caller, message, frames, now)
            elif caller is None:
                self._strange(sender, message)
            elif kind in self._handlers:
                self._handlers[kind](caller, sender, message, frames, now)
            else:
                self.counters["malformed"] += 1
        return self._flush()

    def unsendable(self, to: bytes, frames: Frames, now: float) -> Sends:
        """A message of this core could not be delivered: its receiver is gone."""
        self.counters["unsendable"] += 1
        message = decode_header(frames[0])
        if type(message) is Call:
            self.dispatch.undelivered(message[:2])
        self._presence.unreachable(to, now)
        return self._flush()

    def tick(self, now: float) -> Sends:
        """Time has passed."""
        self.dispatch.expire(now)
        self._presence.tick(now)
        self._pulses.tick(now)
        return self._flush()

    @property
    def restless(self) -> bool:
        """Whether the next ticks do more than to send pulses."""
        return self.dispatch.pending > 0 or self._presence.restless

    def _send(self, to: bytes, frames: Frames) -> None:
        self._out.append((to, frames))

    def _flush(self) -> Sends:
        out, self._out = self._out, []
        return out

    # ---- coming and going -------------------------------------------------------------------------------------------

    def _hello(self, sender: bytes, caller: Caller | None, hello: Any, frames: Frames, now: float) -> None:
        try:
            self._presence.hello(sender, caller, hello, frames[1:], now)
        except ProtocolError as error:
            self._refuse(sender, error)

    def _strange(self, sender: bytes, message: Any) -> None:
        """Somebody who has not said hello, or was forgotten: nothing is kept of it, and it is asked for its hello."""
        self.counters["strangers"] += 1
        if type(message) is not Goodbye:
            self._send(sender, _HELLO_WANTED)

    def _from_launcher(self, handler: Callable[[Any, Frames, float], None]) -> Handler:
        """``handler`` for those who know the join secret; others are told that it is not for them to say."""

        def checked(caller: Caller, sender: bytes, message: Any, frames: Frames, now: float) -> None:
            if caller.trusted:
                handler(message, frames, now)
            else:
                self._refuse(sender, ProtocolError(f"only the launcher may say {type(message).__name__}"))

        return checked

    def _goodbye(self, caller: Caller, sender: bytes, message: Goodbye, frames: Frames, now: float) -> None:
        self._presence.goodbye(caller, message, now)

    def _exited(self, message: Exited, frames: Frames, now: float) -> None:
        self._presence.exited(message, now)

    def _health(self, message: Health, frames: Frames, now: float) -> None:
        self._presence.health(message, now)

    def _abandoned(self, message: Abandoned, frames: Frames, now: float) -> None:
        if message.pool in self.pools:
            self.dispatch.abandon(self.pools[message.pool], [bytes(frame) for frame in frames[1:]])

    def _drain(self, caller: Caller, sender: bytes, message: Drain, frames: Frames, now: float) -> None:
        if caller.member is not None:
            self._presence.drain(caller.member, now)

    # ---- calls and answers ------------------------------------------------------------------------------------------

    def _call(self, caller: Caller, sender: bytes, call: Call, frames: Frames, now: float) -> None:
        if call.call[:NONCE] != caller.nonce:
            self._refuse(sender, ProtocolError("a call's id begins with its caller's nonce"), call)
        elif self._early and self._early.pop(call[:2], False):
            self.counters["early_cancels"] += 1
        elif call.pool == BROKER:
            self._answer_self(caller, sender, call, frames, now)
        else:
            self.dispatch.submit(caller, sender, call, frames, now)

    def _answer(self, caller: Caller, sender: bytes, answer: Reply | Failure, frames: Frames, now: float) -> None:
        member = caller.member
        if member is not None:
            member.answered = answer.number
        if member is None or not self.dispatch.answer(member, answer, frames, now):
            self.counters["late"] += 1

    def _progress(self, caller: Caller, sender: bytes, message: Progress, frames: Frames, now: float) -> None:
        if caller.member is not None:
            self.dispatch.progress(caller.member, message, frames)

    def _cancel(self, caller: Caller, sender: bytes, message: Cancel, frames: Frames, now: float) -> None:
        if message.call[:NONCE] != caller.nonce:
            self.counters["refused"] += 1
        elif not self.dispatch.give_up(message[:2]):
            self._early[message[:2]] = True

    def _end_session(self, caller: Caller, sender: bytes, message: EndSession, frames: Frames, now: float) -> None:
        self.dispatch.sessions.end((message.pool, message.session))

    def _refuse(self, sender: bytes, error: ZagentError, message: Any = None) -> None:
        """Count it, and answer so that the other side knows why: without a traceback, which takes ten times as long as
        all the rest and tells strangers where our files lie."""
        self.counters["refused"] += 1
        call, attempt = message[:2] if type(message) is Call else (b"", 0)
        self._send(
            sender, [encode_header(Failure(call, attempt, False)), *encode_body(to_wire(error.with_traceback(None)))]
        )

    def _answer_self(self, caller: Caller, sender: bytes, call: Call, frames: Frames, now: float) -> None:
        try:
            body = self._own.answer(call.method, frames[1:], caller, now)
        except ZagentError as error:
            self.dispatch.fail(sender, call, error.with_traceback(None))
        else:
            self._send(sender, [encode_header(Reply(call.call, call.attempt)), *body])
