"""Calls into pools, by whoever needs an answer: ids, attempts, deadlines, cancellation, retries.

Only callers retry: the broker and the members answer `TransientError`s and forget; the pending table here decides by
kind whether the call is sent again, as attempt + 1. A broker that has lost its calls gets them from here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from zagent.client.link import Link
from zagent.errors import (
    CallerError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    InvalidRequest,
    MemberLost,
    Overloaded,
    TransientError,
    from_wire,
)
from zagent.wire.channel import Frames
from zagent.wire.codec import Buffer, decode_body, encode_body
from zagent.wire.messages import BROKER, Call, Cancel, EndSession, Failure, Progress, Reply


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
        return min(self.first_wait_s * 2.0 ** min(attempt - 1, 100), self.longest_wait_s)


@dataclass(slots=True)
class _Pending:
    """A call, from its first attempt to its answer."""

    call: Call  #: the header of the running attempt
    body: list[Buffer]
    deadline: float | None  #: of the loop's clock
    on_attempt: Callable[[int], None] | None
    on_progress: Callable[[Any], None] | None
    renew: Callable[[Any], Any] | None
    future: asyncio.Future[Frames] = field(init=False)
    sent: bool = False  #: the attempt may have reached a broker
    again: bool = False  #: the attempt was sent to a second broker: its progress has gaps, or is another run's


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
        #: Sent since the last pulse, and since the one before: a broker that dies may take them with it.
        self._cancels: list[Cancel] = []
        self._former_cancels: list[Cancel] = []
        link.on(Reply, self._resolve)
        link.on(Failure, self._fail)
        link.on(Progress, self._progress)
        link.on_close(self._close)
        link.on_pulse(self._pulse)
        link.on_rejoin(self._send_again)

    def __len__(self) -> int:
        """Calls waiting for an answer."""
        return len(self._pending)

    def now(self) -> float:
        """The loop's time, s."""
        return asyncio.get_running_loop().time()

    async def call(
        self,
        pool: str,
        method: str,
        argument: Any = None,
        *,
        session: str = "",
        group: str = "",
        member: str = "",
        attempt: int = 1,
        timeout: float | None = None,
        on_attempt: Callable[[int], None] | None = None,
        on_progress: Callable[[Any], None] | None = None,
        renew: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Run ``method`` on a member of ``pool`` and return its result.

        Args:
            argument: None, bools, numbers, strings, bytes, lists, dicts and numpy arrays of these.
            session: calls of one session go to one member; text.
            group: sessions of one group may be brought together (`routing.group`).
            member: to this member and no other, past balancing and credits, on the control lane.
            attempt: number of the first attempt; from 2 on it goes ahead of fresh calls, where it must wait.
            timeout: seconds, all attempts together; None or infinity = none.
            on_attempt: told the number of each attempt as it starts.
            on_progress: told what the member says of its answer while it works on it, each time from where it left off;
                what a lost broker had is not made up for.
            renew: makes the argument of each further attempt of the one before's (decoded); None = the same.

        Raises:
            InvalidRequest: the session is no text.
            DeadlineExceeded: the time ran out.
            TransientError: still failing at the last attempt (at once where it is not `repeatable`, and `MemberLost`
                where a ``member`` was named).
            PoisonedRequest: two members have died by themselves with the call, the second time it alone was blamed.
            Exception: what the method raised, as the same class where this side knows it; what ``on_progress`` or
                ``renew`` raised.
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
        call = Call(call_id, attempt, pool, method, session, -1, member, self.link.incarnation, group=group)
        pending = _Pending(call, body, deadline, on_attempt, on_progress, renew)
        if on_attempt is not None:
            on_attempt(attempt)
        failures = counted = 0
        while True:
            try:
                return decode_body(await self._attempt(pending))
            except TransientError as error:
                crashed = isinstance(error, MemberLost) and error.crashed
                failures += 1
                # A crash ends with a conviction, and a queue is full for as long as it takes: they do not count.
                counted += self._retry.attempts == 1 or not (crashed or isinstance(error, Overloaded))
                named = member and isinstance(error, MemberLost)
                if named or not error.repeatable or counted == self._retry.attempts:
                    raise
                suspect = pending.call.suspect or crashed
            await self.back_off(failures, deadline)
            self._next(pending, self.link.incarnation, suspect=suspect)

    async def back_off(self, failures: int, deadline: float | None = None) -> None:
        """Wait after so many failures in a row, not beyond ``deadline`` (of `now`)."""
        wait = self._retry.wait(failures)
        left = wait if deadline is None else deadline - self.now()
        await self._sleep(max(0.0, min(wait, left)))

    async def _attempt(self, pending: _Pending) -> Frames:
        """Send and wait for the answer's body."""
        loop = asyncio.get_running_loop()
        pending.future = loop.create_future()
        timer = None if pending.deadline is None else loop.call_at(pending.deadline, self._expire, pending)
        call_id = pending.call.call
        self._pending[call_id] = pending
        try:
            self._send(pending)
            return await pending.future
        except (asyncio.CancelledError, DeadlineExceeded):
            self._send_cancel(pending.call)
            raise
        finally:
            del self._pending[call_id]
            if timer is not None:
                timer.cancel()

    def _send(self, pending: _Pending) -> None:
        call = pending.call
        if pending.deadline is not None:
            remaining = pending.deadline - asyncio.get_running_loop().time()
            call = call._replace(remaining_ms=max(0, int(remaining * 1000)))
        pending.sent = not self.link.greeting
        self.link.send(call, pending.body, control=bool(call.member) or call.pool == BROKER)

    def _next(self, pending: _Pending, incarnation: int, *, suspect: bool) -> None:
        """Make it the next attempt."""
        call = pending.call = pending.call._replace(
            attempt=pending.call.attempt + 1, incarnation=incarnation, suspect=suspect
        )
        pending.sent = pending.again = False
        self.retries += 1
        argument = None if pending.renew is None else pending.renew(decode_body(pending.body))
        if argument is not None:
            pending.body = encode_body(argument)
        if pending.on_attempt is not None:
            pending.on_attempt(call.attempt)

    def _send_again(self, same_broker: bool) -> None:
        """The broker knows nothing of what waits here (any more), nor of what was given up."""
        for cancel in self._former_cancels + self._cancels:
            self.link.send(cancel, control=True)
        for pending in list(self._pending.values()):
            if pending.future.done():
                continue
            try:
                self._renew(pending, same_broker=same_broker)
                self._send(pending)
            except Exception as error:
                pending.future.set_exception(error)

    def _renew(self, pending: _Pending, *, same_broker: bool) -> None:
        """A new broker may find the attempt where it runs. The same has forgotten us, and cancelled it. In both cases
        the header must not look like a fresh call's, unless it is one."""
        if not pending.sent:
            pending.call = pending.call._replace(incarnation=self.link.incarnation)
        elif same_broker:
            self._send_cancel(pending.call)  # what was sent between two hellos may have reached it after all
            self._next(pending, 0, suspect=pending.call.suspect)
        else:
            pending.again = True

    def _send_cancel(self, call: Call) -> None:
        cancel = Cancel(call.call, call.attempt)
        self._cancels.append(cancel)
        with suppress(ConnectionLost):  # the broker cancels the calls of a link that is gone
            self.link.send(cancel, control=True)

    def _pulse(self) -> None:
        self._former_cancels, self._cancels = self._cancels, []

    def _expire(self, pending: _Pending) -> None:
        if not pending.future.done():
            call = pending.call
            where = f"member {call.member!r}" if call.member else f"pool {call.pool!r}"
            text = f"no answer from {where} to {call.method!r} in time (attempt {call.attempt})"
            pending.future.set_exception(DeadlineExceeded(text))

    def end_session(self, pool: str, session: str) -> None:
        """The trajectory is over: the broker may forget where its session was bound."""
        self.link.send(EndSession(pool, session))

    def _waiting_for(self, message: Reply | Failure | Progress) -> _Pending | None:
        pending = self._pending.get(message.call)
        if pending is None or pending.call.attempt != message.attempt or pending.future.done():
            return None
        return pending

    def _resolve(self, reply: Reply, body: Frames) -> None:
        pending = self._waiting_for(reply)
        if pending is None:
            self.late += 1
        else:
            pending.future.set_result(body)

    def _fail(self, failure: Failure, body: Frames) -> None:
        pending = self._waiting_for(failure)
        if pending is None:
            self.late += 1
            return
        try:
            error = from_wire(decode_body(body))
        except DecodeError as unreadable:  # still the call's end
            error = unreadable
        pending.future.set_exception(error)

    def _progress(self, progress: Progress, body: Frames) -> None:
        pending = self._waiting_for(progress)
        if pending is None or pending.again or pending.on_progress is None:
            return
        try:
            pending.on_progress(decode_body(body))
        except Exception as error:
            self._send_cancel(pending.call)
            pending.future.set_exception(error)

    def _close(self) -> None:
        for pending in self._pending.values():
            if not pending.future.done() and not pending.future.get_loop().is_closed():
                error = ConnectionLost(f"the link to the broker is closed: {self.link.closed}")
                pending.future.set_exception(error)
