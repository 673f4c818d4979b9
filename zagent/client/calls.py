"""Calls into pools, by whoever needs an answer: ids, attempts, deadlines, cancellation, retries.

Only callers retry: the broker and the members answer `TransientError`s and forget; the pending table here decides by
kind whether the call is sent again, as attempt + 1.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zagent.client.link import Link
from zagent.errors import (
    CallerError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    InvalidRequest,
    MemberLost,
    TransientError,
    from_wire,
)
from zagent.wire.channel import Frames
from zagent.wire.codec import decode_body, encode_body
from zagent.wire.messages import BROKER, Call, Cancel, EndSession, Failure, Reply


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call is sent, and how long to wait in between (doubling, in seconds)."""

    #: Ten: enough to outlive every restart budget; a call that loses ten members is not unlucky.
    attempts: int = 10
    #: A lost member's call finds another at once; a full queue needs time to empty.
    first_wait_s: float = 0.05
    longest_wait_s: float = 2.0

    def wait(self, attempt: int) -> float:
        """Seconds to wait after the failure of ``attempt`` (1, 2, …)."""
        return min(self.first_wait_s * 2.0 ** (attempt - 1), self.longest_wait_s)


@dataclass(slots=True)
class _Pending:
    attempt: int
    future: asyncio.Future[Frames]


class Calls:
    """The pending table of one link.

    Exactly one answer reaches each call; answers to attempts or calls that nobody waits for are counted in ``late``.
    """

    def __init__(
        self,
        link: Link,
        retry: Retry | None = None,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self.link = link
        self.late = 0
        self.retries = 0
        self._retry = retry or Retry()
        self._sleep = sleep
        self._pending: dict[bytes, _Pending] = {}
        self._counter = 0
        link.on(Reply, self._resolve)
        link.on(Failure, self._fail)
        link.on_close(self._close)

    def __len__(self) -> int:
        """Calls waiting for an answer."""
        return len(self._pending)

    async def call(
        self,
        pool: str,
        method: str,
        argument: Any = None,
        *,
        session: str = "",
        member: str = "",
        timeout: float | None = None,
        on_attempt: Callable[[int], None] | None = None,
    ) -> Any:
        """Run ``method`` on a member of ``pool`` and return its result.

        Args:
            argument: None, bools, numbers, strings, bytes, lists, dicts and numpy arrays of these.
            session: calls of one session go to one member; text.
            member: to this member and no other, past balancing and credits, on the control lane.
            timeout: seconds, all attempts together; None or infinity = none.
            on_attempt: told the number of each attempt as it starts.

        Raises:
            InvalidRequest: the session is no text.
            DeadlineExceeded: the time ran out.
            TransientError: still failing at the last attempt (at once where it is not `repeatable`, and `MemberLost`
                where a ``member`` was named).
            Exception: what the method raised, as the same class where this side knows it.
        """
        if not isinstance(session, str):  # the broker would drop the call as malformed
            raise InvalidRequest(f"a session is text, got {session!r:.80}")
        body = encode_body(argument)
        self._counter += 1
        call_id = self.link.nonce + self._counter.to_bytes(8, "big")
        if self.link.loop not in (None, asyncio.get_running_loop()):
            raise CallerError(
                f"{pool!r} was called from another event loop than the link's, where the answer comes: in a worker use "
                "async functions and await, not asyncio.run() in a plain one"
            )
        deadline = None if timeout in (None, math.inf) else asyncio.get_running_loop().time() + timeout
        call = Call(call_id, 1, pool, method, session, -1, member, self.link.incarnation)
        while True:
            if on_attempt is not None:
                on_attempt(call.attempt)
            try:
                return decode_body(await self._attempt(call, body, deadline))
            except TransientError as error:
                named = member and isinstance(error, MemberLost)
                if named or not error.repeatable or call.attempt >= self._retry.attempts:
                    raise
            self.retries += 1
            wait = self._retry.wait(call.attempt)
            left = wait if deadline is None else deadline - asyncio.get_running_loop().time()
            await self._sleep(max(0.0, min(wait, left)))
            call = call._replace(attempt=call.attempt + 1)

    async def _attempt(self, call: Call, body: Any, deadline: float | None) -> Frames:
        """Send once and wait for the answer's body."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Frames] = loop.create_future()
        control = bool(call.member) or call.pool == BROKER
        timer = None
        if deadline is not None:
            remaining = deadline - loop.time()
            call = call._replace(remaining_ms=max(0, int(remaining * 1000)))
            timer = loop.call_at(deadline, self._expire, call)
        self._pending[call.call] = _Pending(call.attempt, future)
        try:
            self.link.send(call, body, control=control)
            return await future
        except (asyncio.CancelledError, DeadlineExceeded):
            self._send_cancel(call)
            raise
        finally:
            del self._pending[call.call]
            if timer is not None:
                timer.cancel()

    def _send_cancel(self, call: Call) -> None:
        with suppress(ConnectionLost):  # the broker cancels the calls of a link that is gone
            self.link.send(Cancel(call.call, call.attempt), control=True)

    def _expire(self, call: Call) -> None:
        pending = self._pending.get(call.call)
        if pending is not None and not pending.future.done():
            where = f"member {call.member!r}" if call.member else f"pool {call.pool!r}"
            text = f"no answer from {where} to {call.method!r} in time (attempt {call.attempt})"
            pending.future.set_exception(DeadlineExceeded(text))

    def end_session(self, pool: str, session: str) -> None:
        """The trajectory is over: the broker may forget where its session was bound."""
        self.link.send(EndSession(pool, session))

    def _waiting_for(self, answer: Reply | Failure) -> asyncio.Future[Frames] | None:
        pending = self._pending.get(answer.call)
        if pending is None or pending.attempt != answer.attempt or pending.future.done():
            self.late += 1
            return None
        return pending.future

    def _resolve(self, reply: Reply, body: Frames) -> None:
        future = self._waiting_for(reply)
        if future is not None:
            future.set_result(body)

    def _fail(self, failure: Failure, body: Frames) -> None:
        future = self._waiting_for(failure)
        if future is None:
            return
        try:
            error = from_wire(decode_body(body))
        except DecodeError as unreadable:  # still the call's end
            error = unreadable
        future.set_exception(error)

    def _close(self) -> None:
        for pending in self._pending.values():
            if not pending.future.done() and not pending.future.get_loop().is_closed():
                error = ConnectionLost(f"the link to the broker is closed: {self.link.closed}")
                pending.future.set_exception(error)
