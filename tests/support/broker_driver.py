"""A broker's core fed by hand: peers by name, messages in, decoded messages out.

Calls are named here by what follows their caller's nonce in the id (``b"1"``), so that tests read well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zagent import __version__
from zagent.broker.core import BrokerCore
from zagent.broker.pool import Member
from zagent.broker.record import Assignment
from zagent.broker.roster import NONCE
from zagent.errors import MemberLost, from_wire, to_wire
from zagent.wire.codec import decode_body, decode_header, encode_body, encode_header
from zagent.wire.messages import (
    BROKER,
    Call,
    Cancel,
    EndSession,
    Exited,
    Failure,
    Goodbye,
    Health,
    Hello,
    Message,
    Progress,
    Pulse,
    Reply,
    Welcome,
)

SECRET = "s3cret"


def nonce_of(name: str, epoch: int | None = None) -> bytes:
    """A peer's nonce, from which its name can be read: `m0/1....`."""
    nonce = (name if epoch is None else f"{name}/{epoch}").encode().ljust(NONCE, b".")
    assert len(nonce) == NONCE, nonce
    return nonce


def name_of(nonce: bytes) -> str:
    """The member's name in its nonce."""
    return nonce.decode().partition("/")[0]


@dataclass
class Sent:
    """One message that left the core; ``message`` names its call as the tests do."""

    to: bytes
    message: Any
    frames: list[Any]

    @property
    def body(self) -> Any:
        return decode_body(self.frames[1:])

    @property
    def error(self) -> Any:
        return from_wire(self.body)


def sent(to: bytes, frames: Sequence[Any]) -> Sent:
    message: Any = decode_header(frames[0])
    if getattr(message, "call", b""):
        message = message._replace(call=message.call[NONCE:])
    return Sent(to, message, list(frames))


@dataclass
class Driver:
    """``core`` and all that was sent since the last `take`."""

    core: BrokerCore
    assignments: list[Assignment]
    options: dict[str, Any]
    now: float = 0.0
    out: list[Sent] = field(default_factory=list)
    attempts: dict[bytes, int] = field(default_factory=dict)  # the last of each call
    owners: dict[bytes, bytes] = field(default_factory=dict)  # nonce of each call's caller

    def restart(self, *expected: tuple[str, str, int], holders: Sequence[bytes] = ()) -> None:
        """Another broker in the place of this one, that knows nobody yet."""
        places = {"incarnation": self.core.incarnation + 1, "expected": expected, "holders": holders}
        self.core = make_core(self.assignments, self.options, **places, now=self.now)
        self.out.clear()

    def _note(self, sends: Any) -> list[Sent]:
        made = [sent(to, frames) for to, frames in sends]
        self.out.extend(made)
        return made

    def raw(self, sender: bytes, frames: list[Any]) -> list[Sent]:
        return self._note(self.core.frames(sender, frames, self.now))

    def say(self, sender: bytes, message: Message, body: Any = None) -> list[Sent]:
        return self.raw(sender, [encode_header(message), *encode_body(body)])

    def hello(self, nonce: bytes, hello: Hello, facts: Any = None) -> list[Sent]:
        """On both lanes."""
        facts = {} if facts is None else facts
        return self.say(b"d" + nonce, hello, facts) + self.say(b"c" + nonce, hello, facts)

    def join(
        self, name: str, credits: int = 8, *, pool: str = "engine", epoch: int = 1, facts: Any = None, held: Any = ()
    ) -> bytes:
        """A member, with the calls (call, session, running) that it holds; returns its nonce."""
        nonce = nonce_of(name, epoch)
        listed = [
            [self.id(call), self.attempts.get(call, 1), session, "generate", running] for call, session, running in held
        ]
        facts = {**(facts or {}), "held": listed} if listed else facts
        made = self.hello(nonce, Hello(pool, name, epoch, credits, SECRET, __version__), facts)
        assert type(made[0].message).__name__ == "Welcome", made
        return nonce

    def caller(self, name: str = "caller", secret: str = "", **facts: Any) -> bytes:
        nonce = nonce_of(name)
        self.hello(nonce, Hello("", name, 0, 0, secret, __version__), facts)
        return nonce

    def launcher(self) -> bytes:
        return self.caller("launcher", SECRET)

    def id(self, call: bytes) -> bytes:
        """What the wire calls ``call``."""
        return self.owners[call] + call

    def call(self, nonce: bytes, call: bytes, session: str = "", **fields: Any) -> list[Sent]:
        """A call to the engine pool on the data lane (``lane=b"c"``: on the control lane)."""
        lane = fields.pop("lane", b"d")
        body = fields.pop("body", None)
        self.owners[call] = nonce
        attempt = fields.pop("attempt", self.attempts.get(call, 1))
        made = Call(nonce + call, attempt, fields.pop("pool", "engine"), "generate", session)._replace(
            **{"incarnation": self.core.incarnation, **fields}
        )
        self.attempts[call] = made.attempt
        return self.say(lane + nonce, made, body)

    def broker(self, nonce: bytes, method: str, argument: Any = None) -> Any:
        """A call to the broker itself: its value, or its error raised."""
        made = self.say(b"c" + nonce, Call(nonce + b"own", 1, BROKER, method), argument)
        answer = next(s for s in made if s.to == b"c" + nonce and getattr(s.message, "call", b"") == b"own")
        if isinstance(answer.message, Failure):
            raise answer.error
        return answer.body

    def key(self, call: bytes, attempt: int | None = None) -> tuple[bytes, int]:
        return self.id(call), attempt or self.attempts.get(call, 1)

    def reply(
        self, member: bytes, call: bytes, attempt: int | None = None, value: Any = "done", *, number: int = 0
    ) -> list[Sent]:
        return self.say(b"d" + member, Reply(*self.key(call, attempt), number), value)

    def progress(self, member: bytes, call: bytes, value: Any = "part") -> list[Sent]:
        return self.say(b"d" + member, Progress(*self.key(call)), value)

    def fail(
        self,
        member: bytes,
        call: bytes,
        error: Exception | None = None,
        *,
        accepted: bool = True,
        attempt: int | None = None,
        number: int = 0,
    ) -> list[Sent]:
        made = Failure(*self.key(call, attempt), accepted, number)
        return self.say(b"d" + member, made, to_wire(error or MemberLost("gone")))

    def cancel(self, nonce: bytes, call: bytes, attempt: int | None = None) -> list[Sent]:
        self.owners.setdefault(call, nonce)
        return self.say(b"c" + nonce, Cancel(*self.key(call, attempt)))

    def end_session(self, nonce: bytes, session: str) -> list[Sent]:
        return self.say(b"d" + nonce, EndSession("engine", session))

    def goodbye(self, nonce: bytes, reason: str = "", *, crashed: bool = False) -> list[Sent]:
        return self.say(b"c" + nonce, Goodbye(reason, crashed))

    def exited(self, launcher: bytes, name: str, epoch: int = 1, *, crashed: bool = False) -> list[Sent]:
        return self.say(b"c" + launcher, Exited("engine", name, epoch, "it ended", crashed))

    def health(self, launcher: bytes, name: str, epoch: int = 1, *, slow: bool) -> list[Sent]:
        return self.say(b"c" + launcher, Health("engine", name, epoch, slow))

    def unsendable(self, to: bytes, frames: list[Any] | None = None) -> list[Sent]:
        """``frames`` did not reach ``to``; by default something that is no call."""
        return self._note(self.core.unsendable(to, frames or [encode_header(Goodbye())], self.now))

    def tick(self, seconds: float = 0.0) -> list[Sent]:
        """``seconds`` pass; what was sent then, but for signs of life."""
        self.now += seconds
        return [s for s in self._note(self.core.tick(self.now)) if not isinstance(s.message, (Pulse, Welcome))]

    def take(self) -> list[Sent]:
        """What was sent since the last time."""
        taken, self.out = self.out, []
        return taken

    def member(self, name: str, pool: str = "engine") -> Member:
        return self.core.pools[pool].members[name]

    def in_flight(self, pool: str = "engine") -> dict[str, int]:
        return {name: member.in_flight for name, member in self.core.pools[pool].members.items()}

    def quiet(self) -> bool:
        """Whether nothing is held anywhere: no lease, no waiting call, no call known of any caller."""
        members = [m for pool in self.core.pools.values() for m in pool.members.values()]
        return (
            self.core.dispatch.pending == 0
            and not self.core.dispatch.leases
            and not any(pool.waiting or pool.suspects for pool in self.core.pools.values())
            and not any(m.waiting or m.leases or m.directed or m.suspects for m in members)
            and not any(caller.calls for caller in self.core.roster.callers.values())
        )


def make_core(assignments: list[Assignment], options: dict[str, Any], **more: Any) -> BrokerCore:
    return BrokerCore(secret=SECRET, record=assignments.append, **{**options, **more})


def driver(**options: Any) -> Driver:
    """A fresh core."""
    assignments: list[Assignment] = []
    return Driver(make_core(assignments, options), assignments, options)


def served_by(made: list[Sent]) -> str:
    """Name of the member that a call was sent to."""
    calls = [s for s in made if isinstance(s.message, Call)]
    assert len(calls) == 1, made
    return name_of(calls[0].to[1:])


def given(made: list[Sent]) -> list[tuple[bytes, str]]:
    """Which calls were sent to which members, in order."""
    return [(s.message.call, name_of(s.to[1:])) for s in made if isinstance(s.message, Call)]
