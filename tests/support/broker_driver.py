"""A broker's core fed by hand: peers by name, messages in, decoded messages out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zagent.broker.core import BrokerCore
from zagent.broker.dispatch import Assignment
from zagent.broker.pool import Member
from zagent.errors import MemberLost, from_wire, to_wire
from zagent.wire.codec import decode_body, decode_header, encode_body, encode_header
from zagent.wire.messages import BROKER, Call, Cancel, EndSession, Failure, Goodbye, Hello, Message, Reply

SECRET = "s3cret"


@dataclass
class Sent:
    """One message that left the core."""

    to: bytes
    message: Any
    frames: list[Any]

    @property
    def body(self) -> Any:
        return decode_body(self.frames[1:])

    @property
    def error(self) -> Exception:
        return from_wire(self.body)


@dataclass
class Driver:
    """``core`` and all that was sent since the last `take`."""

    core: BrokerCore
    assignments: list[Assignment]
    now: float = 0.0
    out: list[Sent] = field(default_factory=list)
    attempts: dict[bytes, int] = field(default_factory=dict)

    def _note(self, sends: Any) -> list[Sent]:
        made = [Sent(to, decode_header(frames[0]), list(frames)) for to, frames in sends]
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

    def join(self, name: str, credits: int = 8, *, pool: str = "engine", epoch: int = 1, facts: Any = None) -> bytes:
        """A member; returns its nonce, which is `name/epoch`."""
        nonce = f"{name}/{epoch}".encode()
        sent = self.hello(nonce, Hello(pool, name, epoch, credits, SECRET, "0"), facts)
        assert type(sent[0].message).__name__ == "Welcome", sent
        return nonce

    def caller(self, name: str = "caller", secret: str = "") -> bytes:
        nonce = name.encode()
        self.hello(nonce, Hello("", name, 0, 0, secret, "0"))
        return nonce

    def call(self, nonce: bytes, call: bytes, session: str = "", **fields: Any) -> list[Sent]:
        """A call to the engine pool on the data lane (``lane=b"c"``: on the control lane)."""
        lane = fields.pop("lane", b"d")
        body = fields.pop("body", None)
        made = Call(call, fields.pop("attempt", 1), fields.pop("pool", "engine"), "generate", session)._replace(
            **fields
        )
        self.attempts[call] = made.attempt
        return self.say(lane + nonce, made, body)

    def broker(self, nonce: bytes, method: str, argument: Any = None) -> Any:
        """A call to the broker itself: its value, or its error raised."""
        sent = self.say(b"c" + nonce, Call(b"own", 1, BROKER, method), argument)
        answer = next(s for s in sent if s.to == b"c" + nonce and getattr(s.message, "call", b"") == b"own")
        if isinstance(answer.message, Failure):
            raise answer.error
        return answer.body

    def reply(self, member: bytes, call: bytes, attempt: int | None = None, value: Any = "done") -> list[Sent]:
        return self.say(b"d" + member, Reply(call, attempt or self.attempts.get(call, 1)), value)

    def fail(self, member: bytes, call: bytes, error: Exception | None = None, *, accepted: bool = True) -> list[Sent]:
        made = Failure(call, self.attempts.get(call, 1), accepted)
        return self.say(b"d" + member, made, to_wire(error or MemberLost("gone")))

    def cancel(self, nonce: bytes, call: bytes) -> list[Sent]:
        return self.say(b"c" + nonce, Cancel(call, self.attempts.get(call, 1)))

    def end_session(self, nonce: bytes, session: str) -> list[Sent]:
        return self.say(b"d" + nonce, EndSession("engine", session))

    def goodbye(self, nonce: bytes) -> list[Sent]:
        return self.say(b"c" + nonce, Goodbye())

    def unsendable(self, to: bytes, frames: list[Any] | None = None) -> list[Sent]:
        """``frames`` did not reach ``to``; by default something that is no call."""
        return self._note(self.core.unsendable(to, frames or [encode_header(Goodbye())], self.now))

    def tick(self) -> list[Sent]:
        return self._note(self.core.tick(self.now))

    def take(self) -> list[Sent]:
        """What was sent since the last time."""
        sent, self.out = self.out, []
        return sent

    def member(self, name: str, pool: str = "engine") -> Member:
        return self.core.pools[pool].members[name]

    def in_flight(self, pool: str = "engine") -> dict[str, int]:
        return {name: member.in_flight for name, member in self.core.pools[pool].members.items()}

    def quiet(self) -> bool:
        """Whether nothing is held anywhere: no lease, no waiting call, no call known of any caller."""
        members = [m for pool in self.core.pools.values() for m in pool.members.values()]
        return (
            self.core.dispatch.pending == 0
            and not any(pool.waiting for pool in self.core.pools.values())
            and not any(m.waiting or m.leases for m in members)
            and not any(caller.calls for caller in self.core.roster.callers.values())
        )


def driver(**core: Any) -> Driver:
    """A fresh core."""
    assignments: list[Assignment] = []
    return Driver(BrokerCore(secret=SECRET, record=assignments.append, **core), assignments)


def served_by(sent: list[Sent]) -> str:
    """Name of the member that a call was sent to."""
    calls = [s for s in sent if isinstance(s.message, Call)]
    assert len(calls) == 1, sent
    return calls[0].to[1:].decode().partition("/")[0]
