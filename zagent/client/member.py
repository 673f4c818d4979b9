"""The serving side of a member: one task per call, each answered exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, TypeAlias

from cachetools import LRUCache

from zagent.client.kept import Answer, Kept, Key
from zagent.client.link import Link
from zagent.errors import (
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
from zagent.wire.messages import Call, Cancel, Drain, Failure, Goodbye, Passed, Progress, Reply, may_repeat

#: ``await method(argument, call)`` → result; cancelled when the caller gives the call up.
Method: TypeAlias = "Callable[[Any, Call], Awaitable[Any]]"
#: Cancels that overtook their call are remembered until it comes.
EARLY_CANCELS = 10_000
#: Bytes of answers kept at most: a second or two of even the largest (`Kept`).
KEPT_BYTES = 64 * 1024 * 1024
#: Seconds after a broker's first welcome within which callers send again what they wait for (as the broker's own).
CLAIM_S = 10.0


class Member:
    """Serves the calls that the broker gives this process over ``link``.

    What runs goes on without a broker, and the next one is told of it, and of the answers that may have been lost.
    """

    def __init__(self, link: Link, methods: Mapping[str, Method]) -> None:
        self._link = link
        self._methods = dict(methods)
        self._running: dict[Key, tuple[Call, asyncio.Task[None]]] = {}
        #: What of these we were told to stop.
        self._stopped: set[Key] = set()
        #: What of these names this member, and has not been sent again since a broker knows nothing of it.
        self._unclaimed: set[Key] = set()
        self._kept = Kept(KEPT_BYTES)
        self._numbers = count(1)  #: of answers
        self._early: LRUCache[Key, bool] = LRUCache(maxsize=EARLY_CANCELS)
        self._leaving = False
        self._closing: str | None = None
        #: Who made us: `asyncio.run` cancels it with all others when the process ends by an accident of a loop's.
        self._home = asyncio.current_task()
        link.on(Call, self._start)
        link.on(Cancel, self._cancel)
        link.on(Passed, lambda passed, body: self._kept.passed(passed.number))
        link.on_rejoin(self._rejoined)
        link.hello_facts = self._facts

    @property
    def in_flight(self) -> int:
        """Calls that have not been answered yet."""
        return len(self._running)

    def _facts(self) -> dict[str, Any]:
        """Ours, and the calls that a broker that does not know them may give us back. Those that named this member are
        none, as they come here anyway. Nor are those that it was told to stop: somebody else may have them by now, and
        what we say of them is no answer."""
        calls = [(call, True) for key, (call, _) in self._running.items() if key not in self._stopped]
        calls += [(kept.call, False) for kept in self._kept if not kept.stopped]
        held = [[c.call, c.attempt, c.session, c.method, runs] for c, runs in calls if not c.member]
        return {**self._link.identity.facts, "held": held}

    def _rejoined(self, same_broker: bool) -> None:
        """The broker cannot tell us of a caller that has died with the one before, of calls that named us least of all:
        an order that lasts as long as its caller would go on for ever."""
        if self._leaving:
            self._link.send(Drain(), control=True)
        self._unclaimed = {key for key, (call, _) in self._running.items() if call.member}
        if self._unclaimed:
            asyncio.get_running_loop().call_later(CLAIM_S, self._stop_unclaimed, frozenset(self._unclaimed))

    def _stop_unclaimed(self, calls: frozenset[Key]) -> None:
        for key in calls & self._unclaimed & self._running.keys():
            self._stop(key)

    def _start(self, call: Call, body: Frames) -> None:
        key = (call.call, call.attempt)
        if key in self._running:
            self._unclaimed.discard(key)
            return  # sent again: it is running, and will be answered once
        if self._sent_again(key):
            return
        if self._early and self._early.pop(key, False):
            self._answer_error(call, TransientError("cancelled before it began"), stopped=True)
        elif self._closing is not None:
            self._answer_error(call, Refused(f"{self._link.identity.name} is leaving: {self._closing}"))
        else:
            self._running[key] = call, asyncio.get_running_loop().create_task(self._run(call, body))

    async def _run(self, call: Call, body: Frames) -> None:
        timer = self._deadline(call) if call.remaining_ms >= 0 else None
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
            self._send(Answer(call, Reply(call.call, call.attempt, next(self._numbers)), answer))
        finally:
            self._running.pop((call.call, call.attempt), None)
            self._stopped.discard((call.call, call.attempt))
            self._unclaimed.discard((call.call, call.attempt))
            if timer is not None:
                timer.cancel()

    def _deadline(self, call: Call) -> asyncio.TimerHandle:
        """The caller cancels at its deadline; this holds when the caller cannot any more."""
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
        # Whoever cancelled it does not wait. Only a caller that a broker had forgotten hears this, and tries again.
        repeatable = may_repeat(call.method, self._link.identity.facts)
        return TransientError("cancelled, and its caller still waits", repeatable=repeatable)

    def _lost(self, method: str, reason: str) -> MemberLost:
        me = self._link.identity
        return MemberLost(f"{me.name} is gone: {reason}", repeatable=may_repeat(method, me.facts))

    def _cancel(self, cancel: Cancel, body: Frames) -> None:
        key = (cancel.call, cancel.attempt)
        if key in self._running:
            self._stop(key)
        elif not self._sent_again(key):  # the broker waits for it: it was lost, or crossed the cancel on its way
            self._early[key] = True

    def _stop(self, key: Key) -> None:
        self._stopped.add(key)
        # Later: a task cancelled before its first step would never run, and never answer.
        asyncio.get_running_loop().call_soon(self._running[key][1].cancel)

    def progress(self, call: Call, value: Any) -> None:
        """Send the caller the part of the answer that has come since the last one, while the call runs."""
        if (call.call, call.attempt) in self._running:
            with suppress(ConnectionLost):
                self._link.send(Progress(call.call, call.attempt), encode_body(value))

    def _answer_error(self, call: Call, error: BaseException, *, stopped: bool = False) -> None:
        failure = Failure(call.call, call.attempt, not isinstance(error, TransientError), next(self._numbers))
        self._send(Answer(call, failure, encode_body(to_wire(error)), stopped))

    def _sent_again(self, key: Key) -> bool:
        """Whether there is an answer of that call already: it is sent once more."""
        kept = self._kept.take(key)
        if kept is None:
            return False
        kept.message = kept.message._replace(number=next(self._numbers))
        self._send(kept)
        return True

    def _send(self, answer: Answer) -> None:
        answer.stopped = answer.stopped or (answer.call.call, answer.call.attempt) in self._stopped
        self._kept.put(answer)
        try:  # `suppress` would take longer than all the rest here
            self._link.send(answer.message, answer.body)
        except ConnectionLost:  # the broker has told the caller already that this member is gone
            return

    async def leave(self, reason: str, grace: float = 0.0) -> None:
        """Take nothing new, give what runs ``grace`` seconds, then fail it as `MemberLost`; returns when all is
        answered, at the latest 5 s after the grace (a task that refuses to be cancelled does not hold the exit up)."""
        self._leaving = True
        with suppress(ConnectionLost):  # the broker has let go of us
            self._link.send(Drain(), control=True)
        if self._running and grace > 0:
            await asyncio.wait(self._tasks(), timeout=grace)
        self._closing = reason
        running = self._tasks()
        await asyncio.sleep(0)  # as in `_cancel`
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=5.0)

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {task for _, task in self._running.values()}

    def leave_at_once(self, reason: str, crashed: bool) -> None:
        """The process is about to end, ``crashed`` if by itself: the broker is told and answers for what runs here.
        Closes the link."""
        self._closing = reason
        self._link.close(reason, Goodbye(reason, crashed))
