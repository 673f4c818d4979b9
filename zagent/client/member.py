"""The serving side of a member: one task per call, each answered exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from cachetools import LRUCache

from zagent.client.link import Link
from zagent.errors import (
    CallCancelled,
    ConnectionLost,
    DeadlineExceeded,
    MemberLost,
    Refused,
    TransientError,
    UnknownMethod,
    to_wire,
)
from zagent.wire.channel import Frames
from zagent.wire.codec import decode_body, encode_body
from zagent.wire.messages import Call, Cancel, Drain, Failure, Reply, may_repeat

#: ``await method(argument, call)`` → result; cancelled when the caller gives the call up.
Method: TypeAlias = "Callable[[Any, Call], Awaitable[Any]]"
#: Cancels that overtook their call are remembered until it comes.
EARLY_CANCELS = 10_000


class Member:
    """Serves the calls that the broker gives this process over ``link``."""

    def __init__(self, link: Link, methods: Mapping[str, Method]) -> None:
        self._link = link
        self._methods = dict(methods)
        self._running: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._early: LRUCache[tuple[bytes, int], bool] = LRUCache(maxsize=EARLY_CANCELS)
        self._closing: str | None = None
        #: Who made us: `asyncio.run` cancels it with all others when the process ends by an accident of a loop's.
        self._home = asyncio.current_task()
        link.on(Call, self._start)
        link.on(Cancel, self._cancel)

    @property
    def in_flight(self) -> int:
        """Calls that have not been answered yet."""
        return len(self._running)

    def _start(self, call: Call, body: Frames) -> None:
        key = (call.call, call.attempt)
        if key in self._running:
            return  # sent twice: it is running, and will be answered once
        if self._early and self._early.pop(key, False):
            self._answer_error(call, CallCancelled("cancelled before it began"))
        elif self._closing is not None:
            self._answer_error(call, Refused(f"{self._link.identity.name} is leaving: {self._closing}"))
        else:
            self._running[key] = asyncio.get_running_loop().create_task(self._run(call, body))

    async def _run(self, call: Call, body: Frames) -> None:
        timer = self._deadline(call)
        try:
            method = self._methods.get(call.method)
            if method is None:
                known = ", ".join(sorted(self._methods))
                raise UnknownMethod(f"{self._link.identity.name} has no method {call.method!r}, only {known}")
            answer = encode_body(await method(decode_body(body), call))
        except asyncio.CancelledError as cancelled:
            self._answer_error(call, self._why(cancelled, call))
        except BaseException as error:  # whatever the method raised belongs to its caller, a Rust library's panic too
            self._answer_error(call, error)
        else:
            self._send(Reply(call.call, call.attempt), answer)
        finally:
            self._running.pop((call.call, call.attempt), None)
            if timer is not None:
                timer.cancel()

    def _deadline(self, call: Call) -> asyncio.TimerHandle | None:
        """The caller cancels at its deadline; this holds when the caller cannot any more."""
        if call.remaining_ms < 0:
            return None
        task = asyncio.current_task()
        assert task is not None
        return asyncio.get_running_loop().call_later(call.remaining_ms / 1000, task.cancel, "deadline")

    def _why(self, cancelled: asyncio.CancelledError, call: Call) -> Exception:
        if self._closing is not None:
            return self._lost(call.method, self._closing)
        if cancelled.args == ("deadline",):
            return DeadlineExceeded("the call's time ran out while it ran")
        if self._home is not None and self._home.cancelling():
            return self._lost(call.method, "its event loop ended")
        return CallCancelled("cancelled by its caller")

    def _lost(self, method: str, reason: str) -> MemberLost:
        me = self._link.identity
        return MemberLost(f"{me.name} is gone: {reason}", repeatable=may_repeat(method, me.facts))

    def _cancel(self, cancel: Cancel, body: Frames) -> None:
        task = self._running.get((cancel.call, cancel.attempt))
        if task is None:
            self._early[(cancel.call, cancel.attempt)] = True
        else:  # later: a task cancelled before its first step would never run, and never answer
            asyncio.get_running_loop().call_soon(task.cancel)

    def _answer_error(self, call: Call, error: BaseException) -> None:
        accepted = not isinstance(error, TransientError)
        self._send(Failure(call.call, call.attempt, accepted), encode_body(to_wire(error)))

    def _send(self, answer: Reply | Failure, body: Any) -> None:
        with suppress(ConnectionLost):  # the broker has told the caller already that this member is gone
            self._link.send(answer, body)

    async def leave(self, reason: str, grace: float = 0.0) -> None:
        """Take nothing new, give what runs ``grace`` seconds, then fail it as `MemberLost`; returns when all is
        answered, at the latest 5 s after the grace (a task that refuses to be cancelled does not hold the exit up)."""
        self._link.send(Drain(), control=True)
        if self._running and grace > 0:
            await asyncio.wait(set(self._running.values()), timeout=grace)
        self._closing = reason
        running = set(self._running.values())
        await asyncio.sleep(0)  # as in `_cancel`
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=5.0)

    def fail_all(self, reason: str) -> None:
        """Answer everything that runs as `MemberLost`, now, without waiting for any of it: the process is about to
        end by itself."""
        self._closing = reason
        for call_id, attempt in list(self._running):
            error = to_wire(MemberLost(f"{self._link.identity.name} is gone: {reason}"))
            self._send(Failure(call_id, attempt, False), encode_body(error))
        self._running.clear()
