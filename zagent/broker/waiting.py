"""Calls that no member has (yet)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from zagent.errors import EncodeError
from zagent.wire.codec import encode_header
from zagent.wire.messages import Call

if TYPE_CHECKING:
    from zagent.broker.pool import Caller

#: Id and attempt: a further attempt may come while a cancelled one before it still runs out.
CallKey: TypeAlias = "tuple[bytes, int]"


@dataclass(slots=True, eq=False)
class Waiting:
    """One of them."""

    key: CallKey
    call: Call
    frames: Sequence[Any]
    caller: Caller
    to: bytes  #: identity of the lane that wants the answer
    arrived: float  #: s
    number: int  #: order of arrival
    deadline: float | None = None  #: s
    queue: WaitQueue | None = None  #: where it waits
    aboard_s: float = 0.0  #: of a suspect: how long its member lived with it

    @property
    def turn(self) -> tuple[bool, int]:
        """Who is served first: the smaller."""
        return self.call.attempt == 1, self.number

    def message(self, now: float) -> Sequence[Any]:
        """The call's frames; of one that has waited, with the time that is left."""
        if self.deadline is None:
            return self.frames
        remaining = max(0, min(self.call.remaining_ms, int((self.deadline - now) * 1000)))  # floats round up, too
        with suppress(EncodeError):  # a header at the very limit, to which fields that were left out would be added
            return [encode_header(self.call._replace(remaining_ms=remaining)), *self.frames[1:]]
        return self.frames


class WaitQueue:
    """Waiting calls: those that were sent again, then fresh ones, each first in, first out; any one can be taken out at
    O(1)."""

    def __init__(self) -> None:
        self._again: OrderedDict[CallKey, Waiting] = OrderedDict()
        self._fresh: OrderedDict[CallKey, Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._again) + len(self._fresh)

    def put(self, entry: Waiting) -> None:
        entry.queue = self
        (self._again if entry.call.attempt > 1 else self._fresh)[entry.key] = entry

    def first(self) -> Waiting:
        """The next to be served. Raises `StopIteration` when empty."""
        return next(iter((self._again or self._fresh).values()))

    def take(self) -> Waiting:
        """The next to be served, removed."""
        return self.remove(self.first())

    def remove(self, entry: Waiting) -> Waiting:
        """Take out one that is in here."""
        entry.queue = None
        return (self._again if entry.call.attempt > 1 else self._fresh).pop(entry.key)

    def empty(self) -> list[Waiting]:
        """All of them, removed."""
        return [self.take() for _ in range(len(self))]


class SuspectQueue(WaitQueue):
    """Those that were aboard for the shortest time first, at O(waiting): the culprit is most likely among them."""

    def first(self) -> Waiting:
        return min([*self._again.values(), *self._fresh.values()], key=lambda entry: entry.aboard_s)


class Waits(dict[CallKey, Waiting]):
    """All of them by call, kept in step with the queues and with what callers know of theirs."""

    def put(self, entry: Waiting, queue: WaitQueue) -> None:
        """It waits, or does so elsewhere than before."""
        self[entry.key] = entry
        entry.caller.calls.add(entry.key)
        queue.put(entry)

    def forget(self, entry: Waiting) -> None:
        """It waits no more, if it did."""
        self.pop(entry.key, None)
        entry.caller.calls.discard(entry.key)
        if entry.queue is not None:
            entry.queue.remove(entry)

    def overdue(self, now: float) -> list[Waiting]:
        """Those whose time is up."""
        return [entry for entry in self.values() if entry.deadline is not None and entry.deadline <= now]
