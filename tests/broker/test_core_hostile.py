"""What hostile peers cost and learn is bounded."""

from __future__ import annotations

import msgpack

from support.broker_driver import driver
from zagent import __version__
from zagent.broker.own import ARGUMENT_MAX
from zagent.errors import DecodeError, ProtocolError, VersionMismatch
from zagent.wire.messages import BROKER, Call, Hello


def test_a_refusal_has_no_traceback() -> None:
    """Strangers need not know where our files lie, and to write one takes ten times as long as all the rest."""
    d = driver()
    refusals = [
        *d.hello(b"12345678", Hello("engine", "m0", 1, 8, "guessed", __version__)),
        *d.raw(b"d12345678", [msgpack.packb([99, 1])]),
        *d.say(b"d" + d.caller(), Call(b"somebody-else's.", 1, "engine", "generate")),
    ]
    assert [type(sent.error) for sent in refusals] == [ProtocolError, ProtocolError, VersionMismatch, ProtocolError]
    assert {sent.body["traceback"] for sent in refusals} == {""}
    caller = d.caller()
    (sent,) = d.call(caller, b"1", pool=BROKER, method="nothing")
    assert sent.body["traceback"] == ""


def test_an_argument_of_the_brokers_own_methods_is_short() -> None:
    """A long one is not even read."""
    d = driver()
    caller = d.caller()
    (sent,) = d.call(caller, b"1", pool=BROKER, method="status", body="x" * ARGUMENT_MAX)
    assert isinstance(sent.error, DecodeError)
    d.broker(caller, "status", "x" * (ARGUMENT_MAX - 10))
