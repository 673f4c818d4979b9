"""What processes say to each other.

A message is a header frame and body frames. The header is a positional msgpack list ``[wire version, kind, *fields]``
of one of the tuples below; it only ever grows at the end, so an older peer ignores what it does not know and a newer
one fills in defaults. The broker reads headers only. Deadlines travel as *remaining* milliseconds, since the clocks of
two hosts differ; −1 = none.

A call is named by ``call`` (16 bytes, unique for ever: the caller's nonce and a counter) and ``attempt`` (1, 2, …),
which its caller alone counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Raised when the meaning of an existing field changes; growing at the end does not count.
WIRE_VERSION = 1
#: Of weights; 0 = those that engines start with. `rollout_versions` are int64.
LAST_VERSION = 2**63 - 1


class Call(NamedTuple):
    """Caller → broker → member: run ``method``. Body: its argument."""

    call: bytes
    attempt: int
    pool: str  #: which pool; `BROKER` = the broker answers itself
    method: str
    session: str = ""  #: sticky key; "" = none
    remaining_ms: int = -1
    member: str = ""  #: this member and no other, past balancing and credits (control calls)
    incarnation: int = 0  #: the broker's, as the caller knows it
    suspect: bool = False  #: it was aboard when a member died by itself: it may be what killed it
    group: str = ""  #: calls of one group have the same beginning, and may be brought together; "" = none


class Reply(NamedTuple):
    """Member → broker → caller: the result. Body: the value."""

    call: bytes
    attempt: int
    number: int = 0  #: of the member's answers, counted as they are sent; 0 = the broker's own


class Failure(NamedTuple):
    """Member or broker → caller: the call ended in an error. Body: `zagent.errors.to_wire` of it."""

    call: bytes
    attempt: int
    #: The member took the call on; False lets the broker forget the session's tentative binding.
    accepted: bool = True
    number: int = 0  #: as in `Reply`


class Progress(NamedTuple):
    """Member → broker → caller: the part of the answer that has come since the last one. Body: what the method makes of
    it."""

    call: bytes
    attempt: int


class Cancel(NamedTuple):
    """Caller → broker → member, control lane: stop running the call; it is still answered once."""

    call: bytes
    attempt: int


class EndSession(NamedTuple):
    """Caller → broker: the trajectory is over, forget where it was bound."""

    pool: str
    session: str


class Hello(NamedTuple):
    """Peer → broker on each lane, again whenever the broker may have forgotten the peer: said twice, it changes
    nothing but the version of a member's weights and what it lacks. ``pool`` "" = a caller only. Body: facts about the
    peer (a map); a member's `held` are the calls that it runs or whose answers it keeps: ``[[call, attempt, session,
    method, running], …]``, `version` and `weights` (a directory) are what it serves, and `lacks` lists what it needs
    before it can. A caller's `gates` are the pools whose gate it keeps closed, each with the reason (``[[pool, reason],
    …]``), and its `turns` those whose members it changes."""

    pool: str
    name: str
    epoch: int  #: the launcher's spawn count of that member
    credits: int  #: calls it takes at once
    secret: str  #: the launcher's join secret; members and the launcher only
    package: str  #: version of zagent: members of a cluster have the same
    incarnation: int = 0  #: of the broker that welcomed the peer last
    #: Which of the link's connections speaks, counted. The broker of that incarnation, if it knows the peer by another
    #: one, forgets it first: with that connection all was lost that was under way.
    connection: int = 0
    python: str = ""  #: the interpreter it runs under, for the error text


class Welcome(NamedTuple):
    """Broker → peer, control lane, when both lanes have said hello. Body: the cluster's facts (a map)."""

    incarnation: int
    known: bool = False  #: the peer never was forgotten: its calls are under way


class HelloWanted(NamedTuple):
    """Broker → peer, on the lane that spoke: what you said is dropped, for I do not know you; say hello."""


class Pulse(NamedTuple):
    """Broker → peer, control lane, once a second: I am there."""

    incarnation: int


class Passed(NamedTuple):
    """Broker → member, data lane, so that it comes after the calls that may want an answer again: your answers up to
    that ``number`` left me a second ago or earlier."""

    number: int


class Goodbye(NamedTuple):
    """Peer → broker: I leave. What a caller still runs is cancelled; a member's leases are lost."""

    reason: str = ""
    crashed: bool = False  #: as in `Exited`


class Drain(NamedTuple):
    """Member or launcher → broker: give this member nothing new. ``name`` "" = the sender itself."""

    pool: str = ""
    name: str = ""


class Exited(NamedTuple):
    """Launcher → broker: this member's process is gone."""

    pool: str
    name: str
    epoch: int
    reason: str
    crashed: bool = False  #: it died by itself, so that one of its calls may be the reason


class Health(NamedTuple):
    """Launcher → broker: this member answers slowly or not at all, and is to be spared; or is well again."""

    pool: str
    name: str
    epoch: int
    slow: bool


class Outdated(NamedTuple):
    """Broker → member, control lane: others of the pool serve newer weights. It gets no calls until it has loaded them,
    and says so by a hello."""

    version: int
    weights: str  #: directory of safetensors; "" = they are in nobody's files


class Abandoned(NamedTuple):
    """Launcher → broker: the pool's members are gone and none will be started again. Body: `to_wire` of the error that
    its calls end in from now on."""

    pool: str


Message = (
    Call
    | Reply
    | Failure
    | Progress
    | Cancel
    | EndSession
    | Hello
    | Welcome
    | HelloWanted
    | Pulse
    | Goodbye
    | Drain
    | Exited
    | Health
    | Abandoned
    | Outdated
    | Passed
)

#: Wire number of each kind; numbers are never used again for something else.
KINDS: dict[int, type[Message]] = {
    1: Call,
    2: Reply,
    3: Failure,
    4: Cancel,
    5: EndSession,
    6: Hello,
    7: Welcome,
    8: Goodbye,
    9: Drain,
    10: Exited,
    11: Abandoned,
    12: Progress,
    13: HelloWanted,
    14: Pulse,
    15: Health,
    16: Outdated,
    17: Passed,
}

#: Pool name of calls that the broker itself answers (zagent/broker/own.py).
BROKER = "broker"


def may_repeat(method: str, facts: Mapping[str, Any]) -> bool:
    """Whether a call of ``method`` that a member with those ``facts`` (of its hello) may have begun can be sent again.

    Services list such methods under `idempotent`; engines and workers have no such fact, and none but such methods.
    """
    listed = facts.get("idempotent")
    return not isinstance(listed, list) or method in listed
